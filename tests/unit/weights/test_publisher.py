"""The publisher within one process: what is announced, kept, reported. (Bytes move in the integration tests.)"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from async_rl.config.run import ModelConfig, RunConfig
from async_rl.config.trainer import WeightsConfig
from async_rl.errors import EpochFenced, QueueUnavailable
from async_rl.registry.memory_registry import MemoryRegistry
from async_rl.registry.versions import Announcement, ProofReport, PushPlan, PushStatus, RegistryState
from async_rl.testing.push_targets import TinyPolicy, tiny_probe
from async_rl.weights.manifest import Tolerance, decode_manifest
from async_rl.weights.publisher import Publisher, PushRequest, PushStats
from async_rl.weights.send_buffer import SendBuffer, named_weights


class FlakyRegistry(MemoryRegistry):
    """Is away for the next `away` announcements."""

    away = 0

    async def announce(self, announcement: Announcement) -> None:
        if self.away:
            self.away -= 1
            raise QueueUnavailable("the server is away")
        await super().announce(announcement)


class Scene:
    def __init__(self, directory: Path) -> None:
        self.epoch = 1
        self.registry = FlakyRegistry(lambda: self.epoch)
        self.stats: list[PushStats] = []
        self.released: list[int] = []
        config = RunConfig(run_dir=directory, model=ModelConfig(path=directory), weights=WeightsConfig(backend="disk"))
        self.publisher = Publisher(self.registry, config, epoch=1, on_complete=self.stats.append)
        self.task = asyncio.create_task(self.publisher.run())

    async def submit(self, version: int) -> None:
        model = TinyPolicy(version)
        named, ties, _ = named_weights(model)
        buffer = SendBuffer.copy_from(named, "float32", ties=ties)
        buffer.release = lambda: self.released.append(version)
        await self.publisher.submit(PushRequest(version, buffer, tiny_probe(model), 16 * version, 2, blocked_s=0.5))

    async def announced(self, version: int) -> RegistryState:
        async with asyncio.timeout(10):
            while True:
                state = await self.registry.state()
                if state.pushable_version == version:
                    return state
                await self.registry.wait_change(state.revision, timeout_s=0.05)

    async def push(self, version: int, *, generation: int = 1) -> PushPlan:
        """Plan, take and prove it, as coordinator and engine would."""
        plan = await self.plan(version, generation=generation)
        assert await self.registry.ready("a", plan)
        assert await self.registry.confirm(
            "a", 1, version, ProofReport(3e-6, 1e-6, 10, {"probe": 0.25, "receive": 0.375, "swap": 0.125})
        )
        return plan

    async def plan(self, version: int, *, generation: int = 1) -> PushPlan:
        await self.announced(version)
        await self.registry.join("a", "w")
        plan = PushPlan(1, version, generation, ("a",), "", 30.0, 0.0)
        assert await self.registry.freeze(plan)
        return plan

    async def reported(self, count: int) -> None:
        async with asyncio.timeout(10):
            while len(self.stats) < count:  # noqa: ASYNC110  # there is nothing to wait on: the report is a plain callback
                await asyncio.sleep(0.01)


@pytest.fixture
async def scene(tmp_path: Path) -> AsyncIterator[Scene]:
    running = Scene(tmp_path)
    yield running
    running.task.cancel()
    await asyncio.gather(running.task, return_exceptions=True)
    running.publisher.close()


async def test_an_announcement_carries_the_manifest_and_the_counts(scene: Scene) -> None:
    await scene.submit(4)
    state = await scene.announced(4)
    assert (state.trained_through, state.discarded) == ({4: 64}, 2)
    data = await scene.registry.manifest(1, 4)
    assert data is not None
    manifest = decode_manifest(data)
    assert (manifest.epoch, manifest.version, manifest.ties) == (1, 4, (("head.weight", "embed.weight"),))
    assert manifest.tolerance == Tolerance(1e-4)


async def test_a_push_is_reported_once_with_its_parity_and_phases(scene: Scene) -> None:
    await scene.submit(4)
    plan = await scene.push(4)
    await scene.registry.complete(plan, PushStatus.LIVE)
    assert await scene.publisher.drain(timeout_s=5)
    (stats,) = scene.stats
    record = stats.to_record()
    assert (record["version"], record["live"], record["engines"], record["failed"]) == (4, True, ["a"], {})
    assert (record["parity_max_abs"], record["parity_mean_abs"], record["parity_tokens"]) == (3e-6, 1e-6, 10)
    assert {"blocked", "gather", "cast", "digest", "total", "engine_probe"} <= stats.seconds.keys()
    assert (record["backend"], record["bytes"]) == ("disk", stats.num_bytes)
    assert (record["bytes_per_s"], stats.num_bytes) == (stats.num_bytes / 0.5, stats.num_bytes)  # receive and swap: 0.5 s
    assert isinstance(record["memcpy_bytes_per_s"], float)
    assert (stats.seconds["blocked"], stats.seconds["engine_probe"]) == (0.5, 0.25)
    await scene.registry.join("b", "w")  # any change
    await scene.submit(5)
    await scene.announced(5)
    assert len(scene.stats) == 1


async def test_a_failed_push_is_reported_with_its_reasons_and_without_parity(scene: Scene) -> None:
    await scene.submit(4)
    plan = await scene.plan(4)
    await scene.registry.fail("a", 1, 4, "digest differs")
    await scene.registry.complete(plan, PushStatus.FAILED)
    await scene.reported(1)
    (stats,) = scene.stats
    assert (stats.live, stats.failed, stats.parity_max_abs, stats.parity_tokens) == (False, {"a": "digest differs"}, None, 0)


async def test_of_what_waits_only_the_newest_is_announced_and_the_others_memory_is_given_back(scene: Scene) -> None:
    for version in (1, 2, 3):
        await scene.submit(version)
    state = await scene.announced(3)
    assert state.trained_through == {3: 48}
    assert scene.released == [1, 2]


async def test_a_snapshot_is_kept_while_it_is_planned_or_the_newest(scene: Scene) -> None:
    await scene.submit(1)
    plan = await scene.push(1)
    await scene.submit(2)
    await scene.announced(2)
    await scene.submit(3)
    await scene.announced(3)
    await asyncio.sleep(0.1)
    assert scene.released == [2]
    await scene.registry.complete(plan, PushStatus.LIVE)
    await scene.reported(1)
    async with asyncio.timeout(10):
        while scene.released != [2, 1]:  # noqa: ASYNC110  # as above
            await asyncio.sleep(0.01)


async def test_a_server_that_is_away_is_asked_again(scene: Scene) -> None:
    scene.registry.away = 2
    await scene.submit(1)
    await scene.announced(1)


async def test_a_server_that_came_back_empty_is_told_the_newest_push_again(scene: Scene) -> None:
    await scene.submit(3)
    await scene.announced(3)
    scene.registry = FlakyRegistry(lambda: 1)
    scene.publisher._registry = scene.registry
    state = await scene.announced(3)
    assert state.trained_through == {3: 48}
    assert await scene.registry.manifest(1, 3) is not None


async def test_a_request_may_bring_its_own_tolerance(scene: Scene) -> None:
    model = TinyPolicy(1)
    buffer = SendBuffer.copy_from(named_weights(model)[0], "bfloat16")
    await scene.publisher.submit(PushRequest(1, buffer, tiny_probe(model), 0, 0, tolerance=Tolerance(0.03, "mean")))
    await scene.announced(1)
    data = await scene.registry.manifest(1, 1)
    assert data is not None
    assert decode_manifest(data).tolerance == Tolerance(0.03, "mean")


async def test_a_newer_trainer_ends_the_older_ones_publisher(scene: Scene) -> None:
    scene.epoch = 2
    await scene.submit(1)
    with pytest.raises(ExceptionGroup) as caught:
        await asyncio.wait_for(scene.task, 10)
    assert caught.group_contains(EpochFenced)
    with pytest.raises(EpochFenced):
        await scene.publisher.announce(2, trained_through=0, discarded=0)


async def test_draining_ends_in_time_when_nobody_takes_the_push(scene: Scene) -> None:
    assert await scene.publisher.drain(timeout_s=0.05)  # nothing was submitted
    await scene.submit(1)
    await scene.announced(1)
    assert not await scene.publisher.drain(timeout_s=0.05)
