"""When checkpoints are written, and what follows one: older ones go, and the intake log below them shrinks.

A checkpoint is copied between two steps and written beside the next ones; what follows runs behind it. One that cannot be
written is an error in the log, and training goes on: the intake log has everything since the one before. Only the last one,
at the end of a run or of a stop, must succeed. A disk that is full for the intake log as well ends the trainer there.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable
from pathlib import Path

from async_rl.config.trainer import CheckpointConfig
from async_rl.errors import CheckpointError, IntakeLogError
from async_rl.logs import Event, get_logger
from async_rl.trainer.checkpoint import META, completed, prune_checkpoints
from async_rl.trainer.intake import Intake
from async_rl.trainer.learner import Learner
from async_rl.trainer.progress import Progress
from protocol.streams import Streams


class Checkpoints:
    """The checkpoints of one trainer incarnation, on rank 0.

    also_due: whether somebody else wants one of (this version), the last attempt being of (that one).
    """

    def __init__(
        self,
        config: CheckpointConfig,
        directory: Path,
        *,
        streams: Streams,
        intake: Intake,
        learner: Learner,
        epoch: int,
        version: int | None,
        now: Callable[[], float],
        also_due: Callable[[int, int], bool] = lambda version, since: False,
    ) -> None:
        self._config = config
        self._also_due = also_due
        self._directory = directory
        self._streams = streams
        self._intake = intake
        self._learner = learner
        self._epoch = epoch
        self._now = now
        self._log = get_logger()
        self._complete: int | None = version
        self._tried = -1 if version is None else version
        self._tried_at = now()
        self._writing: asyncio.Task[None] | None = None
        self.blocked_s = 0.0
        """How long training stood still for copies."""

    async def write_if_due(self, progress: Progress) -> None:
        """Between two steps: begin a checkpoint if it is time for one and none is on its way.

        Raises: EpochFenced if the one before found a newer trainer.
        """
        if self._writing is not None and self._writing.done():
            await self._take_result()
        steps = progress.version - max(self._tried, 0)
        by_time = self._config.every_s is not None and self._now() - self._tried_at >= self._config.every_s
        wanted = self._also_due(progress.version, max(self._tried, 0))
        if self._writing is None and (steps >= self._config.every_steps or wanted or (by_time and steps > 0)):
            await self._begin(progress)

    async def write_last(self, progress: Progress) -> None:
        """Return when a checkpoint of this version is complete. Raises: CheckpointError, EpochFenced."""
        if self._writing is not None:
            await self._take_result()
        if self._complete != progress.version:
            await self._begin(progress)
            assert self._writing is not None
            writing, self._writing = self._writing, None
            await writing

    async def _take_result(self) -> None:
        assert self._writing is not None
        writing, self._writing = self._writing, None
        try:
            await writing
        except CheckpointError as error:
            self._log.error(Event.CHECKPOINT_FAILED, error=str(error), training="goes on; the intake log has what is missing")

    async def _begin(self, progress: Progress) -> None:
        started = self._now()
        counters = await self._streams.counters()
        progress.cursor, progress.issued = max(progress.cursor, counters.cursor), max(progress.issued, counters.issued)
        self._tried, self._tried_at = progress.version, started
        done = await self._learner.thread.run(self._learner.save, progress, self._intake.position, epoch=self._epoch)
        blocked_s = self._now() - started
        self.blocked_s += blocked_s
        written = asyncio.wrap_future(done)
        self._writing = asyncio.create_task(self._complete_one(written, progress.version, progress.records_applied, blocked_s))
        self._writing.add_done_callback(lambda task: task.cancelled() or task.exception())  # seen, even if nobody asks any more

    async def _complete_one(self, written: asyncio.Future[Path], version: int, records: int, blocked_s: float) -> None:
        started = self._now()
        path = await written
        self._complete = version
        seconds = self._now() - started
        self._log.info(Event.CHECKPOINT_WRITTEN, path=str(path), version=version, seconds=seconds, blocked_s=blocked_s)
        await self._intake.settle(records)
        await asyncio.to_thread(self._tidy)

    def _tidy(self) -> None:
        """Remove old checkpoints, then what only they needed of the log. A failure costs space, nothing else."""
        if self._intake.is_superseded():
            return
        try:
            config = self._config
            prune_checkpoints(self._directory, keep=config.keep, newer_than_s=config.keep_newer_than_s)
            below = oldest_needed_record(self._directory, at_least=min(2, config.keep))
            compaction = None if below is None else self._intake.compact(below)
        except (OSError, IntakeLogError) as error:
            self._log.warning(Event.LOG_COMPACTED, error=str(error), segments=0)
            return
        if compaction is not None:
            self._log.info(
                Event.LOG_COMPACTED,
                segments=len(compaction.segments),
                steps_below=compaction.base_step,
                freed_bytes=compaction.freed_bytes,
            )


def oldest_needed_record(directory: Path, *, at_least: int) -> int | None:
    """Step records that the oldest kept checkpoint has applied; None if there are fewer than `at_least`, or one is damaged."""
    kept = completed(directory)
    if len(kept) < at_least:
        return None
    try:
        return min(int(json.loads((path / META).read_text())["meta"]["records_applied"]) for path in kept)
    except (OSError, ValueError, KeyError, TypeError):
        return None
