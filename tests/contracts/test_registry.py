"""What every version registry must do: the Redis one and its in-memory twin."""

from __future__ import annotations

import asyncio
import shutil
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from async_rl.errors import EpochFenced, QueueUnavailable, WeightPushError
from async_rl.launch.embedded_redis import EmbeddedRedis
from async_rl.registry.memory_registry import MemoryRegistry
from async_rl.registry.redis_registry import RedisRegistry
from async_rl.registry.versions import (
    Announcement,
    EngineStatus,
    ProofReport,
    PushPlan,
    PushStatus,
    VersionRegistry,
    min_served,
)
from protocol.keys import Keys
from protocol.redis_client import RedisClient

PROOF = ProofReport(parity_max_abs=1e-6, parity_mean_abs=1e-7, parity_tokens=12, seconds={"receive": 0.25})


@dataclass
class Bench:
    """A registry, and the trainer's epoch as the streams would set it."""

    registry: VersionRegistry
    raise_epoch: Callable[[int], Awaitable[None]]


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[EmbeddedRedis]:
    with EmbeddedRedis(tmp_path_factory.mktemp("server")) as running:
        yield running


@pytest.fixture(params=["memory", "redis"])
async def bench(request: pytest.FixtureRequest) -> AsyncIterator[Bench]:
    if request.param == "memory":
        held = {"epoch": 0}

        async def set_memory(epoch: int) -> None:
            held["epoch"] = epoch

        yield Bench(MemoryRegistry(lambda: held["epoch"]), set_memory)
        return
    client = RedisClient(request.getfixturevalue("server").url, timeout_s=5, retry_s=5)
    run_id = request.node.name.replace("[", ".").replace("]", "")

    async def set_redis(epoch: int) -> None:
        await client.redis.hset(Keys(run_id).state, "epoch", str(epoch))

    yield Bench(RedisRegistry(client.redis, run_id), set_redis)
    await client.close()


def announcement(version: int, *, epoch: int = 1, push: bytes | None = b"manifest", trained: int | None = None) -> Announcement:
    return Announcement(epoch, version, 16 * version if trained is None else trained, 3, push, "127.0.0.1:9")


def plan(version: int, *engines: str, epoch: int = 1, generation: int = 1) -> PushPlan:
    return PushPlan(epoch, version, generation, engines, "127.0.0.1:9", deadline_s=30.0, planned_at_s=1754000000.123456)


async def with_plan(registry: VersionRegistry, version: int, *engines: str, generation: int = 1) -> PushPlan:
    """Announce `version` and freeze its plan over `engines` (joined where unknown)."""
    known = (await registry.state()).engines
    for engine in engines:
        if engine not in known:
            await registry.join(engine, f"w-{engine}")
    await registry.announce(announcement(version))
    frozen = plan(version, *engines, generation=generation)
    assert await registry.freeze(frozen)
    return frozen


async def test_an_empty_registry_has_no_versions_and_no_engines(bench: Bench) -> None:
    state = await bench.registry.state()
    assert (state.epoch, state.announced_version, state.pushable_version, state.plan) == (0, None, None, None)
    assert (dict(state.engines), dict(state.trained_through), state.finished) == ({}, {}, None)
    assert min_served(state, frozenset({"w"})) is None


async def test_a_push_goes_from_announced_to_live_and_moves_min_served(bench: Bench) -> None:
    registry = bench.registry
    await bench.raise_epoch(1)
    frozen = await with_plan(registry, 4, "a", "b")
    assert await registry.manifest(1, 4) == b"manifest"
    state = await registry.state()
    assert state.plan == frozen
    assert (state.pushable_version, state.store_address, state.discarded) == (4, "127.0.0.1:9", 3)
    assert await registry.ready("a", frozen)
    assert (await registry.state()).ready == {"a"}
    assert await registry.confirm("a", 1, 4, PROOF)
    await registry.fail("b", 1, 4, "digest of w differs")
    await registry.complete(frozen, PushStatus.LIVE)
    state = await registry.state()
    assert state.plan is not None
    assert state.plan.status is PushStatus.LIVE
    assert (state.confirmed, state.failed) == ({"a": PROOF}, {"b": "digest of w differs"})
    assert state.engines["a"].status is EngineStatus.SERVING
    assert (state.engines["a"].serving_version, state.engines["a"].serving_epoch) == (4, 1)
    assert (state.engines["b"].status, state.engines["b"].reason) == (EngineStatus.FENCED, "digest of w differs")
    assert state.finished is not None
    assert (state.finished.plan.version, state.finished.plan.status) == (4, PushStatus.LIVE)
    assert (state.finished.confirmed, state.finished.failed) == ({"a": PROOF}, {"b": "digest of w differs"})
    assert min_served(state, frozenset({"w-a", "w-b"})) == 4
    assert min_served(state, frozenset({"w-b"})) is None


