from __future__ import annotations

import pytest

from protocol.memory_streams import MemoryStreams
from protocol.run_end import RunEnd
from protocol.streams import RunState


class _Clock:
    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


@pytest.mark.parametrize("state", [RunState.NEW, RunState.RUNNING, RunState.EXHAUSTED])
async def test_a_run_that_has_not_ended_is_not_over(state: RunState) -> None:
    assert not await RunEnd(MemoryStreams(), reopen_wait_s=0.0).is_over(state)


async def test_a_run_that_ends_while_one_looks_on_is_over_at_once() -> None:
    end = RunEnd(MemoryStreams(), reopen_wait_s=1e9)
    assert not await end.is_over(RunState.RUNNING)
    assert await end.is_over(RunState.ENDED)


async def test_a_run_that_had_ended_is_given_time_to_be_opened_again() -> None:
    clock = _Clock()
    end = RunEnd(MemoryStreams(now=clock), reopen_wait_s=60.0, clock=clock)
    assert not await end.is_over(RunState.ENDED)
    clock.now += 59.9
    assert not await end.is_over(RunState.ENDED)
    clock.now += 0.2
    assert await end.is_over(RunState.ENDED)


async def test_a_trainer_that_lives_is_waited_for_however_long_it_restores() -> None:
    clock = _Clock()
    streams = MemoryStreams(now=clock)
    end = RunEnd(streams, reopen_wait_s=60.0, clock=clock)
    assert not await end.is_over(RunState.ENDED)
    await streams.heartbeat("rollout-0", "rollout", ttl_s=5000)
    await streams.heartbeat("trainer-0", "trainer", ttl_s=1000)
    clock.now += 999
    assert not await end.is_over(RunState.ENDED)
    clock.now += 2
    assert await end.is_over(RunState.ENDED)


async def test_opened_again_and_ended_again_is_over_at_once() -> None:
    end = RunEnd(MemoryStreams(), reopen_wait_s=1e9)
    assert not await end.is_over(RunState.ENDED)
    assert not await end.is_over(RunState.RUNNING)
    assert await end.is_over(RunState.ENDED)
