"""From the stream into the log, and from the log into steps. Rank 0 only.

Taking in writes facts; composing a step decides, at the version that it starts from, and writes the decision down before
anything is trained. A restart reads the same decisions back, so it trains the same steps.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from async_rl.algorithms.staleness import (
    NO_RULES,
    DropReason,
    DropRules,
    GroupVerdict,
    InvalidReason,
    Stragglers,
    TooOld,
    judge,
    must_wait_for,
    oldest_version,
)
from async_rl.config.run import RunConfig
from async_rl.errors import CodecError, EpochFenced
from async_rl.logs import Event, get_logger
from async_rl.run_dir.intake_log import Compaction, IntakeLog, Position, count_ends, unsettled_ends
from async_rl.run_dir.records import DeadRecord, EndRecord, GroupRecord, GroupUse, Record, SkipRecord, StepRecord
from async_rl.trainer.untrained import Untrained
from protocol.codec import decode_group
from protocol.deliveries import group_of
from protocol.lease import Work
from protocol.messages import EndReason, TrajectoryGroup
from protocol.streams import Delivery, Finished, Streams


@dataclass(frozen=True, slots=True)
class BatchSettings:
    """How steps are composed."""

    groups_per_step: int
    steps_per_batch: int
    max_lag: int
    stragglers: Stragglers
    seed: int
    on_wait_timeout: TooOld = "drop"
    rules: DropRules = NO_RULES

    @staticmethod
    def from_config(config: RunConfig) -> BatchSettings:
        return BatchSettings(
            groups_per_step=config.trainer.groups_per_step,
            steps_per_batch=config.trainer.steps_per_batch,
            max_lag=config.staleness.max_lag,
            stragglers=config.staleness.stragglers,
            on_wait_timeout=config.staleness.on_wait_timeout,
            seed=config.seed,
            rules=DropRules(config.algorithm.mask_truncated, config.algorithm.dynamic_sampling),
        )

    def judge(
        self, group: TrajectoryGroup, version: int, quarantined: Mapping[int, InvalidReason] | None = None
    ) -> GroupVerdict:
        """What a step at `version` does with a group, of which some members may be `quarantined`."""
        return judge(
            group,
            current_version=version,
            max_lag=self.max_lag,
            stragglers=self.too_old,
            rules=self.rules,
            quarantined=quarantined,
        )

    @property
    def too_old(self) -> TooOld:
        """What becomes of work beyond max_lag."""
        return self.on_wait_timeout if self.stragglers == "wait" else self.stragglers


@dataclass(frozen=True, slots=True, eq=False)
class ComposedStep:
    """A step record with the groups that it names, in its order."""

    record: StepRecord
    groups: tuple[TrajectoryGroup, ...]
    verdicts: tuple[GroupVerdict, ...]


@dataclass(slots=True, eq=False)
class _Pending:
    """A group in the log that no step names yet, with its verdict at the version last asked for."""

    group: TrajectoryGroup
    version: int = -1
    verdict: GroupVerdict | None = None
    is_vetted: bool = False
    quarantined: dict[int, InvalidReason] = field(default_factory=dict)


class Intake:
    """The log's writer and the queue of groups that wait for a step."""

    def __init__(
        self,
        streams: Streams,
        log: IntakeLog,
        settings: BatchSettings,
        *,
        on_invalid: Callable[[TrajectoryGroup, int, InvalidReason], object] = lambda group, member, reason: None,
    ) -> None:
        """on_invalid: told of every invalid member of a group when a step ends it."""
        self._streams = streams
        self._log = log
        self._settings = settings
        self._events = get_logger()
        self._on_invalid = on_invalid
        self._pending: dict[str, _Pending] = {}
        self._discarded = sum(count for end, count in count_ends(log.index).items() if end != EndReason.TRAINED)
        self.untrained = Untrained()
        self._writing = asyncio.Lock()
        self.work = Work()
        """Writing the log: a disk that does not answer stands still here."""
        self.groups_without_signal = 0
        """Groups in a row, up to now, that ended untrained because their rewards did not differ."""
        self._load_pending()

    @property
    def num_pending(self) -> int:
        return len(self._pending)

    @property
    def num_steps(self) -> int:
        """Step records in the log."""
        return self._log.index.num_steps

    @property
    def discarded(self) -> int:
        """Groups that ended untrained, so far, by the log."""
        return self._discarded

    # -- stream → log ------------------------------------------------------------------------------------------------
    async def take_in(self, deliveries: Sequence[Delivery]) -> int:
        """Log what is new, make it durable, and only then finish the entries. Returns the number of new groups.

        Raises: EpochFenced if a newer trainer has started; IntakeLogError if the disk is full (the entries stay queued).
        """
        readable: list[tuple[Delivery, TrajectoryGroup]] = []
        for delivery in deliveries:
            try:
                readable.append((delivery, group_of(delivery)))
            except CodecError as error:
                self._events.error(Event.TASK_DEAD, entry_id=delivery.entry_id, reason=f"unreadable group: {error}")
                await self._streams.bury(delivery, task_id=delivery.task_id, reason=f"unreadable group: {error}")
        fresh = {group.task_id: (delivery, group) for delivery, group in readable if not self._log.index.knows(group.task_id)}
        await self._write([GroupRecord(task_id, item[0].payload) for task_id, item in fresh.items()])
        for task_id, (_, group) in fresh.items():  # before `finish`: nothing is in flight no more and not here yet
            self._pending[task_id] = _Pending(group)
        if readable:
            await self._streams.finish(
                self._log.epoch, [Finished(delivery.entry_id, group.task_id) for delivery, group in readable]
            )
        return len(fresh)

    async def record_dead(self, deaths: Sequence[tuple[str, str]]) -> None:
        """Log the end of tasks that were dead-lettered: (task id, reason)."""
        fresh = [(task_id, reason) for task_id, reason in deaths if not self._log.index.knows(task_id)]
        await self._write([DeadRecord(task_id, reason) for task_id, reason in fresh])
        self._discarded += len(fresh)

    async def record_skip(self, step: int, reason: str) -> None:
        """Log that a step's gradient was not finite, so nothing was applied; its groups end as dropped."""
        if step in self._log.index.skipped:
            return
        await self._write([SkipRecord(step, reason)])
        self._discarded += sum(use.end is EndReason.TRAINED for use in self._log.index.step(step).groups)

    async def record_end(self, outstanding: Iterable[str], *, issued: int) -> tuple[str, ...]:
        """Log what was issued and not used. Returns the ids."""
        index = self._log.index
        ended = unsettled_ends(index)
        left = {*outstanding, *self._pending} - ended.keys()
        unused = tuple(sorted(task_id for task_id in left if task_id not in index.settled))
        issued = max(issued, count_ends(index).total() + len(unused))  # an emptied server may have forgotten some
        await self._write([EndRecord(unused, issued)])
        self._pending.clear()
        return unused

    # -- looked at before a step ------------------------------------------------------------------------------------------
    def take_unvetted(self, version: int) -> list[TrajectoryGroup]:
        """Trainable groups that this was not asked for before, oldest first."""
        fresh = [pending for task_id in self._trainable(version) if not (pending := self._pending[task_id]).is_vetted]
        for pending in fresh:
            pending.is_vetted = True
        return sorted((pending.group for pending in fresh), key=oldest_version)

    def quarantine(self, task_id: str, member: int, reason: InvalidReason) -> None:
        """Make a member of a waiting group invalid: whatever step ends the group says so."""
        pending = self._pending[task_id]
        pending.quarantined[member] = reason
        pending.version = -1

    # -- log → steps -------------------------------------------------------------------------------------------------
    def has_batch(self, version: int, *, steps: int) -> bool:
        """Whether a batch of `steps` whole steps could be drawn at `version`."""
        wanted = self._settings.groups_per_step * steps
        return len(self._pending) >= wanted and len(self._trainable(version)) >= wanted

    def waits_for(self, in_flight: Mapping[str, int], version: int, *, steps: int) -> tuple[str, ...]:
        """Started groups (task id → version) that would outlive max_lag if a batch were drawn now: see `must_wait_for`.

        `in_flight` may be older than what was taken in since: what the log knows is not in flight.
        """
        return must_wait_for(
            {task_id: started for task_id, started in in_flight.items() if not self._log.index.knows(task_id)},
            [oldest_version(self._pending[task_id].group) for task_id in self._trainable(version)],
            current_version=version,
            max_lag=self._settings.max_lag,
            groups_per_step=self._settings.groups_per_step,
            steps=steps,
        )

    async def end_untrainable(self, version: int) -> None:
        """Record the end of groups that can never train any more."""
        untrainable = [task_id for task_id in self._pending if not self._verdict(task_id, version).trains]
        if untrainable:
            await self._record(untrainable, version, batch=-1, trains=False, last=True)

    async def compose_batch(self, version: int, *, steps: int, partial: bool) -> list[ComposedStep]:
        """Draw a batch of up to `steps` steps at `version` and record its first step; an empty list: not enough yet.

        Groups that can never train any more are ended at once, so that admission replaces them. With `partial` (the data
        has ended) whatever can be trained is drawn. The records of later steps follow by `compose_next`.
        """
        await self.end_untrainable(version)
        trainable = self._trainable(version)
        wanted = self._settings.groups_per_step * steps
        if len(trainable) < wanted and not (partial and trainable):
            return []
        # Oldest version first, then as they came: who waits longest ages out next, and slow prompts would lose to fast ones.
        drawn = sorted(trainable, key=lambda task_id: oldest_version(self._pending[task_id].group))[:wanted]
        size = self._settings.groups_per_step
        batch = self.num_steps
        chunks = [drawn[start : start + size] for start in range(0, len(drawn), size)]
        planned = tuple(map(tuple, chunks[1:]))
        pending = {task_id: self._pending[task_id].group for task_id in drawn}
        first = await self._record(chunks[0], version, batch=batch, trains=True, last=not planned, planned=planned)
        return [first, *planned_steps(first.record, pending.__getitem__, self._settings)]

    async def compose_next(self, planned: ComposedStep, version: int, *, batch: int, last: bool) -> ComposedStep:
        """Record a later step of a drawn batch, judged anew at the version that it starts from."""
        ids = [group.task_id for group in planned.groups]
        trains = any(self._verdict(task_id, version).trains for task_id in ids)
        return await self._record(ids, version, batch=batch, trains=trains, last=last)

    def recorded(self, record: StepRecord) -> ComposedStep:
        """A step that the log already has, with its groups read back: what a replay trains."""
        return recorded_step(record, self._read_group)

    def planned(self, first: StepRecord) -> list[ComposedStep]:
        """The later steps of the batch that `first` began, as they were drawn."""
        return planned_steps(first, self._read_group, self._settings)

    def _read_group(self, task_id: str) -> TrajectoryGroup:
        return decode_group(self._log.read_group(task_id))

    def recorded_steps(self, start: int) -> Sequence[StepRecord]:
        """Step records from index `start`. Raises: IntakeLogError if they are compacted away."""
        return tuple(self._log.index.steps_from(start))

    @property
    def position(self) -> Position:
        return self._log.position

    # -- after a checkpoint ------------------------------------------------------------------------------------------
    async def settle(self, below: int) -> None:
        """A complete checkpoint has the effect of the step records below `below`: keep their ends only."""
        async with self._writing:
            self._log.settle(below)

    def compact(self, below: int) -> Compaction | None:
        """Shrink the log below what the oldest kept checkpoint needs; see IntakeLog.compact. Blocks: call it in a thread."""
        return self._log.compact(below)

    def is_superseded(self) -> bool:
        """Whether a newer trainer has begun."""
        return self._log.is_superseded()

    def require_current(self) -> None:
        """Raises: EpochFenced if a newer trainer has begun: nothing that follows may be written anywhere."""
        if self._log.is_superseded():
            raise EpochFenced(
                f"epoch {self._log.epoch} is over: a newer trainer writes to {self._log.directory}; this one stops"
            )

    # -- details -----------------------------------------------------------------------------------------------------
    def _load_pending(self) -> None:
        """Groups that the log has and no record ends."""
        index = self._log.index
        ended = unsettled_ends(index)
        for task_id in index.groups:
            if task_id not in ended and task_id not in index.settled:
                self._pending[task_id] = _Pending(self._read_group(task_id))

    def _trainable(self, version: int) -> list[str]:
        return [task_id for task_id in self._pending if self._verdict(task_id, version).trains]

    def _verdict(self, task_id: str, version: int) -> GroupVerdict:
        pending = self._pending[task_id]
        if pending.verdict is None or pending.version != version:
            settings = self._settings
            pending.verdict = settings.judge(pending.group, version, pending.quarantined)
            pending.version = version
        return pending.verdict

    async def _record(
        self,
        ids: Sequence[str],
        version: int,
        *,
        batch: int,
        trains: bool,
        last: bool,
        planned: tuple[tuple[str, ...], ...] = (),
    ) -> ComposedStep:
        step = self.num_steps
        groups = tuple(self._pending[task_id].group for task_id in ids)
        verdicts = tuple(self._verdict(task_id, version) for task_id in ids)
        uses = tuple(
            GroupUse(task_id, verdict.end, verdict.to_record()) for task_id, verdict in zip(ids, verdicts, strict=True)
        )
        record = StepRecord(step, version, batch, trains, uses, self._settings.seed ^ step, last, planned)
        await self._write([record])
        for use, group, verdict in zip(uses, groups, verdicts, strict=True):
            del self._pending[use.task_id]
            self.untrained.count(group, verdict)
            for member, trajectory in enumerate(verdict.trajectories):
                if isinstance(trajectory.reason, InvalidReason):
                    self._on_invalid(group, member, trajectory.reason)
            if use.end is not EndReason.TRAINED:
                self._discarded += 1
                self._say_discarded(use, verdict)
            if use.end is EndReason.TRAINED:
                self.groups_without_signal = 0
            elif verdict.drop_reason is DropReason.NO_SIGNAL:
                self.groups_without_signal += 1
        return ComposedStep(record, groups, verdicts)

    def _say_discarded(self, use: GroupUse, verdict: GroupVerdict) -> None:
        event = Event.GROUP_DROPPED if use.end is EndReason.DROPPED else Event.GROUP_INVALID
        reasons = sorted({str(t.reason) for t in verdict.trajectories if t.reason is not None})
        lag = max((t.lag for t in verdict.trajectories if t.lag is not None), default=None)
        self._events.info(event, task_id=use.task_id, reasons=reasons, lag=lag, max_lag=verdict.max_lag)

    async def _write(self, records: Sequence[Record]) -> None:
        """Append and make durable; one writer at a time. Raises: EpochFenced if a newer trainer may have sealed us before."""
        async with self._writing:
            with self.work.doing("writing the intake log"):
                await asyncio.to_thread(self._append_and_sync, records)
        self.require_current()  # else a newer trainer may have sealed us before

    def _append_and_sync(self, records: Sequence[Record]) -> None:
        self._log.append(records)
        self._log.sync()


def recorded_step(record: StepRecord, read_group: Callable[[str], TrajectoryGroup]) -> ComposedStep:
    """A step as its record says, with its groups."""
    groups = tuple(read_group(use.task_id) for use in record.groups)
    verdicts = tuple(GroupVerdict.from_record(use.verdict) for use in record.groups)
    return ComposedStep(record, groups, verdicts)


def planned_steps(
    first: StepRecord, read_group: Callable[[str], TrajectoryGroup], settings: BatchSettings
) -> list[ComposedStep]:
    """The later steps of a batch as they looked when it was drawn: a function of its first record and the groups.

    The proximal policy is computed over them, then and at every replay alike. Their own records follow when their turn comes,
    and are judged anew.
    """
    steps: list[ComposedStep] = []
    for later, ids in enumerate(first.planned):
        version = first.version + 1 + later
        groups = tuple(read_group(task_id) for task_id in ids)
        verdicts = tuple(settings.judge(group, version) for group in groups)
        steps.append(ComposedStep(StepRecord(-1, version, first.batch, True, (), 0), groups, verdicts))
    return steps