async def test_an_older_epoch_cannot_announce_or_freeze(bench: Bench) -> None:
    registry = bench.registry
    await bench.raise_epoch(1)
    await registry.announce(announcement(4))
    await bench.raise_epoch(2)
    with pytest.raises(EpochFenced, match="epoch 1"):
        await registry.announce(announcement(5))
    await registry.join("a", "w")
    assert not await registry.freeze(plan(4, "a"))
    state = await registry.state()
    assert (state.epoch, state.announced_version, state.plan) == (2, 4, None)


async def test_what_an_older_epoch_announced_is_not_pushable(bench: Bench) -> None:
    registry = bench.registry
    await bench.raise_epoch(1)
    await registry.announce(announcement(4))
    await bench.raise_epoch(2)
    state = await registry.state()
    assert (state.pushable_version, state.store_address) == (None, "")
    assert state.trained_through == {4: 64}
    await registry.announce(announcement(3, epoch=2))  # a restarted trainer may begin lower than the one before it
    assert (await registry.state()).pushable_version == 3


async def test_versions_of_one_epoch_never_go_backwards(bench: Bench) -> None:
    registry = bench.registry
    await bench.raise_epoch(1)
    await registry.announce(announcement(4))
    await registry.announce(announcement(4))
    with pytest.raises(WeightPushError, match="version 3"):
        await registry.announce(announcement(3))


async def test_a_push_may_be_announced_after_a_later_version_without_one(bench: Bench) -> None:
    registry = bench.registry
    await bench.raise_epoch(1)
    await registry.announce(announcement(5, push=None))
    await registry.announce(announcement(4))
    state = await registry.state()
    assert (state.announced_version, state.pushable_version) == (5, 4)
    assert state.trained_through == {4: 64, 5: 80}


async def test_only_the_pushable_version_can_be_planned_and_generations_never_go_backwards(bench: Bench) -> None:
    registry = bench.registry
    await bench.raise_epoch(1)
    await with_plan(registry, 4, "a", generation=3)
    assert not await registry.freeze(plan(4, "a", generation=3))
    assert not await registry.freeze(plan(4, "a", generation=2))
    assert await registry.freeze(plan(4, "a", generation=4))
    await registry.announce(announcement(5, push=None))
    assert not await registry.freeze(plan(5, "a", generation=4))
    await registry.announce(announcement(6))
    assert not await registry.freeze(plan(6, "a", generation=3))
    assert await registry.freeze(plan(6, "a", generation=4))


async def test_a_new_plan_starts_with_nobody_ready_confirmed_or_failed(bench: Bench) -> None:
    registry = bench.registry
    await bench.raise_epoch(1)
    frozen = await with_plan(registry, 4, "a", "b", "c")
    await registry.ready("c", frozen)
    await registry.confirm("a", 1, 4, PROOF)
    await registry.fail("b", 1, 4, "no")
    await with_plan(registry, 5, "a", "c", generation=2)
    state = await registry.state()
    assert (dict(state.confirmed), dict(state.failed), state.ready) == ({}, {}, frozenset())
    assert state.engines["a"].serving_version == 4


async def test_confirm_is_refused_to_who_is_not_named_was_evicted_or_is_late(bench: Bench) -> None:
    registry = bench.registry
    await bench.raise_epoch(1)
    await registry.join("stranger", "w")
    await with_plan(registry, 4, "a", "b")
    assert not await registry.confirm("stranger", 1, 4, PROOF)
    assert not await registry.confirm("a", 1, 3, PROOF)
    assert not await registry.confirm("a", 2, 4, PROOF)
    await registry.evict(["b"], "late")
    assert not await registry.confirm("b", 1, 4, PROOF)
    state = await registry.state()
    assert (state.engines["b"].status, state.engines["b"].reason) == (EngineStatus.FENCED, "late")
    assert state.failed == {"b": "late"}
    await with_plan(registry, 5, "a", generation=2)
    assert not await registry.confirm("a", 1, 4, PROOF)
    assert await registry.confirm("a", 1, 5, PROOF)


async def test_joining_again_starts_over_and_ends_the_part_in_a_running_plan(bench: Bench) -> None:
    registry = bench.registry
    await bench.raise_epoch(1)
    frozen = await with_plan(registry, 4, "a", "b")
    await registry.confirm("a", 1, 4, PROOF)
    await registry.join("a", "w-2")
    record = (await registry.state()).engines["a"]
    assert (record.status, record.serving_version, record.worker_id) == (EngineStatus.JOINING, None, "w-2")
    assert not await registry.confirm("a", 1, 4, PROOF)
    assert not await registry.ready("a", frozen)
    assert await registry.ready("b", frozen)


async def test_a_fenced_engine_that_joins_may_be_planned_and_confirmed_again(bench: Bench) -> None:
    registry = bench.registry
    await bench.raise_epoch(1)
    await with_plan(registry, 4, "a")
    await registry.fail("a", 1, 4, "digest differs")
    await registry.join("a", "w-a")
    assert (await registry.state()).failed == {"a": "digest differs"}  # joining does not hide why
    assert await registry.freeze(plan(4, "a", generation=2))
    assert await registry.confirm("a", 1, 4, PROOF)


