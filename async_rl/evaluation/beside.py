"""Held-out evaluation beside training: one version at a time, pinned, from an engine that no push reaches.

What it samples goes into no queue: nothing of it is issued, admitted or trained. It is told apart from training by what it
reads (complete checkpoints) and by what it writes (evaluations.jsonl). An evaluation that takes longer than its interval
leaves versions out; one that is interrupted goes on where it was, at the same version.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractAsyncContextManager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Protocol

from async_rl.evaluation.figures import PartialResults, PromptResult, evaluation, prompt_result
from async_rl.evaluation.held_out import Rollout
from async_rl.logs import Event, get_logger
from async_rl.run_dir.evaluations import Evaluation, read_evaluations
from async_rl.run_dir.files import JsonLinesWriter
from protocol import event_loop
from protocol.lease import LeaseKeeper, Work
from protocol.messages import PromptTask
from protocol.run_end import RunEnd
from protocol.streams import Streams

ROLE = "evaluation"
POLL_S = 1.0


@dataclass(frozen=True, slots=True)
class PinnedVersion:
    """A policy version as a model directory that stays as it is. directory: where its partial results may lie."""

    version: int
    model_dir: Path
    directory: Path


class Versions(Protocol):
    """Which version is evaluated next. Blocks on disk."""

    def next(self, newest_done: int | None, *, is_last: bool) -> PinnedVersion | None:
        """A version that was pinned and not finished, else the newest that is due; with is_last the newest one there is."""
        ...

    def release(self, pinned: PinnedVersion) -> None:
        """It is evaluated."""
        ...


@dataclass(frozen=True, slots=True)
class Sampling:
    """An engine that serves one version. work: what it does now."""

    rollout: Rollout
    work: Work


@dataclass(frozen=True, slots=True)
class EvaluationSettings:
    """What the loop itself needs to know."""

    worker_id: str
    ks: tuple[int, ...]
    success: float
    max_concurrent: int
    lease_s: float
    progress_s: float
    reopen_wait_s: float
    path: Path
    """evaluations.jsonl."""


class EvaluationLoop:
    """Runs until the run has ended and its last version is evaluated, or until `stop()`.

    tasks: the held-out prompts, with the name that each counts under. sample: an engine for a pinned version.
    """

    def __init__(
        self,
        streams: Streams,
        versions: Versions,
        sample: Callable[[PinnedVersion], AbstractAsyncContextManager[Sampling]],
        tasks: Mapping[str, Sequence[PromptTask]],
        settings: EvaluationSettings,
        *,
        clock: Callable[[], float] = time.monotonic,
        unix_clock: Callable[[], float] = time.time,
        poll_s: float = POLL_S,
    ) -> None:
        self._streams = streams
        self._versions = versions
        self._sample = sample
        self._tasks = [(name, task) for name, tasks in tasks.items() for task in tasks]
        self._settings = settings
        self._clock = clock
        self._unix_clock = unix_clock
        self._poll_s = poll_s
        self._log = get_logger()
        self._stopping = asyncio.Event()
        self._end = RunEnd(streams, reopen_wait_s=settings.reopen_wait_s, clock=clock)
        self._works: list[Work] = []  # that of the engine there is now
        self._info: dict[str, str] = {}
        self._lease = LeaseKeeper(
            streams,
            settings.worker_id,
            ROLE,
            lease_s=settings.lease_s,
            progress_s=settings.progress_s,
            works=self._works,
            info=lambda: self._info,
            on_stall=lambda reason: self._log.error(Event.WORK_STALLED, reason=reason),
        )

    def stop(self) -> None:
        """Leave. What was sampled so far is kept for the next start."""
        self._stopping.set()

    async def run(self) -> None:
        """Raises: EngineError, CheckpointError, QueueUnavailable; WorkStalled if the engine hangs."""
        await self._streams.open()
        async with asyncio.TaskGroup() as tasks:
            helpers = [tasks.create_task(self._lease.run())]
            stopped, evaluating = tasks.create_task(self._stopping.wait()), tasks.create_task(self._evaluate_all())
            await asyncio.wait({stopped, evaluating}, return_when=asyncio.FIRST_COMPLETED)
            for task in (*helpers, stopped, evaluating):
                task.cancel()
            await event_loop.end(helpers)
        await self._streams.leave(self._settings.worker_id)

    async def _evaluate_all(self) -> None:
        while True:
            over = await self._end.is_over((await self._streams.counters()).state)
            done = await asyncio.to_thread(read_evaluations, self._settings.path)
            newest = done[-1].step if done else None
            pinned = await asyncio.to_thread(self._versions.next, newest, is_last=over)
            if pinned is not None:
                await self._evaluate(pinned)
            elif over:
                self._log.info(Event.RUN_ENDED, evaluations=len(done))
                return
            else:
                await asyncio.sleep(self._poll_s)

    async def _evaluate(self, pinned: PinnedVersion) -> None:
        partial = PartialResults(pinned.directory, [task for _, task in self._tasks])
        results = await asyncio.to_thread(partial.read)
        missing = [(name, task) for name, task in self._tasks if task.task_id not in results]
        self._log.info(Event.EVALUATION_STARTED, step=pinned.version, prompts=len(self._tasks), resumed_with=len(results))
        started = self._clock()
        if missing:
            async with self._sample(pinned) as sampling:
                self._works.append(sampling.work)
                try:
                    results |= await self._sample_missing(pinned, partial, missing, sampling.rollout)
                finally:
                    self._works.clear()
        found = evaluation(
            [results[task.task_id] for _, task in self._tasks],
            self._settings.ks,
            success=self._settings.success,
            step=pinned.version,
            time_s=self._unix_clock(),
            seconds=self._clock() - started,
            temperature=self._tasks[0][1].temperature,
        )
        await asyncio.to_thread(self._write, found)
        await asyncio.to_thread(self._versions.release, pinned)

    async def _sample_missing(
        self,
        pinned: PinnedVersion,
        partial: PartialResults,
        missing: Sequence[tuple[str, PromptTask]],
        rollout: Rollout,
    ) -> dict[str, PromptResult]:
        """A result for each task, written as soon as it is there."""
        slots = asyncio.Semaphore(self._settings.max_concurrent)
        results: dict[str, PromptResult] = {}
        writer = JsonLinesWriter(partial.path)

        async def one(name: str, task: PromptTask) -> None:
            async with slots:
                group = await rollout(task)
            result = prompt_result(group, name, version=pinned.version)
            writer.write(asdict(result))
            results[task.task_id] = result
            self._info = {"version": str(pinned.version), "prompts": f"{len(results)}/{len(missing)}"}

        try:
            async with asyncio.TaskGroup() as running:
                for name, task in missing:
                    running.create_task(one(name, task))
        finally:
            self._info = {}
            writer.close()
        return results

    def _write(self, found: Evaluation) -> None:
        """One line, one event. What was invalid is in both."""
        writer = JsonLinesWriter(self._settings.path)
        writer.write(found.to_record())
        writer.close()
        passed = {f"pass_at_{k}": round(estimate.value, 4) for k, estimate in found.total.pass_at.items()}
        intervals = {
            f"pass_at_{k}_95": [round(estimate.low, 4), round(estimate.high, 4)] for k, estimate in found.total.pass_at.items()
        }
        self._log.info(
            Event.EVALUATION_DONE,
            step=found.step,
            **passed,
            **intervals,
            prompts=found.total.prompts,
            invalid=found.total.num_invalid,
            seconds=round(found.seconds, 3),
        )
