from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import pytest
import structlog

from async_rl.coordinator.leases import FRESH_S, Leases
from protocol.memory_streams import MemoryStreams

LEASE_S = 10.0


class _Clock:
    def __init__(self) -> None:
        self.now = 1000.0

    def __call__(self) -> float:
        return self.now


class _Counting(MemoryStreams):
    reads = 0

    async def workers(self) -> Any:
        self.reads += 1
        return await super().workers()


@pytest.fixture
def said() -> Iterator[list[Mapping[str, Any]]]:
    before = structlog.get_config()
    heard = structlog.testing.LogCapture()
    structlog.configure(processors=[heard], wrapper_class=structlog.make_filtering_bound_logger(0))
    yield heard.entries
    structlog.configure(**before)


def _parts() -> tuple[_Clock, _Counting, Leases]:
    clock = _Clock()
    streams = _Counting(now=clock)
    return clock, streams, Leases(streams, lease_s=LEASE_S, clock=clock)


async def test_alive_is_who_holds_a_lease() -> None:
    clock, streams, leases = _parts()
    await streams.heartbeat("a", "rollout", ttl_s=LEASE_S)
    await streams.heartbeat("b", "rollout", ttl_s=3.0)
    assert await leases.alive() == {"a", "b"}
    clock.now += 4.0
    assert await leases.alive() == {"a"}


async def test_leases_are_read_again_when_old_or_when_a_worker_is_unknown() -> None:
    clock, streams, leases = _parts()
    await streams.heartbeat("a", "rollout", ttl_s=LEASE_S)
    await leases.alive()
    await leases.alive({"a"})
    assert streams.reads == 1
    await streams.heartbeat("b", "rollout", ttl_s=LEASE_S)
    assert await leases.alive({"a", "b"}) == {"a", "b"}
    assert streams.reads == 2
    clock.now += FRESH_S
    await leases.alive()
    assert streams.reads == 3


async def test_an_outage_gives_everybody_one_more_lease() -> None:
    """Nothing could be read, nor renewed, for longer than a lease; then one worker comes back and one does not."""
    clock, streams, leases = _parts()
    for worker_id in ("back", "gone"):
        await streams.heartbeat(worker_id, "rollout", ttl_s=LEASE_S)
    assert await leases.read() == {"back", "gone"}
    clock.now += 2 * LEASE_S
    assert await leases.read() == {"back", "gone"}
    await streams.heartbeat("back", "rollout", ttl_s=2 * LEASE_S)
    for _ in range(4):
        clock.now += 2.4
        assert await leases.read() == {"back", "gone"}
    clock.now += 2.4
    assert await leases.read() == {"back"}


async def test_comings_and_goings_are_said_once(said: list[Mapping[str, Any]]) -> None:
    clock, streams, leases = _parts()
    await streams.heartbeat("a", "rollout", ttl_s=LEASE_S)
    await streams.heartbeat("b", "reward", ttl_s=0.4)
    for _ in range(2):
        await leases.read()
    await streams.leave("a")
    clock.now += 0.5
    for _ in range(2):
        await leases.read()
    names = sorted((str(entry["event"]), str(entry.get("joined") or entry.get("left") or entry.get("lost"))) for entry in said)
    assert names == [("worker.joined", "a"), ("worker.joined", "b"), ("worker.left", "a"), ("worker.lost", "b")]
