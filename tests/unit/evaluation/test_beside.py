"""Evaluation beside training, on streams in memory and with rollouts that are known."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from pathlib import Path

import numpy as np
import pytest

from async_rl.errors import EngineError
from async_rl.evaluation.beside import EvaluationLoop, EvaluationSettings, PinnedVersion, Sampling
from async_rl.run_dir.evaluations import read_evaluations
from async_rl.testing.roles import until
from protocol.lease import Work
from protocol.memory_streams import MemoryStreams
from protocol.messages import FinishReason, PromptTask, Reward, SamplingParams, Timings, Trajectory, TrajectoryGroup, Turn
from protocol.streams import RunState
from protocol.versions import VersionSpan

SAMPLES = 2


def task(row: int, source: str = "a") -> PromptTask:
    return PromptTask(
        run_id="evaluation",
        task_id=f"held_out.{source}:0:{row}:0",
        source=source,
        data_epoch=0,
        row=row,
        repeat=0,
        prompt=f"{row}>",
        columns={},
        environment="e",
        group_size=SAMPLES,
        seed=row,
        temperature=1.0,
        max_new_tokens=4,
        issued_at_s=0.0,
    )


def group(task: PromptTask, version: int, rewards: Sequence[Reward]) -> TrajectoryGroup:
    members = [
        Trajectory(
            token_ids=np.array([7, 5], dtype=np.int32),
            loss_mask=np.array([0, 1], dtype=np.uint8),
            behavior_logprobs=np.zeros(2, dtype=np.float32),
            versions=(VersionSpan(1, 2, version, version),),
            sampling=SamplingParams(task.temperature, task.max_new_tokens, task.seed),
            turns=(Turn(1, 2, FinishReason.STOP),),
            finish_reason=FinishReason.STOP,
            timings=Timings(0.0, 0.0),
            worker_id="w",
            engine_id="e",
            reward=reward,
        )
        for reward in rewards
    ]
    return TrajectoryGroup(task, tuple(members), version, 0.0)


class KnownVersions:
    """Hands out versions in order; the run's last one only when it is over."""

    def __init__(self, root: Path, versions: Sequence[int]) -> None:
        self.root, self.waiting = root, list(versions)
        self.released: list[int] = []

    def next(self, newest_done: int | None, *, is_last: bool) -> PinnedVersion | None:
        due = [version for version in self.waiting if newest_done is None or version > newest_done]
        if not due:
            return None
        directory = self.root / str(due[0])
        directory.mkdir(exist_ok=True)
        return PinnedVersion(due[0], directory, directory)

    def release(self, pinned: PinnedVersion) -> None:
        self.released.append(pinned.version)


class Engine:
    """Samples as `answer` says, and counts what it was asked for."""

    def __init__(self, answer: Callable[[PromptTask, int], TrajectoryGroup]) -> None:
        self.answer = answer
        self.asked: list[tuple[int, str]] = []

    @asynccontextmanager
    async def sample(self, pinned: PinnedVersion) -> AsyncIterator[Sampling]:
        async def rollout(task: PromptTask) -> TrajectoryGroup:
            self.asked.append((pinned.version, task.task_id))
            return self.answer(task, pinned.version)

        yield Sampling(rollout, Work())


def by_row(task: PromptTask, version: int) -> TrajectoryGroup:
    """Row 0 passes, row 1 passes half the time, row 2 cannot be scored at all."""
    rewards = {
        0: [Reward(1.0), Reward(1.0)],
        1: [Reward(1.0), Reward(0.0)],
        2: [Reward.invalid("down", "OSError")] * 2,
    }
    return group(task, version, rewards[task.row])


def loop_of(tmp_path: Path, versions: KnownVersions, engine: Engine, backend: MemoryStreams) -> EvaluationLoop:
    settings = EvaluationSettings(
        worker_id="evaluation-0",
        ks=(1, 2),
        success=1.0,
        max_concurrent=4,
        lease_s=10.0,
        progress_s=10.0,
        reopen_wait_s=0.0,
        path=tmp_path / "evaluations.jsonl",
    )
    tasks = {"a": [task(0, "a"), task(1, "a")], "b": [task(2, "b"), task(0, "b")]}
    return EvaluationLoop(backend, versions, engine.sample, tasks, settings, poll_s=0.001)