async def test_leaving_forgets_the_engine_and_fails_its_part(bench: Bench) -> None:
    registry = bench.registry
    await bench.raise_epoch(1)
    await with_plan(registry, 4, "a", "b")
    await registry.leave("b")
    state = await registry.state()
    assert set(state.engines) == {"a"}
    assert state.failed == {"b": "left"}
    assert not await registry.confirm("b", 1, 4, PROOF)


async def test_only_a_running_plan_breaks_and_a_broken_one_can_be_completed(bench: Bench) -> None:
    registry = bench.registry
    await bench.raise_epoch(1)
    frozen = await with_plan(registry, 4, "a")
    await registry.interrupt(plan(4, "a", generation=9), "another's")
    assert (await registry.state()).plan == frozen
    await registry.interrupt(frozen, "connection reset")
    state = await registry.state()
    assert state.plan is not None
    assert state.plan.status is PushStatus.BROKEN
    assert not await registry.ready("a", frozen)
    await registry.complete(frozen, PushStatus.FAILED)
    await registry.complete(frozen, PushStatus.LIVE)
    state = await registry.state()
    assert state.plan is not None
    assert state.plan.status is PushStatus.FAILED


async def test_the_manifest_stays_while_its_version_is_planned_or_newest(bench: Bench) -> None:
    registry = bench.registry
    await bench.raise_epoch(1)
    await with_plan(registry, 4, "a")
    await registry.announce(announcement(5, push=b"five"))
    await registry.announce(announcement(6, push=b"six"))
    assert await registry.manifest(1, 4) == b"manifest"
    assert await registry.manifest(1, 5) is None
    assert await registry.manifest(1, 6) == b"six"
    assert await registry.manifest(2, 6) is None


async def test_trained_through_is_kept_for_every_version_that_is_served_or_may_be(bench: Bench) -> None:
    registry = bench.registry
    await bench.raise_epoch(1)
    for version in range(4):
        await registry.announce(announcement(version, push=None))
    frozen = await with_plan(registry, 4, "a")
    await registry.confirm("a", 1, 4, PROOF)
    await registry.complete(frozen, PushStatus.LIVE)
    for version in (5, 6, 7):
        await registry.announce(announcement(version, push=b"m" if version == 6 else None))
    state = await registry.state()
    assert state.trained_through == {4: 64, 5: 80, 6: 96, 7: 112}
    assert (state.announced_version, state.pushable_version) == (7, 6)


async def test_waiting_ends_at_the_next_change_at_once_if_there_was_one_and_else_in_time(bench: Bench) -> None:
    registry = bench.registry
    before = (await registry.state()).revision
    started = time.monotonic()
    await registry.wait_change(before, timeout_s=0.05)
    assert 0.04 < time.monotonic() - started < 2
    waiting = asyncio.create_task(registry.wait_change(before, timeout_s=30))
    await asyncio.sleep(0)
    await registry.join("a", "w")
    await asyncio.wait_for(waiting, 5)
    assert (await registry.state()).revision > before
    await asyncio.wait_for(registry.wait_change(before, timeout_s=30), 5)


async def test_the_registry_survives_a_server_that_comes_back_empty(tmp_path: Path) -> None:
    server = EmbeddedRedis(tmp_path / "first").start()
    client = RedisClient(server.url, timeout_s=5, retry_s=5)
    registry = RedisRegistry(client.redis, "run", retry_s=0.1)
    try:
        for _ in range(3):
            await registry.join("a", "w")
        revision = (await registry.state()).revision
        server.kill()
        with pytest.raises(QueueUnavailable):
            await registry.state()
        shutil.rmtree(tmp_path / "first")
        server = EmbeddedRedis(tmp_path / "first").start()
        await asyncio.wait_for(registry.wait_change(revision, timeout_s=30), 5)
        assert dict((await registry.state()).engines) == {}
        await registry.join("a", "w")
        assert set((await registry.state()).engines) == {"a"}
    finally:
        await client.close()
        server.stop()


async def test_a_call_is_tried_again_while_the_server_restarts(tmp_path: Path) -> None:
    server = EmbeddedRedis(tmp_path).start()
    client = RedisClient(server.url, timeout_s=5, retry_s=5)
    registry = RedisRegistry(client.redis, "run", retry_s=20)
    try:
        await registry.join("a", "w")
        server.kill()
        asked = asyncio.create_task(registry.state())
        await asyncio.sleep(0.1)
        server = EmbeddedRedis(tmp_path).start()
        assert set((await asyncio.wait_for(asked, 20)).engines) == {"a"}
    finally:
        await client.close()
        server.stop()


async def test_a_silent_server_is_an_error_within_the_time_out(tmp_path: Path) -> None:
    async def say_nothing(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.read()
        writer.close()

    silent = await asyncio.start_unix_server(say_nothing, tmp_path / "s")
    client = RedisClient(f"unix://{tmp_path / 's'}", timeout_s=5, retry_s=5)
    try:
        with pytest.raises(QueueUnavailable, match=r"0\.1 s"):
            await RedisRegistry(client.redis, "run", timeout_s=0.1, retry_s=0).state()
    finally:
        await client.close()
        silent.close()
