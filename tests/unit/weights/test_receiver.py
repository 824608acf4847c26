"""The receiver within one process: what it serves, and above all what it does not."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Mapping
from dataclasses import replace

import pytest
import torch

from async_rl.config.trainer import WeightsConfig
from async_rl.errors import EngineError, QueueUnavailable, WeightPushError
from async_rl.registry.memory_registry import MemoryRegistry
from async_rl.registry.versions import Announcement, EngineStatus, ProofReport, PushPlan, PushStatus, RegistryState
from async_rl.testing.push_targets import FaultyEngine, TinyEngine, TinyPolicy, tiny_probe
from async_rl.weights.canary import canary_tensor
from async_rl.weights.manifest import Canary, Manifest, Tolerance, bucket_views, encode_manifest
from async_rl.weights.receiver import Receiver
from async_rl.weights.send_buffer import SendBuffer, named_weights


class LoggedRegistry(MemoryRegistry):
    """Says in the engine's history when a proof was confirmed, and what the answer was; may be away for some answers."""

    def __init__(self, epoch: int, engine: TinyEngine) -> None:
        super().__init__(lambda: epoch)
        self._engine = engine
        self.before_confirm: Callable[[], object] = lambda: None
        self.lost_replies = 0

    async def confirm(self, engine_id: str, epoch: int, version: int, proof: ProofReport) -> bool:
        result = self.before_confirm()
        if asyncio.iscoroutine(result):
            await result
        answer = await super().confirm(engine_id, epoch, version, proof)
        if self.lost_replies:
            self.lost_replies -= 1
            raise QueueUnavailable("the reply was lost")
        self._engine.history.append(f"confirm {version} {answer}")
        return answer


class DirectBackend:
    """Hands over the buffers of this process; `fail` times it breaks first."""

    def __init__(self) -> None:
        self.buffers: dict[int, SendBuffer] = {}
        self.fail = 0
        self.received: list[int] = []

    def receive(self, plan: PushPlan, engine_id: str, manifest: Manifest) -> Mapping[str, torch.Tensor]:
        if self.fail:
            self.fail -= 1
            raise WeightPushError("connection reset by peer")
        self.received.append(plan.version)
        return bucket_views(manifest, self.buffers[plan.version].buckets)

    def reset(self) -> None:
        return

    def close(self) -> None:
        return


class Scene:
    """One receiver with its engine, and the parts of trainer and coordinator, played by hand."""

    def __init__(self, engine: TinyEngine | None = None) -> None:
        self.engine = engine or TinyEngine(TinyPolicy(99))
        self.backend = DirectBackend()
        self.seconds = 0.0
        self.use(LoggedRegistry(1, self.engine))
        self.receiver = Receiver(
            self.engine,
            self.registry,
            WeightsConfig(deadline_s=30.0),
            engine_id="a",
            worker_id="w",
            backend=self.backend,
            clock=lambda: self.seconds,
        )
        self.task = asyncio.create_task(self.receiver.run())

    def use(self, registry: LoggedRegistry) -> None:
        self.registry = registry

    async def announce(self, version: int, *, epoch: int = 1, change: Callable[[Manifest], Manifest] = lambda m: m) -> None:
        model = TinyPolicy(version)
        named, ties, buffers = named_weights(model)
        buffer = SendBuffer.copy_from(named, "float32", ties=ties, buffer_names=buffers)
        self.backend.buffers[version] = buffer
        manifest = change(buffer.manifest(epoch=epoch, version=version, probe=tiny_probe(model), tolerance=Tolerance(1e-4)))
        await self.registry.announce(Announcement(epoch, version, 0, 0, encode_manifest(manifest), "h:1"))

    async def freeze(self, version: int, *, epoch: int = 1, generation: int = 1) -> PushPlan:
        plan = PushPlan(epoch, version, generation, ("a",), "h:1", 30.0, 0.0)
        assert await self.registry.freeze(plan)
        return plan

    async def push(self, version: int, *, generation: int = 1) -> PushPlan:
        await self.announce(version)
        return await self.freeze(version, generation=generation)

    async def until(self, holds: Callable[[RegistryState], bool]) -> RegistryState:
        async with asyncio.timeout(10):
            while True:
                state = await self.registry.state()
                if holds(state):
                    return state
                await self.registry.wait_change(state.revision, timeout_s=0.05)

    async def joined(self) -> None:
        await self.until(lambda s: "a" in s.engines and s.engines["a"].status is EngineStatus.JOINING)

    async def serves(self, version: int) -> None:
        await self.until(lambda s: self.engine.serving_version == version)

    async def failed(self) -> str:
        """Wait for the failure of the newest plan; its reason."""
        state = await self.until(lambda s: "a" in s.failed)
        return state.failed["a"]


