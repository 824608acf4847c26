"""The trainer's loop on rank 0: replay what the log says, then take in, compose, train, announce, push.

It waits for two things only, and says which: for groups, and (at the end) for the last push. Pushes run beside training.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from async_rl.config.run import RunConfig
from async_rl.logs import Event, get_logger
from async_rl.registry.versions import VersionRegistry
from async_rl.run_dir.intake_log import IntakeLog, newest_epoch
from async_rl.run_dir.layout import RunLayout
from async_rl.trainer.accounts import FinishedPushes, StepLines, TrainerClock
from async_rl.trainer.checkpoints import Checkpoints
from async_rl.trainer.early_warning import EarlyWarning
from async_rl.trainer.intake import BatchSettings, ComposedStep, Intake
from async_rl.trainer.learner import Learner
from async_rl.trainer.progress import Progress, StepResult
from async_rl.trainer.quarantine import Quarantine
from async_rl.trainer.reading import Reading
from async_rl.trainer.step_metrics import group_metrics, logprob_mismatch
from async_rl.trainer.vetting import Vetting
from async_rl.trainer.waiting import BatchWait
from async_rl.weights.publisher import Publisher, PushRequest
from protocol.lease import LeaseKeeper
from protocol.streams import RunState, Streams


@dataclass(frozen=True, slots=True)
class TrainerResult:
    """How a trainer's run ended."""

    policy_version: int
    finished: bool  # False: stopped before max_steps or the data's end


@dataclass(slots=True)
class _Batch:
    """A drawn batch: its first step, the later ones as they were drawn, and how many of them are done."""

    first: ComposedStep
    planned: Sequence[ComposedStep]
    done: int = 0

    @property
    def number(self) -> int:
        return self.first.record.batch

    @property
    def steps(self) -> list[ComposedStep]:
        return [self.first, *self.planned]


