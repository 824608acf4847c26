"""What a trainer says while no batch comes: whom it waits for, and why groups that came did not train."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from async_rl.config.algorithm import AlgorithmConfig
from async_rl.config.run import ModelConfig, RunConfig
from async_rl.config.trainer import TrainerConfig
from async_rl.errors import DataError, DeadlineExceeded
from async_rl.registry.memory_registry import MemoryRegistry
from async_rl.run_dir.intake_log import IntakeLog
from async_rl.testing.builders import make_group, make_task, make_trajectory
from async_rl.trainer import waiting
from async_rl.trainer.intake import BatchSettings, Intake
from async_rl.trainer.waiting import BatchWait
from protocol.codec import encode
from protocol.memory_streams import MemoryStreams
from protocol.messages import Reward, TrajectoryGroup
from protocol.streams import IssuedTask, Publication, Stream


class Log:
    """What was logged: level, event, fields."""

    def __init__(self) -> None:
        self.lines: list[tuple[str, str, dict[str, Any]]] = []

    def warning(self, event: str, **fields: Any) -> None:
        self.lines.append(("warning", event, fields))

    def error(self, event: str, **fields: Any) -> None:
        self.lines.append(("error", event, fields))


class Scene:
    """A trainer of two groups a step whose clock moves by 5 s at every look."""

    def __init__(self, directory: Path, algorithm: AlgorithmConfig = AlgorithmConfig()) -> None:
        self.config = RunConfig(
            run_dir=directory,
            model=ModelConfig(path=directory),
            algorithm=algorithm,
            trainer=TrainerConfig(groups_per_step=2, idle_timeout_s=30.0),
        )
        self.directory, self.streams, self.now_s = directory, MemoryStreams(now=lambda: self.now_s), 0.0

    async def start(self) -> None:
        await self.streams.open()
        self.epoch = await self.streams.raise_epoch(1)
        settings = BatchSettings.from_config(self.config)
        self.intake = Intake(self.streams, IntakeLog.open(self.directory, epoch=self.epoch), settings)
        registry = MemoryRegistry(lambda: self.epoch)
        self.wait = BatchWait(self.config, self.streams, registry, idle=lambda: asyncio.sleep(0), now=self._later)

    def _later(self) -> float:
        self.now_s += 5.0
        self.wait.arrived.set()  # no slice of real time
        return self.now_s

    async def deliver(self, rewards: Sequence[Reward]) -> None:
        """A group of two trajectories for each reward."""
        groups = [self._group(row, reward) for row, reward in enumerate(rewards)]
        cursor = (await self.streams.counters()).cursor
        tasks = [IssuedTask(one.task_id, encode(one.task)) for one in groups]
        assert await self.streams.issue(cursor, tasks, next_cursor=cursor + len(tasks))
        await self.streams.heartbeat("w", "rollout", ttl_s=1e6)
        leased = await self.streams.read(Stream.TASKS, "w", count=len(groups), block_s=0)
        assert all(
            await self.streams.publish(
                [
                    Publication(Stream.TASKS, lease.entry_id, Stream.GROUPS, encode(one))
                    for lease, one in zip(leased, groups, strict=True)
                ]
            )
        )
        await self.intake.take_in(await self.streams.read_groups(self.epoch, count=100, block_s=0))

    @staticmethod
    def _group(row: int, reward: Reward) -> TrajectoryGroup:
        trajectories = [make_trajectory(reward=reward) for _ in range(2)]
        return make_group(task=make_task(row=row, group_size=2), trajectories=trajectories)


@pytest.fixture
def log(monkeypatch: pytest.MonkeyPatch) -> Log:
    made = Log()
    monkeypatch.setattr(waiting, "get_logger", lambda: made)
    return made


@pytest.fixture
async def scene(tmp_path: Path, log: Log) -> Scene:
    made = Scene(tmp_path)
    await made.start()
    return made


BROKEN = Reward.invalid("KeyError: 'answer'", "KeyError")


async def test_a_wait_in_vain_names_how_many_groups_ended_invalid_and_why(scene: Scene) -> None:
    await scene.deliver([BROKEN, BROKEN, BROKEN, Reward.invalid("no score within reward.timeout_s=5", "timeout"), Reward(1.0)])
    with pytest.raises(DeadlineExceeded) as caught:
        await scene.wait.draw(scene.intake, scene.epoch, version=0, steps=1)
    assert "1 groups waiting of 2 needed" in str(caught.value)
    assert "of the groups that came 4 ended invalid (KeyError: 'answer'; no score within reward.timeout_s=5)" in str(
        caught.value
    )


async def test_a_scorer_that_only_fails_is_said_before_the_wait_is_and_once(scene: Scene, log: Log) -> None:
    await scene.deliver([BROKEN, BROKEN])
    with pytest.raises(DeadlineExceeded):
        await scene.wait.draw(scene.intake, scene.epoch, version=0, steps=1)
    assert [(level, event) for level, event, _ in log.lines] == [("error", "groups.all_invalid"), ("warning", "waiting")]
    assert log.lines[0][2] == {"groups": 2, "reason": "KeyError: 'answer'"}


async def test_some_invalid_groups_among_good_ones_are_no_alarm(scene: Scene, log: Log) -> None:
    await scene.deliver([BROKEN, Reward(1.0), Reward(0.0)])
    (step,), _ = await scene.wait.draw(scene.intake, scene.epoch, version=0, steps=1)
    assert len(step.groups) == 2
    assert log.lines == []


async def test_rewards_that_never_differ_end_the_run_with_the_cause_and_not_with_a_wait(tmp_path: Path, log: Log) -> None:
    scene = Scene(tmp_path, AlgorithmConfig(dynamic_sampling=True, max_groups_without_signal=3))
    await scene.start()
    await scene.deliver([Reward(1.0)] * 3)
    with pytest.raises(DataError, match=r"the last 3 groups had rewards that do not differ .* all solved or all too hard"):
        await scene.wait.draw(scene.intake, scene.epoch, version=0, steps=1)
    assert log.lines == []