async def ended_run() -> MemoryStreams:
    streams = MemoryStreams()
    await streams.open()
    epoch = await streams.raise_epoch(1)
    await streams.end_run(epoch)
    assert (await streams.counters()).state is RunState.ENDED
    return streams


async def test_each_version_gets_a_line_with_intervals_by_source_and_invalid_counted_apart(tmp_path: Path) -> None:
    versions, engine = KnownVersions(tmp_path, [0, 50]), Engine(by_row)
    await loop_of(tmp_path, versions, engine, await ended_run()).run()
    first, second = read_evaluations(tmp_path / "evaluations.jsonl")
    assert (first.step, second.step) == (0, 50)
    assert versions.released == [0, 50]
    total = second.total
    assert (total.prompts, total.samples, total.num_invalid) == (4, 6, 2)
    assert total.pass_at[1].value == pytest.approx((1 + 0.5 + 1) / 3)
    assert total.pass_at[2].value == pytest.approx(1.0)  # each of the three passes at least once in two
    assert total.pass_at[1].prompts == 3
    assert 0 < total.pass_at[1].low < total.pass_at[1].value < total.pass_at[1].high <= 1
    assert second.by_source["a"].pass_at[1].value == pytest.approx(0.75)
    assert second.by_source["b"].num_invalid == 2


async def test_nothing_of_it_is_issued_or_published(tmp_path: Path) -> None:
    backend = await ended_run()
    before = await backend.counters()
    await loop_of(tmp_path, KnownVersions(tmp_path, [0]), Engine(by_row), backend).run()
    assert await backend.counters() == before
    assert all(depth.length == 0 for depth in (await backend.depths()).values())


async def test_an_interrupted_evaluation_samples_only_the_rest_when_it_is_started_again(tmp_path: Path) -> None:
    def dies_at_row_2(task: PromptTask, version: int) -> TrajectoryGroup:
        if task.row == 2:
            raise EngineError("it died")
        return by_row(task, version)

    backend = await ended_run()
    first = Engine(dies_at_row_2)
    with pytest.raises(ExceptionGroup):
        await loop_of(tmp_path, KnownVersions(tmp_path, [7]), first, backend).run()
    assert read_evaluations(tmp_path / "evaluations.jsonl") == []
    second = Engine(by_row)
    await loop_of(tmp_path, KnownVersions(tmp_path, [7]), second, backend).run()
    done_before = {task_id for _, task_id in first.asked} - {"held_out.b:0:2:0"}
    assert "held_out.b:0:2:0" in {task_id for _, task_id in second.asked}
    assert {task_id for _, task_id in second.asked} | done_before == {
        "held_out.a:0:0:0",
        "held_out.a:0:1:0",
        "held_out.b:0:2:0",
        "held_out.b:0:0:0",
    }
    assert "held_out.a:0:0:0" not in {task_id for _, task_id in second.asked}
    (evaluation,) = read_evaluations(tmp_path / "evaluations.jsonl")
    assert evaluation.total.prompts == 4


async def test_a_token_of_another_version_is_no_evaluation(tmp_path: Path) -> None:
    def swapped(task: PromptTask, version: int) -> TrajectoryGroup:
        return by_row(task, version + (task.row == 1))

    with pytest.raises(ExceptionGroup) as raised:
        await loop_of(tmp_path, KnownVersions(tmp_path, [3]), Engine(swapped), await ended_run()).run()
    assert raised.group_contains(EngineError, match="samples of two versions")
    assert not (tmp_path / "evaluations.jsonl").exists()


async def test_stopped_it_leaves_at_once_and_its_lease_is_gone(tmp_path: Path) -> None:
    streams = MemoryStreams()
    loop = loop_of(tmp_path, KnownVersions(tmp_path, []), Engine(by_row), streams)
    running = asyncio.create_task(loop.run())
    await until(streams.workers, within_s=10)
    loop.stop()
    await asyncio.wait_for(running, 10)
    assert not await streams.workers()
