"""Taking in and composing: what is logged, what is finished, what a restart reads back."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from pathlib import Path

import pytest

from async_rl.algorithms.staleness import DropRules
from async_rl.checks.audit import audit_index
from async_rl.errors import EpochFenced
from async_rl.run_dir.intake_log import IntakeLog, read_log, task_ends
from async_rl.testing.builders import make_group, make_task, make_trajectory
from async_rl.trainer.intake import BatchSettings, Intake
from async_rl.trainer.step_metrics import group_metrics
from protocol.codec import encode
from protocol.memory_streams import MemoryStreams
from protocol.messages import TrajectoryGroup
from protocol.streams import Delivery, IssuedTask, Publication, Stream

SETTINGS = BatchSettings(groups_per_step=2, steps_per_batch=1, max_lag=1, stragglers="drop", seed=3)


def group(row: int, version: int = 0, *, rewards: Sequence[float | None] = (1.0, 0.0)) -> TrajectoryGroup:
    trajectories = [make_trajectory(versions=version, reward=reward) for reward in rewards]
    return make_group(task=make_task(row=row, group_size=len(trajectories)), trajectories=trajectories)


async def deliver(streams: MemoryStreams, epoch: int, *groups: TrajectoryGroup) -> Sequence[Delivery]:
    """Issue, lease, publish and read the groups."""
    cursor = (await streams.counters()).cursor
    tasks = [IssuedTask(one.task_id, encode(one.task)) for one in groups]
    assert await streams.issue(cursor, tasks, next_cursor=cursor + len(tasks))
    await streams.heartbeat("w", "rollout", ttl_s=10)
    leased = await streams.read(Stream.TASKS, "w", count=len(groups), block_s=0)
    publications = [
        Publication(Stream.TASKS, lease.entry_id, Stream.GROUPS, encode(one)) for lease, one in zip(leased, groups, strict=True)
    ]
    assert all(await streams.publish(publications))
    return await streams.read_groups(epoch, count=100, block_s=0)


async def start(directory: Path, streams: MemoryStreams, settings: BatchSettings = SETTINGS) -> tuple[Intake, int]:
    await streams.open()
    epoch = await streams.raise_epoch(1)
    return Intake(streams, IntakeLog.open(directory, epoch=epoch), settings), epoch


async def test_an_entry_leaves_the_stream_only_after_its_group_is_in_the_log(tmp_path: Path) -> None:
    streams = MemoryStreams()
    intake, epoch = await start(tmp_path, streams)
    deliveries = await deliver(streams, epoch, group(0), group(1))
    assert (await streams.depths())[Stream.GROUPS].length == 2
    assert await intake.take_in(deliveries) == 2
    assert list(read_log(tmp_path).groups) == ["test:0:0:0", "test:0:1:0"]
    assert (await streams.depths())[Stream.GROUPS].length == 0
    assert (await streams.counters()).outstanding == 0


async def test_a_group_delivered_twice_is_logged_and_queued_once(tmp_path: Path) -> None:
    streams = MemoryStreams()
    intake, epoch = await start(tmp_path, streams)
    deliveries = await deliver(streams, epoch, group(0))
    assert await intake.take_in(deliveries) == 1
    assert await intake.take_in(deliveries) == 0
    assert intake.num_pending == 1


async def test_a_step_is_recorded_before_it_is_handed_out_and_read_back_alike(tmp_path: Path) -> None:
    streams = MemoryStreams()
    intake, epoch = await start(tmp_path, streams)
    await intake.take_in(await deliver(streams, epoch, group(0), group(1), group(2)))
    (step,) = await intake.compose_batch(0, steps=1, partial=False)
    assert [one.task_id for one in step.groups] == ["test:0:0:0", "test:0:1:0"]
    again, _ = await start(tmp_path, streams)
    (record,) = again.recorded_steps(0)
    read_back = again.recorded(record)
    assert record == step.record
    assert read_back.verdicts == step.verdicts
    assert again.num_pending == 1  # the third group waits on


async def test_too_few_groups_make_no_step_unless_the_data_has_ended(tmp_path: Path) -> None:
    streams = MemoryStreams()
    intake, epoch = await start(tmp_path, streams)
    await intake.take_in(await deliver(streams, epoch, group(0)))
    assert await intake.compose_batch(0, steps=1, partial=False) == []
    (step,) = await intake.compose_batch(0, steps=1, partial=True)
    assert len(step.groups) == 1


async def test_a_reward_is_reported_when_its_group_trains_not_when_it_arrives(tmp_path: Path) -> None:
    """Eight groups are there and six train: the figures of the step are those of the six."""
    streams = MemoryStreams()
    intake, epoch = await start(tmp_path, streams, dataclasses.replace(SETTINGS, groups_per_step=6))
    arrived = [group(row, rewards=(1.0, 1.0) if row < 6 else (0.0, 0.0)) for row in range(8)]
    await intake.take_in(await deliver(streams, epoch, *arrived))
    (first,) = await intake.compose_batch(0, steps=1, partial=False)
    assert (group_metrics(first)["reward_mean"], group_metrics(first)["groups"]) == (1.0, 6)
    (rest,) = await intake.compose_batch(1, steps=1, partial=True)
    assert (group_metrics(rest)["reward_mean"], group_metrics(rest)["groups"]) == (0.0, 2)


async def test_a_group_that_cannot_train_ends_at_once_so_that_admission_replaces_it(tmp_path: Path) -> None:
    streams = MemoryStreams()
    intake, epoch = await start(tmp_path, streams)
    await intake.take_in(await deliver(streams, epoch, group(0), group(1, rewards=(None, None))))
    assert await intake.compose_batch(0, steps=1, partial=False) == []
    assert intake.discarded == 1
    assert task_ends(read_log(tmp_path)) == {"test:0:1:0": "invalid"}


async def test_a_stale_group_is_dropped_when_the_step_is_composed_not_when_it_arrives(tmp_path: Path) -> None:
    streams = MemoryStreams()
    intake, epoch = await start(tmp_path, streams)
    await intake.take_in(await deliver(streams, epoch, group(0, version=0), group(1, version=2), group(2, version=3)))
    assert intake.discarded == 0
    (step,) = await intake.compose_batch(3, steps=1, partial=False)  # max_lag 1: version 0 is 3 behind
    assert [one.task_id for one in step.groups] == ["test:0:1:0", "test:0:2:0"]
    assert task_ends(read_log(tmp_path))["test:0:0:0"] == "dropped"


async def test_later_steps_of_a_batch_are_judged_at_the_version_they_start_from(tmp_path: Path) -> None:
    streams = MemoryStreams()
    settings = BatchSettings(groups_per_step=1, steps_per_batch=2, max_lag=1, stragglers="drop", seed=0)
    intake, epoch = await start(tmp_path, streams, settings)
    await intake.take_in(await deliver(streams, epoch, group(0, version=4), group(1, version=4)))
    first, planned = await intake.compose_batch(5, steps=2, partial=False)
    assert first.record.last_of_batch is False
    second = await intake.compose_next(planned, 6, batch=first.record.batch, last=True)
    assert not second.record.trains  # lag 2 by then
    assert task_ends(read_log(tmp_path)) == {"test:0:0:0": "trained", "test:0:1:0": "dropped"}


async def test_what_an_ended_run_did_not_use_is_recorded_and_the_audit_is_exact(tmp_path: Path) -> None:
    streams = MemoryStreams()
    intake, epoch = await start(tmp_path, streams)
    await intake.take_in(await deliver(streams, epoch, group(0), group(1), group(2)))
    await streams.issue(3, [IssuedTask("test:0:3:0", b"never done")], next_cursor=4)
    await intake.compose_batch(0, steps=1, partial=False)
    outstanding = await streams.end_run(epoch)
    assert await intake.record_end(outstanding, issued=4) == ("test:0:2:0", "test:0:3:0")
    result = audit_index("r", read_log(tmp_path))
    assert result.is_exact
    assert result.ends == {"trained": 2, "dropped": 0, "invalid": 0, "dead": 0, "unused": 2}
    assert (result.lost, result.twice) == (0, ())


async def test_a_lost_task_shows_in_the_audit(tmp_path: Path) -> None:
    streams = MemoryStreams()
    intake, epoch = await start(tmp_path, streams)
    await intake.take_in(await deliver(streams, epoch, group(0), group(1)))
    await intake.compose_batch(0, steps=1, partial=False)
    await intake.record_end([], issued=3)
    result = audit_index("r", read_log(tmp_path))
    assert result.lost == 1
    assert not result.is_exact


async def test_an_old_trainer_that_wakes_up_finishes_nothing(tmp_path: Path) -> None:
    streams = MemoryStreams()
    old, epoch = await start(tmp_path, streams)
    deliveries = await deliver(streams, epoch, group(0))
    new, new_epoch = await start(tmp_path, streams)
    with pytest.raises(EpochFenced):
        await old.take_in(deliveries)
    assert (await streams.depths())[Stream.GROUPS].length == 1
    assert await new.take_in(await streams.take_over(new_epoch, count=10)) == 1


async def test_a_skipped_step_returns_its_groups_to_admission_as_dropped(tmp_path: Path) -> None:
    streams = MemoryStreams()
    intake, epoch = await start(tmp_path, streams)
    await intake.take_in(await deliver(streams, epoch, group(0), group(1)))
    (step,) = await intake.compose_batch(0, steps=1, partial=False)
    await intake.record_skip(step.record.step, "gradient norm is nan")
    await intake.record_skip(step.record.step, "again, in a replay")
    assert intake.discarded == 2
    again, _ = await start(tmp_path, streams)
    assert again.discarded == 2


async def test_an_unreadable_group_is_dead_lettered_and_its_end_recorded(tmp_path: Path) -> None:
    streams = MemoryStreams()
    intake, epoch = await start(tmp_path, streams)
    deliveries = await deliver(streams, epoch, group(0), group(1))
    damaged = Delivery(deliveries[0].stream, deliveries[0].entry_id, deliveries[0].payload[:-1], 1, deliveries[0].task_id)
    assert await intake.take_in([damaged, deliveries[1]]) == 1
    dead = await streams.newly_dead(epoch)
    assert list(dead) == ["test:0:0:0"]
    await intake.record_dead(list(dead.items()))
    assert task_ends(read_log(tmp_path)) == {"test:0:0:0": "dead"}
    assert intake.discarded == 1


async def test_groups_without_signal_end_are_counted_in_a_row_and_a_trained_one_starts_anew(tmp_path: Path) -> None:
    streams = MemoryStreams()
    settings = dataclasses.replace(SETTINGS, groups_per_step=1, rules=DropRules(without_signal=True))
    intake, epoch = await start(tmp_path, streams, settings)
    same = (1.0, 1.0)
    await intake.take_in(await deliver(streams, epoch, group(0, rewards=same), group(1, rewards=same)))
    assert await intake.compose_batch(0, steps=1, partial=False) == []
    assert (intake.groups_without_signal, intake.discarded, intake.num_pending) == (2, 2, 0)
    assert set(task_ends(read_log(tmp_path)).values()) == {"dropped"}
    await intake.take_in(await deliver(streams, epoch, group(2), group(3, rewards=same)))
    (step,) = await intake.compose_batch(0, steps=1, partial=False)
    assert [one.task_id for one in step.groups] == ["test:0:2:0"]
    assert intake.groups_without_signal == 0
