"""What the queue must do, whoever implements it (`redis_streams`, `memory_streams`; one contract suite over both).

Delivery is at least once. Effects are exactly once because every move is one atomic, idempotent operation:
issue (cursor), publish (the task's first acknowledgement), finish (fenced by the trainer's epoch).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Protocol

from msgspec import Struct

from protocol.errors import MessageTooLarge


class Stream(StrEnum):
    TASKS = "tasks"
    UNSCORED = "unscored"
    GROUPS = "groups"
    DEAD = "dead"


GROUP_OF: Mapping[Stream, str] = {Stream.TASKS: "rollout", Stream.UNSCORED: "reward", Stream.GROUPS: "trainer"}
"""The consumer group that reads each stream."""

SUSPECT_DELIVERIES = 2
"""After this many deliveries without success an entry is claimed alone: it may be what kills its workers."""


LONGEST_REASON = 2000


class RunState(StrEnum):
    """Life of a run, as the queue knows it."""

    NEW = "new"  # never opened
    RUNNING = "running"
    EXHAUSTED = "exhausted"  # the prompt source has no more rows; what is outstanding still gets done
    ENDED = "ended"  # nothing is issued or published any more


class Delivery(Struct, frozen=True, gc=False):
    """One entry handed to one consumer. It is theirs until acknowledged, or until their lease is gone."""

    stream: Stream
    entry_id: str
    payload: bytes
    delivery_count: int = 1
    task_id: str | None = None  # as the queue knows it, even if the payload cannot be read; None: not one of our entries


class IssuedTask(Struct, frozen=True, gc=False):
    """A task as the coordinator hands it to `issue`."""

    task_id: str
    payload: bytes


class Publication(Struct, frozen=True, gc=False):
    """A finished group, and the entry that it takes the place of."""

    source: Stream  # TASKS or UNSCORED
    entry_id: str
    target: Stream  # UNSCORED or GROUPS
    payload: bytes
    task_id: str | None = None  # of the delivery; None: looked up in the source entry, one more round trip


class Finished(Struct, frozen=True, gc=False):
    """A group that is in the intake log and may leave the stream."""

    entry_id: str
    task_id: str


@dataclass(frozen=True, slots=True)
class Started:
    """A task that somebody began: by whom, and the policy version that was served then. Its group is at least that new."""

    worker_id: str
    version: int


@dataclass(frozen=True, slots=True)
class DeadEntry:
    """An entry of `dead`: what could not be done, and why."""

    entry_id: str
    task_id: str | None  # None: no task of ours, or one that could not be told
    payload: bytes
    reason: str
    delivery_count: int  # in the stream that it came from
    source: Stream | None  # the stream that it came from
    age_s: float
    is_recorded: bool  # False: the trainer has not written the task's end to the log yet


@dataclass(frozen=True, slots=True)
class WorkerLease:
    """A live worker, as its heartbeat says."""

    worker_id: str
    role: str
    expires_in_s: float
    info: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class StreamDepth:
    """What waits in one stream. `length` counts all entries, `pending` those that a consumer holds."""

    length: int
    pending: int
    oldest_age_s: float | None


@dataclass(frozen=True, slots=True)
class Counters:
    """Where the run stands. All are absolute; `issued` and `cursor` move only by `issue`, the rest only by the trainer."""

    state: RunState
    epoch: int
    cursor: int  # rows of the prompt source consumed
    issued: int  # tasks ever issued
    discarded: int  # groups ended without being trained
    outstanding: int  # issued and not yet in the intake log
    lost_from: int = 0  # tasks of cursors in [lost_from, lost_below) may be missing: the server lost writes
    lost_below: int = 0

    @property
    def has_losses(self) -> bool:
        """Whether tasks wait to be readmitted; until then the run is not exhausted."""
        return self.lost_from < self.lost_below


class Streams(Protocol):
    """The run's queue. Every method may raise `protocol.errors.QueueUnavailable`; none waits without a bound."""

    async def open(self) -> None:
        """Connect, load scripts, create streams and groups if missing. Idempotent.

        Raises: QueueRefused if the server cannot be used safely (evicting memory policy, too old).
        """
        ...

    async def close(self) -> None: ...

    async def server_id(self) -> str:
        """The server process's run id; it changes when the server restarts or fails over."""
        ...

    # -- coordinator ---------------------------------------------------------------------------------------------
    async def issue(self, cursor: int, tasks: Sequence[IssuedTask], *, next_cursor: int) -> bool:
        """Add `tasks` and move the cursor from `cursor` to `next_cursor`, atomically.

        False, and nothing done, if the cursor is not at `cursor` (somebody already issued) or the run has ended.
        """
        ...

    async def mark_exhausted(self, cursor: int) -> bool:
        """RUNNING → EXHAUSTED if the cursor is still at `cursor`. True if the run is exhausted afterwards."""
        ...

    async def reissue(self, tasks: Sequence[IssuedTask]) -> int:
        """After a server lost writes: add those `tasks` that are outstanding and in no stream. Returns how many; idempotent."""
        ...

    async def readmit(self, tasks: Sequence[IssuedTask]) -> int:
        """After `restore`: add those `tasks` that are not outstanding. Returns how many; idempotent. Raises: QueueFull."""
        ...

    async def mended(self, lost_from: int, lost_below: int) -> None:
        """What was missing of these cursors is readmitted; no-op if the counters name another range by now."""
        ...

    async def counters(self) -> Counters: ...

    async def outstanding(self) -> frozenset[str]:
        """Task ids issued and not yet finished."""
        ...

    # -- every worker --------------------------------------------------------------------------------------------
    async def heartbeat(self, worker_id: str, role: str, *, ttl_s: float, info: Mapping[str, str] | None = None) -> None:
        """Create or renew the worker's lease. Renewal works on a full server."""
        ...

    async def leave(self, worker_id: str) -> None:
        """Give up the lease; what the worker still holds can be claimed at once."""
        ...

    async def workers(self) -> Sequence[WorkerLease]: ...

    async def read(self, stream: Stream, worker_id: str, *, count: int, block_s: float) -> Sequence[Delivery]:
        """Take up to `count` new entries; an empty result after `block_s` seconds without any (0: do not wait)."""
        ...

    async def claim(self, stream: Stream, worker_id: str, *, count: int) -> Sequence[Delivery]:
        """Take entries held by workers whose lease is gone, each with its true delivery count.

        What was delivered once before comes in batches. What was delivered more often may be what kills its workers, so it
        comes alone, and only to a worker that holds no other such entry: neighbours do not pay for it.

        Nothing is claimed for the length of a lease after a time in which no worker could renew its own (the server was
        away): everybody is to have the chance to renew first.
        """
        ...

    async def own_pending(self, stream: Stream, worker_id: str) -> Sequence[Delivery]:
        """What this worker already holds (after a reconnect). Reading it again does not raise its delivery count."""
        ...

    async def note_started(self, worker_id: str, versions: Mapping[str, int | None]) -> None:
        """The worker is about to begin these tasks under these versions (None: it stopped, and will begin again).

        Called before anything is sampled, so that whoever asks `in_flight` never misses a started task. Ids that are not
        outstanding are ignored; whoever begins a task later overwrites. Raises: QueueFull.
        """
        ...

    async def publish(self, publications: Sequence[Publication]) -> Sequence[bool]:
        """Move each: acknowledge the source entry, delete it, add the group. False: somebody already did (or the run ended).

        After a lost reply the retry answers False too, although the group is there: False is not an error.
        Raises: MessageTooLarge before anything is sent; QueueFull.
        """
        ...

    async def bury(self, delivery: Delivery, *, task_id: str | None, reason: str) -> bool:
        """Move an entry to `dead` with its reason. False if it was not pending any more.

        Its task stays outstanding until the trainer has recorded the end: see `newly_dead` and `finish_dead`.
        """
        ...

    # -- trainer -------------------------------------------------------------------------------------------------
    async def raise_epoch(self, at_least: int) -> int:
        """Start a new trainer incarnation: epoch = max(current + 1, at_least). Works on a full server."""
        ...

    async def take_over(self, epoch: int, *, count: int) -> Sequence[Delivery]:
        """Claim group entries held by consumers of older epochs. Raises: EpochFenced."""
        ...

    async def read_groups(self, epoch: int, *, count: int, block_s: float) -> Sequence[Delivery]:
        """Read `groups` as the trainer of `epoch`. Raises: EpochFenced; `take_over` gets what a fenced trainer took."""
        ...

    async def finish(self, epoch: int, finished: Sequence[Finished]) -> None:
        """The groups are in the log: acknowledge, delete, remove from outstanding. Works on a full server.

        Raises: EpochFenced.
        """
        ...

    async def in_flight(self) -> Mapping[str, Started]:
        """Task id → its start, of the tasks that were started and whose group is not finished: in an engine, in `unscored` or
        in `groups`. A task in an engine whose worker lost its lease is not among them: it will be started again."""
        ...

    async def newly_dead(self, epoch: int) -> Mapping[str, str]:
        """Task id → reason, of buried tasks whose end the log may not know yet. Raises: EpochFenced."""
        ...

    async def finish_dead(self, epoch: int, task_ids: Sequence[str]) -> None:
        """These ends are in the log: remove from outstanding and from `newly_dead`. The entries stay in `dead`.

        Works on a full server. Raises: EpochFenced.
        """
        ...

    async def report(self, epoch: int, *, discarded: int) -> None:
        """Set the absolute count of groups that ended untrained (from the log's step records). Raises: EpochFenced."""
        ...

    async def end_run(self, epoch: int) -> frozenset[str]:
        """→ ENDED; returns what was outstanding. Idempotent. Raises: EpochFenced."""
        ...

    async def clear(self, epoch: int) -> None:
        """After the end is in the log: empty the streams and `outstanding`. Raises: EpochFenced."""
        ...

    async def restore(self, epoch: int, *, cursor: int, issued: int, first: int = 0) -> bool:
        """After a server lost writes, or everything: put the cursor forward to what the trainer knows was issued.

        False, and nothing done, if the cursor is there already: a living one is never rewound. The counters then name the
        cursors (from `first` on) whose tasks may be missing; the coordinator readmits those that the log does not know.
        Raises: EpochFenced.
        """
        ...

    async def reopen(self, epoch: int) -> None:
        """ENDED → RUNNING, to train an ended run further. Raises: EpochFenced."""
        ...

    # -- people and monitors -------------------------------------------------------------------------------------
    async def depths(self) -> Mapping[Stream, StreamDepth]: ...

    async def dead_entries(self, *, count: int) -> Sequence[DeadEntry]:
        """Entries in `dead`, oldest first."""
        ...

    async def dead_entry(self, entry_id: str) -> DeadEntry | None:
        """One entry of `dead`; None if there is none of that id."""
        ...

    async def requeue(self, entry_id: str, *, repeat: IssuedTask, anew: bytes | None = None) -> str | None:
        """Give an entry of `dead` another chance, and take it out of `dead`. Atomic.

        While the log does not know its task's end, it goes back under its own id: into the stream that it came from, or, if
        its own bytes cannot be read, into `tasks` with the payload `anew`. Afterwards that task has ended for good, and
        `repeat`, another task under another id, is issued in its place (and counts as issued; admission makes up for it).

        Returns the id that is in the queue now. None, and nothing done: no such entry, one of no task, `repeat` is out
        already, or the run has ended. Should the trainer be just recording the end when the entry goes back, the recorded
        end stands: what is done for the task is then discarded. Raises: MessageTooLarge, QueueFull.
        """
        ...

    async def drop_dead(self, entry_id: str) -> bool:
        """Delete an entry of `dead`. Its task keeps the end that it has. False if there is none of that id."""
        ...


def short_reason(reason: str) -> str:
    """A reason that is kept in the queue and the log: of what is too long, the beginning (it may quote a bad message)."""
    return reason if len(reason) <= LONGEST_REASON else f"{reason[:LONGEST_REASON]}… ({len(reason)} characters)"


def check_size(payload: bytes, max_message_bytes: int, what: str) -> None:
    """Raise MessageTooLarge, naming both sizes, if `payload` is larger than allowed."""
    if len(payload) > max_message_bytes:
        raise MessageTooLarge(
            f"{what} has {len(payload)} bytes, more than redis.max_message_bytes={max_message_bytes}; "
            f"make group_size or max_new_tokens smaller, or raise the limit"
        )