@pytest.fixture
async def scene() -> AsyncIterator[Scene]:
    running = Scene()
    await running.joined()
    yield running
    running.task.cancel()
    await asyncio.gather(running.task, return_exceptions=True)


async def test_an_engine_serves_only_after_its_proof_was_confirmed(scene: Scene) -> None:
    await scene.push(1)
    await scene.serves(1)
    await scene.push(2)
    await scene.serves(2)
    assert scene.engine.history == ["swap 1", "confirm 1 True", "serve 1", "swap 2", "confirm 2 True", "serve 2"]
    proof = (await scene.registry.state()).confirmed["a"]
    assert proof.parity_tokens == 6
    assert proof.parity_max_abs <= 1e-5
    assert set(proof.seconds) == {"receive", "paused", "swap", "digest", "probe"}


async def test_an_engine_that_was_evicted_before_its_proof_arrived_does_not_serve(scene: Scene) -> None:
    scene.registry.before_confirm = lambda: scene.registry.evict(["a"], "late")
    await scene.push(1)
    await scene.until(lambda s: "withdraw" in scene.engine.history)
    assert scene.engine.history[:3] == ["swap 1", "confirm 1 False", "withdraw"]
    assert "serve 1" not in scene.engine.history
    scene.registry.before_confirm = lambda: None
    await scene.joined()  # and asks for a complete push
    await scene.freeze(1, generation=2)
    await scene.serves(1)


async def test_an_engine_that_the_registry_lost_proves_and_confirms_the_version_that_it_serves_anew(scene: Scene) -> None:
    await scene.push(1)
    await scene.serves(1)
    await scene.registry.leave("a")  # as a server that lost its last writes, or as the coordinator forgets a dead worker's
    await scene.joined()
    assert scene.engine.serving_version == 1  # what is proven goes on until the push that confirms it
    await scene.freeze(1, generation=2)
    state = await scene.until(lambda s: "a" in s.confirmed)
    assert state.engines["a"].status is EngineStatus.SERVING
    assert scene.engine.history == ["swap 1", "confirm 1 True", "serve 1"] * 2


async def test_a_proof_that_a_newer_plan_overtook_leaves_the_engine_paused_for_that_plan(scene: Scene) -> None:
    async def overtake() -> None:
        scene.registry.before_confirm = lambda: None
        await scene.registry.interrupt((await scene.registry.state()).plan or pytest.fail("no plan"), "broken")
        await scene.push(2, generation=2)

    scene.registry.before_confirm = overtake
    await scene.push(1)
    await scene.serves(2)
    assert scene.engine.history == ["swap 1", "confirm 1 False", "swap 2", "confirm 2 True", "serve 2"]


async def test_a_lost_reply_to_the_confirmation_is_asked_for_again(scene: Scene) -> None:
    scene.registry.lost_replies = 1
    await scene.push(1)
    await scene.serves(1)
    assert scene.engine.history == ["swap 1", "confirm 1 True", "serve 1"]


async def test_a_manifest_that_does_not_fit_is_refused_before_anything_is_received(scene: Scene) -> None:
    def rename(manifest: Manifest) -> Manifest:
        first, *rest = manifest.entries
        return replace(manifest, entries=(replace(first, name="scales"), *rest))

    await scene.announce(1, change=rename)
    await scene.freeze(1)
    reason = await scene.failed()
    assert "scales (nearest: scale)" in reason
    assert scene.backend.received == []
    assert not any(call.startswith("swap") for call in scene.engine.history)


async def test_a_manifest_of_another_version_than_planned_is_refused(scene: Scene) -> None:
    await scene.announce(1, change=lambda manifest: replace(manifest, version=7))
    await scene.freeze(1)
    assert "version 7" in await scene.failed()
    assert scene.backend.received == []


async def test_a_lower_version_of_a_higher_epoch_is_refused_until_it_catches_up() -> None:
    scene = Scene()
    await scene.joined()
    await scene.push(5)
    await scene.serves(5)
    await scene.announce(4, epoch=2)
    await scene.freeze(4, epoch=2)
    assert "version 4 (epoch 2) is below 5" in await scene.failed()
    await scene.until(lambda s: scene.engine.serving_version is None)
    await scene.joined()
    await scene.announce(5, epoch=2)
    await scene.freeze(5, epoch=2, generation=2)
    await scene.serves(5)
    assert (await scene.registry.state()).engines["a"].serving_epoch == 2
    scene.task.cancel()


