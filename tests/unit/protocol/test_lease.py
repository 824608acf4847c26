"""A lease lives as long as its worker's work moves, whatever the event loop does."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, field

import pytest

from async_rl.testing.roles import until
from protocol.errors import WorkStalled
from protocol.lease import LeaseKeeper, Work
from protocol.memory_streams import MemoryStreams

LEASE_S, PROGRESS_S = 4.0, 10.0


@dataclass
class Clock:
    now_s: float = 100.0

    def __call__(self) -> float:
        return self.now_s


@dataclass
class Scene:
    clock: Clock = field(default_factory=Clock)
    said: list[str] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.streams = MemoryStreams(now=self.clock)
        self.work = Work(clock=self.clock, explain=lambda: "behind the others: rank 1")
        self.other = Work(clock=self.clock)
        self.keeper = LeaseKeeper(
            self.streams,
            "w",
            "trainer",
            lease_s=LEASE_S,
            progress_s=PROGRESS_S,
            works=[self.other, self.work],
            info=lambda: {"in_flight": "3"},
            on_stall=self.said.append,
        )

    async def pass_s(self, seconds: float) -> None:
        """Time passes, and the keeper renews as often as it does when it runs."""
        end = self.clock.now_s + seconds
        while self.clock.now_s < end:
            await self.keeper.renew()
            self.clock.now_s = min(end, self.clock.now_s + LEASE_S / 4)

    async def holds_a_lease(self) -> bool:
        return [worker.worker_id for worker in await self.streams.workers()] == ["w"]


async def test_it_is_renewed_while_nothing_is_done_and_while_marks_come() -> None:
    scene = Scene()
    await scene.pass_s(100)
    scene.work.begin("train")
    for number in range(20):
        await scene.pass_s(PROGRESS_S - 1)
        scene.work.mark(f"after micro-batch {number + 1}")
    assert scene.work.what == "train, after micro-batch 20"
    assert await scene.holds_a_lease()
    (lease,) = await scene.streams.workers()
    assert (lease.role, lease.info["in_flight"], "pid" in lease.info) == ("trainer", "3", True)
    assert scene.said == []


async def test_work_that_stands_still_loses_the_lease_and_says_once_what_it_is() -> None:
    scene = Scene()
    scene.work.begin("train")
    scene.work.mark("after micro-batch 2")
    await scene.pass_s(PROGRESS_S)
    assert await scene.holds_a_lease()
    await scene.pass_s(LEASE_S)
    assert not await scene.holds_a_lease()
    (reason,) = scene.said
    assert reason.startswith("no progress for 11 s (redis.progress_timeout_s=10) in: train, after micro-batch 2")
    assert reason.endswith("; behind the others: rank 1")


async def test_work_that_moves_again_in_time_gets_the_lease_back() -> None:
    scene = Scene()
    scene.work.begin("compiling")
    await scene.pass_s(PROGRESS_S + LEASE_S)
    scene.work.mark()
    await scene.pass_s(1)
    assert await scene.holds_a_lease()
    await scene.pass_s(PROGRESS_S + 2)
    assert len(scene.said) == 2  # another stall is said again


async def test_one_that_never_moves_again_ends_the_worker_once_its_lease_is_gone() -> None:
    scene = Scene()
    scene.other.begin("writing the intake log")
    await scene.pass_s(PROGRESS_S + LEASE_S)
    assert not await scene.holds_a_lease()
    with pytest.raises(WorkStalled, match=r"w made no progress for 15 s .* in: writing the intake log; its lease is gone"):
        await scene.pass_s(2)


async def test_what_has_ended_or_failed_does_not_stall() -> None:
    scene = Scene()
    with pytest.raises(ZeroDivisionError), scene.work.doing("train"):
        raise ZeroDivisionError
    await scene.pass_s(10 * PROGRESS_S)
    assert (await scene.holds_a_lease(), scene.work.what, scene.work.stalled_s) == (True, "", 0.0)


async def test_running_it_renews_at_once_and_again() -> None:
    streams = MemoryStreams()
    keeper_lease_s = 0.2
    keeper = LeaseKeeper(streams, "w", "reward", lease_s=keeper_lease_s, progress_s=1.0)
    running = asyncio.create_task(keeper.run())
    lowest = keeper_lease_s

    async def is_renewed() -> bool:
        nonlocal lowest
        (lease,) = await streams.workers()
        before, lowest = lowest, min(lowest, lease.expires_in_s)
        return lease.expires_in_s > before

    try:
        await until(streams.workers)
        await until(is_renewed)
    finally:
        running.cancel()
