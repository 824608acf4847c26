"""Holding a step for stragglers: intake, queue and clock together; and what each policy does at the intake's level."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import pytest

from async_rl.algorithms.staleness import TooOld, Verdict
from async_rl.config.checks import check
from async_rl.config.run import RunConfig
from async_rl.config.trainer import StalenessConfig, TrainerConfig
from async_rl.coordinator.admission import may_issue
from async_rl.errors import ConfigError
from async_rl.run_dir.intake_log import IntakeLog, read_log, task_ends
from async_rl.testing.builders import make_group, make_task, make_trajectory
from async_rl.trainer.intake import BatchSettings, Intake
from async_rl.trainer.step_metrics import group_metrics
from async_rl.trainer.stragglers import StragglerWait
from protocol.codec import encode
from protocol.memory_streams import MemoryStreams
from protocol.messages import TrajectoryGroup
from protocol.streams import Delivery, IssuedTask, Publication, Stream

LEASE_S = 30.0


def group(row: int, versions: int | Sequence[int] = 0, *, reward: float | None = 1.0) -> TrajectoryGroup:
    """Two trajectories; `versions`: of all tokens, or one per token (4) of each trajectory."""
    trajectories = [make_trajectory(versions=versions, reward=value) for value in (reward, reward and 0.0)]
    started = versions if isinstance(versions, int) else versions[0]
    return make_group(trajectories, task=make_task(row=row, group_size=2), started_version=started)


class Scene:
    """A trainer's intake with `groups_per_step` 1, and workers that begin and publish by hand."""

    def __init__(self, directory: Path, streams: MemoryStreams, intake: Intake, epoch: int, config: StalenessConfig) -> None:
        self.directory, self.streams, self.intake, self.epoch = directory, streams, intake, epoch
        self.now_s = 0.0
        self.wait = StragglerWait(streams, config, now=lambda: self.now_s)
        self.leased: dict[str, Delivery] = {}

    @staticmethod
    async def start(
        directory: Path,
        *,
        max_lag: int = 1,
        on_wait_timeout: TooOld = "drop",
        stragglers: str = "wait",
        groups_per_step: int = 1,
        steps_per_batch: int = 1,
    ) -> Scene:
        values = {"max_lag": max_lag, "stragglers": stragglers, "wait_timeout_s": 60.0, "on_wait_timeout": on_wait_timeout}
        config = StalenessConfig.model_validate(values)
        settings = BatchSettings(groups_per_step, steps_per_batch, max_lag, config.stragglers, 0, config.on_wait_timeout)
        streams = MemoryStreams(now=lambda: scene.now_s)
        await streams.open()
        epoch = await streams.raise_epoch(1)
        scene = Scene(directory, streams, Intake(streams, IntakeLog.open(directory, epoch=epoch), settings), epoch, config)
        return scene

    async def begin(self, *groups: TrajectoryGroup, worker: str = "w") -> None:
        """Issue, lease and note the groups' tasks."""
        cursor = (await self.streams.counters()).cursor
        tasks = [IssuedTask(one.task_id, encode(one.task)) for one in groups]
        assert await self.streams.issue(cursor, tasks, next_cursor=cursor + len(tasks))
        await self.streams.heartbeat(worker, "rollout", ttl_s=LEASE_S)
        for delivery in await self.streams.read(Stream.TASKS, worker, count=len(groups), block_s=0):
            assert delivery.task_id is not None
            self.leased[delivery.task_id] = delivery
        await self.streams.note_started(worker, {one.task_id: one.started_version for one in groups})

    async def publish(self, one: TrajectoryGroup, *, source: Stream = Stream.TASKS, target: Stream = Stream.GROUPS) -> None:
        entry = self.leased[one.task_id].entry_id
        assert await self.streams.publish([Publication(source, entry, target, encode(one), one.task_id)]) == [True]
        if target is Stream.GROUPS:
            await self.intake.take_in(await self.streams.read_groups(self.epoch, count=10, block_s=0))

    async def holds(self, version: int) -> bool:
        return await self.wait.holds(self.intake, version, steps=1)

    async def train(self, version: int) -> list[str]:
        """Compose a step; the rows that it trains."""
        batch = await self.intake.compose_batch(version, steps=1, partial=False)
        return [one.task_id for step in batch for one in step.groups]


async def test_a_step_waits_for_work_that_it_would_make_too_old_and_trains_it_first(tmp_path: Path) -> None:
    scene = await Scene.start(tmp_path)
    slow, fast = group(0, 0), group(1, 1)
    await scene.begin(slow, fast)
    await scene.publish(fast)
    assert not await scene.holds(0)  # at version 1 the slow one is still young enough
    assert await scene.holds(1)
    await scene.publish(slow)
    assert not await scene.holds(1)
    assert await scene.train(1) == [slow.task_id]
    assert await scene.train(2) == [fast.task_id]
    assert task_ends(read_log(tmp_path)) == {slow.task_id: "trained", fast.task_id: "trained"}