class TrainerLoop:
    """One incarnation of the trainer. `run` returns when the run has ended, or after `stop()`."""

    def __init__(
        self,
        config: RunConfig,
        *,
        streams: Streams,
        registry: VersionRegistry,
        learner: Learner,
        worker_id: str,
        now: Callable[[], float] = time.monotonic,
    ) -> None:
        self._config = config
        self._layout = RunLayout(Path(config.run_dir))
        self._streams = streams
        self._registry = registry
        self._learner = learner
        self._compute = learner.thread.run
        self._worker_id = worker_id
        self._now = now
        self._log = get_logger()
        self._clock = TrainerClock(now)
        self._pushes = FinishedPushes()
        self._quarantine = Quarantine(config)
        self._warning = EarlyWarning()
        self._vetting = Vetting(config, learner, self._quarantine)
        self._wait = BatchWait(config, streams, registry, idle=self._idle, vet=self._vetting.vet, now=now)
        self._epoch = 0
        self._trained_through = 0
        self._recent: list[list[int]] = []
        dtypes = {config.trainer.dtype, config.rollout.dtype, config.weights.wire_dtype}
        self._is_exact = dtypes == {"float32"} and config.rollout.kv == "recompute"

    def stop(self) -> None:
        """Finish the current step, write a checkpoint, end."""
        self._wait.stop()

    async def run(self) -> TrainerResult:
        """Train until max_steps, the data's end or `stop()`.

        Raises: EpochFenced if a newer trainer starts; IntakeLogError, CheckpointError; DeadlineExceeded if no group arrives
        for trainer.idle_timeout_s.
        """
        await self._streams.open()
        progress = await self._compute(self._learner.restore)
        self._epoch = await self._streams.raise_epoch(newest_epoch(self._layout.intake_dir) + 1)
        rotate_bytes = self._config.checkpoint.log_segment_bytes
        log = await asyncio.to_thread(IntakeLog.open, self._layout.intake_dir, epoch=self._epoch, rotate_bytes=rotate_bytes)
        try:
            return await self._run(log, progress)
        finally:
            log.close()

    async def _run(self, log: IntakeLog, progress: Progress) -> TrainerResult:
        for warning in log.index.warnings:
            self._log.warning(Event.LOG_SEALED, warning=warning)
        self._log.info(
            Event.EPOCH_RAISED, epoch=self._epoch, checkpoint_version=progress.version, segments=len(log.index.sealed)
        )
        intake = Intake(self._streams, log, BatchSettings.from_config(self._config), on_invalid=self._quarantine.add_invalid)
        progress.issued = max(progress.issued, log.index.issued or 0)
        self._trained_through = progress.groups_trained
        checkpoints = self._make_checkpoints(intake, progress)
        metrics = StepLines(self._layout.metrics_jsonl)
        self._clock.before = metrics.seconds
        publisher = Publisher(self._registry, self._config, epoch=self._epoch, on_complete=self._pushes.add)
        self._clock.start()
        try:
            async with asyncio.TaskGroup() as tasks:
                helpers = [tasks.create_task(publisher.run()), tasks.create_task(self._lease(intake).run())]
                reading = Reading(self._streams, intake, progress, epoch=self._epoch, arrived=self._wait.arrived, now=self._now)
                await reading.restore_queue()
                unfinished = await self._replay(intake, progress, metrics)
                if await self._already_ended(progress):
                    result = TrainerResult(progress.version, finished=True)
                else:
                    await self._push(publisher, intake, progress, blocking=True)
                    helpers.append(tasks.create_task(reading.run()))
                    if unfinished is not None:
                        await self._train_batch(unfinished, 0.0, intake, progress, publisher, metrics)
                    result = await self._train(intake, progress, publisher, metrics, checkpoints)
                await self._finish(intake, progress, publisher, checkpoints, result)
                for helper in helpers:
                    helper.cancel()
        finally:
            metrics.close()
            publisher.close()
        return result

    async def _idle(self) -> None:
        await self._compute(self._learner.idle)

    # -- steps -------------------------------------------------------------------------------------------------------
    async def _replay(self, intake: Intake, progress: Progress, metrics: StepLines) -> _Batch | None:
        """Train what the log recorded after the checkpoint: same groups, same order, same verdicts.

        Returns: the batch whose steps are not all recorded yet, if the log ends inside one.
        """
        records = intake.recorded_steps(progress.records_applied)
        batch: _Batch | None = None
        for record in records:
            step = await asyncio.to_thread(intake.recorded, record)
            if record.trains and record.batch == record.step:
                batch = _Batch(step, await asyncio.to_thread(intake.planned, record))
                await self._compute(self._learner.begin_batch, batch.steps)
            if batch is not None and record.batch == batch.number:
                batch.done += 1
            await self._apply(step, intake, progress, metrics, waited_s=0.0, replayed=True)
        if records:
            self._log.info(Event.LOG_REPLAYED, steps=len(records), version=progress.version)
        await self._streams.report(self._epoch, discarded=intake.discarded)
        return batch if batch is not None and batch.done < len(batch.steps) else None

    async def _train(
        self, intake: Intake, progress: Progress, publisher: Publisher, metrics: StepLines, checkpoints: Checkpoints
    ) -> TrainerResult:
        max_steps = self._config.trainer.max_steps
        while progress.version < max_steps and not self._wait.stopping.is_set():
            steps = min(self._config.trainer.steps_per_batch, max_steps - progress.version)
            batch, waited_s = await self._wait.draw(intake, self._epoch, progress.version, steps)
            self._clock.waiting += waited_s if batch else 0.0
            if not batch:
                break
            await self._train_batch(_Batch(batch[0], batch[1:]), waited_s, intake, progress, publisher, metrics)
            await checkpoints.write_if_due(progress)
            self._clock.blocked_by_checkpoints = checkpoints.blocked_s
        return TrainerResult(progress.version, finished=not self._wait.stopping.is_set())

    async def _train_batch(
        self,
        batch: _Batch,
        waited_s: float,
        intake: Intake,
        progress: Progress,
        publisher: Publisher,
        metrics: StepLines,
    ) -> None:
        """Train the steps of a batch that are not done yet."""
        steps = batch.steps
        if batch.done == 0:
            await self._compute(self._learner.begin_batch, steps)
        for number in range(batch.done, len(steps)):
            last = number == len(steps) - 1
            step = steps[number]
            if number > 0:
                step = await intake.compose_next(step, progress.version, batch=batch.number, last=last)
            applied = await self._apply(step, intake, progress, metrics, waited_s=waited_s, replayed=False)
            await self._announce(applied, intake, progress, publisher)
            waited_s = 0.0

    async def _apply(
        self, step: ComposedStep, intake: Intake, progress: Progress, metrics: StepLines, *, waited_s: float, replayed: bool
    ) -> bool:
        """Train one recorded step and account for it. False: nothing was applied."""
        progress.records_applied = step.record.step + 1
        if not step.record.trains:
            return False
        started = self._now()
        result = await self._compute(self._learner.train, step)
        intake.require_current()
        if result.skip_reason is not None:
            self._log.warning(Event.STEP_SKIPPED, step=step.record.step, reason=result.skip_reason)
            await intake.record_skip(step.record.step, result.skip_reason)
        else:
            progress.version += 1
            self._trained_through += sum(verdict.trains for verdict in step.verdicts)
            progress.groups_trained = self._trained_through
        self._remember(step)
        line = self._metrics_line(step, result, progress, intake, waited_s, self._now() - started)
        metrics.write({**line, "replayed": replayed})
        for warning in [] if replayed else self._warning.look(line):
            self._log.warning(Event.OFF_POLICY_WARNING, step=progress.version, **asdict(warning))
        mismatch = logprob_mismatch(line, tolerance=self._config.weights.probe_tolerance) if self._is_exact else None
        if mismatch is not None:
            self._log.error(
                Event.LOGPROBS_DIFFER, step=progress.version, gap_nats=mismatch, accepted=self._config.weights.probe_tolerance
            )
        return result.skip_reason is None

    async def _announce(self, applied: bool, intake: Intake, progress: Progress, publisher: Publisher) -> None:
        """Tell the registry; push when it is due, or when this was the last step."""
        due = progress.version % self._config.weights.push_every == 0 or progress.version >= self._config.trainer.max_steps
        if applied and due:
            await self._push(publisher, intake, progress, blocking=False)
        else:
            await publisher.announce(progress.version, trained_through=self._trained_through, discarded=intake.discarded)
        await self._streams.report(self._epoch, discarded=intake.discarded)

    async def _push(self, publisher: Publisher, intake: Intake, progress: Progress, *, blocking: bool) -> None:
        """Snapshot the weights and hand them to the publisher, which sends them beside the next step."""
        started = self._now()
        snapshot, probe = await self._compute(self._learner.snapshot, self._probe_sequences())
        request = PushRequest(
            version=progress.version,
            snapshot=snapshot,
            probe=probe,
            trained_through=self._trained_through,
            discarded=intake.discarded,
            blocked_s=self._now() - started,
            tolerance=self._learner.tolerance(),
            canary=self._learner.canary(),
        )
        await publisher.submit(request)
        self._clock.blocked_by_push += self._now() - started
        if blocking:
            self._log.info(Event.VERSION_ANNOUNCED, version=progress.version, epoch=self._epoch)

    # -- beginning and end -------------------------------------------------------------------------------------------
    async def _already_ended(self, progress: Progress) -> bool:
        """Whether a resumed run has nothing left to do; one that ended before max_steps was raised is opened again."""
        if (await self._streams.counters()).state is not RunState.ENDED:
            return progress.version >= self._config.trainer.max_steps
        if progress.version >= self._config.trainer.max_steps:
            return True
        await self._streams.reopen(self._epoch)
        return False

    async def _finish(
        self, intake: Intake, progress: Progress, publisher: Publisher, checkpoints: Checkpoints, result: TrainerResult
    ) -> None:
        if result.finished:
            await publisher.drain(timeout_s=self._config.weights.deadline_s)
        await checkpoints.write_last(progress)
        if not result.finished:
            self._log.info(Event.RUN_INTERRUPTED, version=progress.version)
            return
        outstanding = await self._streams.end_run(self._epoch)
        counters = await self._streams.counters()
        unused = await intake.record_end(outstanding, issued=counters.issued)
        await self._streams.clear(self._epoch)
        self._log.info(Event.RUN_ENDED, version=progress.version, unused=len(unused), issued=counters.issued)

    def _make_checkpoints(self, intake: Intake, progress: Progress) -> Checkpoints:
        return Checkpoints(
            self._config.checkpoint,
            self._layout.checkpoints_dir,
            streams=self._streams,
            intake=intake,
            learner=self._learner,
            epoch=self._epoch,
            version=progress.checkpoint_version,
            now=self._now,
            also_due=self._config.evaluation.is_due,
        )

    def _lease(self, intake: Intake) -> LeaseKeeper:
        redis = self._config.redis
        return LeaseKeeper(
            self._streams,
            self._worker_id,
            "trainer",
            lease_s=redis.lease_s,
            progress_s=redis.progress_timeout_s,
            works=[self._learner.work, intake.work],
            on_stall=lambda reason: self._log.error(Event.WORK_STALLED, reason=reason),
        )

    # -- figures -----------------------------------------------------------------------------------------------------
    def _remember(self, step: ComposedStep) -> None:
        """Keep a few trained trajectories: the next push's proof scores what the engines really sampled."""
        trajectories = [t for group in step.groups for t in group.trajectories if t.num_sampled]
        weights = self._config.weights
        self._recent = [t.token_ids[: weights.probe_tokens].tolist() for t in trajectories[: weights.probe_sequences]]

    def _probe_sequences(self) -> Sequence[Sequence[int]]:
        return self._recent or self._learner.random_sequences(self._config.weights.probe_sequences)

    def _metrics_line(
        self, step: ComposedStep, result: StepResult, progress: Progress, intake: Intake, waited_s: float, train_s: float
    ) -> dict[str, Any]:
        return {
            "step": progress.version,
            "policy_version": progress.version,
            "record": step.record.step,
            "epoch": self._epoch,
            "seconds": self._clock.before + self._clock.elapsed,
            "time_s": time.time(),
            **group_metrics(step),
            **result.metrics,
            "skip_reason": result.skip_reason,
            "tokens_per_s": result.metrics["tokens"] / train_s if train_s > 0 else None,
            "groups_dropped": intake.discarded,
            "groups_waiting": intake.num_pending,
            "wait_s": waited_s,
            "validate_s": self._wait.vetted_s,
            "straggler_wait_s": self._wait.stragglers.take_waited_s(),
            "train_s": train_s,
            "trainer_idle_share": self._clock.idle_share,
            "push_blocked_s": self._clock.blocked_by_push,
            "checkpoint_blocked_s": self._clock.blocked_by_checkpoints,
            "pushes": self._pushes.take(),
            **self._vetting.take_figures(),
            "quarantined": self._quarantine.take_counts(),
        }