async def test_a_lower_epoch_is_refused_even_by_a_registry_that_forgot(scene: Scene) -> None:
    await scene.announce(5, epoch=2)
    await scene.freeze(5, epoch=2)
    await scene.serves(5)
    forgetful = LoggedRegistry(1, scene.engine)
    scene.use(forgetful)
    scene.receiver._registry = forgetful  # as if the server had come back empty
    await scene.joined()
    await scene.push(6)
    assert "epoch 1 is older than 2" in await scene.failed()
    assert scene.backend.received == [5]


async def test_an_engine_that_serves_the_version_helps_in_a_repair_push_without_swapping(scene: Scene) -> None:
    await scene.push(1)
    await scene.serves(1)
    await scene.freeze(1, generation=2)
    await scene.until(lambda s: scene.backend.received == [1, 1])
    assert scene.engine.history == ["swap 1", "confirm 1 True", "serve 1"]


async def test_a_broken_transport_is_reported_and_leaves_the_old_version_serving(scene: Scene) -> None:
    await scene.push(1)
    await scene.serves(1)
    scene.backend.fail = 1
    await scene.push(2)
    await scene.until(lambda s: s.plan is not None and s.plan.status is PushStatus.BROKEN)
    assert scene.engine.serving_version == 1
    await scene.push(3)  # in the generation whose group is lost
    await scene.until(lambda s: s.plan is not None and (s.plan.version, s.plan.status) == (3, PushStatus.BROKEN))
    await scene.freeze(3, generation=2)
    await scene.serves(3)


async def test_an_engine_that_breaks_in_the_swap_says_so_and_ends_its_worker() -> None:
    scene = Scene(FaultyEngine(TinyPolicy(99), fault="raise", at_version=1))
    await scene.joined()
    await scene.push(1)
    with pytest.raises(EngineError, match="worker died"):
        await asyncio.wait_for(scene.task, 10)
    assert "the engine broke: EngineError" in await scene.failed()


async def test_who_fails_the_same_version_again_asks_ever_later_but_at_once_for_the_next_version() -> None:
    scene = Scene(FaultyEngine(TinyPolicy(99), fault="flip", at_version=1))
    await scene.joined()
    await scene.push(1)
    assert "mix.weight" in await scene.failed()
    await scene.joined()  # the first time at once
    await scene.freeze(1, generation=2)
    await scene.until(lambda s: s.engines["a"].status is EngineStatus.FENCED and scene.engine.history[-1] == "withdraw")
    await asyncio.sleep(0)
    assert (await scene.registry.state()).engines["a"].status is EngineStatus.FENCED  # waits a deadline now
    scene.seconds = 30.0
    await scene.joined()
    await scene.freeze(1, generation=3)
    await scene.until(lambda s: s.engines["a"].status is EngineStatus.FENCED)
    await scene.announce(2)
    await scene.joined()
    await scene.freeze(2, generation=4)
    await scene.serves(2)
    assert "serve 1" not in scene.engine.history
    scene.task.cancel()


async def test_an_engine_is_tried_with_the_canary_once_and_then_takes_what_was_sent(scene: Scene) -> None:
    for version in (1, 2):
        await scene.announce(version, change=with_canary)
        await scene.freeze(version)
        await scene.serves(version)
    assert scene.engine.history[:4] == ["swap -1", "swap 1", "confirm 1 True", "serve 1"]
    assert scene.engine.history[4:] == ["swap 2", "confirm 2 True", "serve 2"]
    assert torch.equal(scene.engine.model.mix.weight, TinyPolicy(2).mix.weight)


async def test_an_engine_that_fails_the_canary_is_not_sent_on_to_its_first_version() -> None:
    scene = Scene(FaultyEngine(TinyPolicy(99), fault="stale_head", at_version=-1))
    await scene.joined()
    await scene.announce(1, change=with_canary)
    await scene.freeze(1)
    assert "canary" in await scene.failed()
    await scene.joined()  # and asks for another push
    assert scene.engine.history[0] == "swap -1"
    assert not any(call.startswith("serve") or call == "swap 1" for call in scene.engine.history)
    scene.task.cancel()


def with_canary(manifest: Manifest) -> Manifest:
    """As a trainer that loaded a TinyPolicy makes it."""
    made = TinyPolicy(0)
    scales = {entry.name: (0.0, 1.0) for entry in manifest.entries if entry.dtype == "float32"}
    for name, tensor in made.state_dict().items():
        if name in scales:
            tensor.copy_(canary_tensor(name, tuple(tensor.shape), scales[name], 3, torch.float32))
    return replace(manifest, canary=Canary(3, scales, tiny_probe(made), Tolerance(1e-4)))