async def test_a_group_that_waits_for_its_reward_is_waited_for_whoever_holds_it(tmp_path: Path) -> None:
    scene = await Scene.start(tmp_path)
    slow, fast = group(0, 0), group(1, 1)
    await scene.begin(slow, fast)
    await scene.publish(fast)
    await scene.publish(slow, target=Stream.UNSCORED)
    scene.now_s += LEASE_S  # the rollout worker is gone; its group is not
    assert await scene.holds(1)
    await scene.streams.read(Stream.UNSCORED, "dead reward worker", count=1, block_s=0)
    assert await scene.holds(1)


async def test_a_worker_that_lost_its_lease_holds_no_step(tmp_path: Path) -> None:
    scene = await Scene.start(tmp_path)
    hung, fast = group(0, 0), group(1, 1)
    await scene.begin(hung, worker="hung")
    await scene.begin(fast)
    await scene.publish(fast)
    assert await scene.holds(1)
    scene.now_s += LEASE_S
    assert not await scene.holds(1)


async def test_an_engine_that_stopped_a_task_releases_it(tmp_path: Path) -> None:
    scene = await Scene.start(tmp_path)
    stopped, fast = group(0, 0), group(1, 1)
    await scene.begin(stopped, fast)
    await scene.publish(fast)
    await scene.streams.note_started("w", {stopped.task_id: None})
    assert not await scene.holds(1)


@pytest.mark.parametrize(("action", "end", "trained"), [("drop", "dropped", 0), ("mask", "trained", 2 * 3)])
async def test_after_the_deadline_the_step_goes_on_and_the_named_action_follows(
    tmp_path: Path, action: TooOld, end: str, trained: int
) -> None:
    scene = await Scene.start(tmp_path, on_wait_timeout=action)
    slow, fast = group(0, [0, 1, 1, 2]), group(1, 1)  # three of its four tokens are of version 1 or newer
    await scene.begin(slow, fast)
    await scene.publish(fast)
    assert await scene.holds(1)
    for _ in range(59):
        scene.now_s += 1.0
        await scene.streams.heartbeat("w", "rollout", ttl_s=LEASE_S)
        assert await scene.holds(1)
    scene.now_s += 1.0
    assert not await scene.holds(1)
    assert scene.wait.take_waited_s() == 60.0
    assert scene.wait.take_waited_s() == 0.0
    assert await scene.train(1) == [fast.task_id]
    await scene.publish(slow)
    batch = await scene.intake.compose_batch(2, steps=1, partial=False)
    assert task_ends(read_log(tmp_path))[slow.task_id] == end
    assert sum(verdict.num_trained for step in batch for verdict in step.verdicts) == trained


async def test_what_was_given_up_is_waited_for_again_once_somebody_began_it_again(tmp_path: Path) -> None:
    scene = await Scene.start(tmp_path)
    slow, fast = group(0, 0), group(1, 1)
    await scene.begin(slow, fast)
    await scene.publish(fast)
    assert await scene.holds(1)
    scene.now_s += 60.0
    await scene.streams.heartbeat("w", "rollout", ttl_s=LEASE_S)
    assert not await scene.holds(1)  # given up
    assert not await scene.holds(1)
    await scene.streams.note_started("w", {slow.task_id: 1})
    later = group(2, 2)
    await scene.begin(later)
    assert await scene.train(1) == [fast.task_id]
    await scene.publish(later)
    assert await scene.holds(2)  # begun at version 1: version 2 is its last chance


@pytest.mark.parametrize("stragglers", ["mask", "drop"])
async def test_without_wait_no_step_is_held(tmp_path: Path, stragglers: str) -> None:
    scene = await Scene.start(tmp_path, stragglers=stragglers)
    slow, fast = group(0, 0), group(1, 1)
    await scene.begin(slow, fast)
    await scene.publish(fast)
    assert not await scene.holds(1)


