"""The fuzzer's stream part meets what a busy machine does: replies that get lost, and a stream that does not empty."""

from __future__ import annotations

import importlib.util
from collections.abc import Sequence
from pathlib import Path
from types import ModuleType

import pytest

from async_rl.run_dir.intake_log import IntakeLog
from async_rl.testing.builders import make_group, make_task, make_trajectory
from async_rl.trainer.intake import BatchSettings, Intake
from protocol.codec import encode
from protocol.memory_streams import MemoryStreams
from protocol.streams import Delivery, IssuedTask, Publication, Stream

FUZZ = Path(__file__).parents[2] / "chaos" / "fuzz.py"


@pytest.fixture(scope="module")
def fuzz() -> ModuleType:
    spec = importlib.util.spec_from_file_location("fuzz", FUZZ)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


class LosesReplies(MemoryStreams):
    """Delivers what it is asked for; the first `lost` replies never arrive."""

    lost = 0

    async def read_groups(self, epoch: int, *, count: int, block_s: float) -> Sequence[Delivery]:
        deliveries = await super().read_groups(epoch, count=count, block_s=block_s)
        if deliveries and self.lost:
            self.lost -= 1
            return []
        return deliveries


async def scene(directory: Path) -> tuple[LosesReplies, Intake, int]:
    """Three groups in the stream, and a trainer's intake."""
    streams = LosesReplies()
    await streams.open()
    epoch = await streams.raise_epoch(1)
    tasks = [make_task(row=row, group_size=1) for row in range(3)]
    assert await streams.issue(0, [IssuedTask(task.task_id, encode(task)) for task in tasks], next_cursor=3)
    await streams.heartbeat("w", "rollout", ttl_s=1e6)
    for task, lease in zip(tasks, await streams.read(Stream.TASKS, "w", count=3, block_s=0), strict=True):
        group = encode(make_group([make_trajectory(reward=1.0)], task=task))
        await streams.publish([Publication(Stream.TASKS, lease.entry_id, Stream.GROUPS, group)])
    settings = BatchSettings(groups_per_step=2, steps_per_batch=1, max_lag=1, stragglers="drop", seed=0)
    return streams, Intake(streams, IntakeLog.open(directory, epoch=epoch), settings), epoch


async def test_what_was_delivered_in_a_lost_reply_is_taken_in(fuzz: ModuleType, tmp_path: Path) -> None:
    streams, intake, epoch = await scene(tmp_path)
    streams.lost = 1
    await fuzz.take_all(streams, intake, epoch, deadline_s=5.0)
    assert intake.num_pending == 3
    assert (await streams.depths())[Stream.GROUPS].length == 0


async def test_a_stream_that_does_not_empty_ends_the_wait_and_is_named(fuzz: ModuleType, tmp_path: Path) -> None:
    streams, intake, epoch = await scene(tmp_path)

    async def finish_nothing(*_: object) -> None: ...

    streams.finish = finish_nothing  # type: ignore[method-assign]
    with pytest.raises(TimeoutError, match=r"after 0\.2 s the stream of groups still holds"):
        await fuzz.take_all(streams, intake, epoch, deadline_s=0.2)