async def test_limit_zero_and_a_rejected_group_complete_the_batch(tmp_path: Path) -> None:
    """Limit 0, batch 2, two workers; one group is invalid. Its room comes back whole, and the batch is completed."""
    scene = await Scene.start(tmp_path, max_lag=0, groups_per_step=2)

    async def room() -> int:
        await scene.streams.report(scene.epoch, discarded=scene.intake.discarded)
        return may_issue(await scene.streams.counters(), 0, 0, 2)

    good, bad, third = group(0), group(1, reward=None), group(2)
    assert await room() == 2
    await scene.begin(good, worker="w0")
    await scene.begin(bad, worker="w1")
    assert await room() == 0
    await scene.publish(good)
    await scene.publish(bad)
    assert not await scene.holds(0)
    assert await scene.train(0) == []
    assert await room() == 1
    await scene.begin(third, worker="w1")
    await scene.publish(third)
    assert await scene.train(0) == [good.task_id, third.task_id]


async def test_one_stale_member_is_dropped_alone_and_its_reward_stays_in_the_baseline(tmp_path: Path) -> None:
    scene = await Scene.start(tmp_path, max_lag=2, stragglers="drop")
    mixed = make_group([make_trajectory(versions=v) for v in (7, 7, 7, 3)], task=make_task(group_size=4), started_version=3)
    await scene.begin(mixed)
    await scene.publish(mixed)
    (step,) = await scene.intake.compose_batch(7, steps=1, partial=False)
    assert [one.verdict for one in step.verdicts[0].trajectories] == [Verdict.TRAIN] * 3 + [Verdict.DROP]
    assert all(one.in_baseline for one in step.verdicts[0].trajectories)


async def lags_of_one_batch(scene: Scene, steps: int) -> list[tuple[int | None, bool]]:
    """Draw `steps` steps at version 0 from groups of version 0: (lag, trains) of each update."""
    for row in range(steps):
        await scene.begin(group(row))
    for row in range(steps):
        await scene.publish(group(row))
    first, *rest = await scene.intake.compose_batch(0, steps=steps, partial=False)
    composed, version = [first], 1
    for number, planned in enumerate(rest, start=1):
        step = await scene.intake.compose_next(planned, version, batch=first.record.batch, last=number == len(rest))
        composed.append(step)
        version += step.record.trains
    return [(step.verdicts[0].trajectories[0].lag, step.record.trains) for step in composed]


async def test_four_updates_from_one_batch_count_as_lag(tmp_path: Path) -> None:
    """The engines served version 0 to all of the batch: its updates have lag 0, 1, 2 and 3."""
    scene = await Scene.start(tmp_path / "allowed", max_lag=3, steps_per_batch=4)
    assert await lags_of_one_batch(scene, 4) == [(0, True), (1, True), (2, True), (3, True)]
    # Limit 1 is refused at start (below). Were it not, the later updates would be dropped, never trained as if fresh.
    scene = await Scene.start(tmp_path / "not allowed", max_lag=1, stragglers="drop", steps_per_batch=4)
    assert await lags_of_one_batch(scene, 4) == [(0, True), (1, True), (2, False), (2, False)]


def test_four_updates_from_one_batch_need_a_limit_of_three() -> None:
    config = RunConfig.model_validate({"model": {"path": "model"}})
    four = config.model_copy(update={"trainer": TrainerConfig(steps_per_batch=4), "staleness": StalenessConfig(max_lag=1)})
    with pytest.raises(ConfigError, match=r"trainer\.steps_per_batch=4 exceeds staleness\.max_lag \+ 1 = 2"):
        check(four)
    check(four.model_copy(update={"staleness": StalenessConfig(max_lag=3)}))


async def test_metrics_tell_kept_masked_and_dropped_work_apart(tmp_path: Path) -> None:
    scene = await Scene.start(tmp_path, max_lag=1, stragglers="mask")
    trajectories = [
        make_trajectory(versions=5),  # kept: 4 tokens
        make_trajectory(turns=((6, 0),), versions=[3, 3, 4, 4, 5, 5]),  # 2 of 6 tokens are too old
        make_trajectory(turns=((9, 0),), versions=2),  # dropped
    ]
    mixed = make_group(trajectories, task=make_task(group_size=3), started_version=2)
    await scene.begin(mixed)
    await scene.publish(mixed)
    (step,) = await scene.intake.compose_batch(5, steps=1, partial=False)
    metrics = group_metrics(step)
    names = ("length_mean_trained", "length_mean_masked", "length_mean_discarded", "tokens_masked", "tokens_masked_share")
    assert [metrics[name] for name in names] == [5.0, 6.0, 9.0, 2, 2 / 19]
    assert (metrics["lag_in_flight_mean"], metrics["lag_in_flight_max"], metrics["lag_in_queue_mean"]) == (1.0, 2, 0.0)


def test_the_settings_name_what_becomes_of_too_old_work() -> None:
    settings = BatchSettings(1, 1, 1, "wait", 0, "mask")
    assert settings.too_old == "mask"
    assert replace(settings, stragglers="drop").too_old == "drop"
