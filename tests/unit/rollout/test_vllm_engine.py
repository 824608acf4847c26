"""The vLLM engine over a host that does as it is told: what versions, proofs and withdrawals mean for requests."""

from __future__ import annotations

import asyncio
import os
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from async_rl.config.rollout import RolloutConfig
from async_rl.errors import DataError, DeadlineExceeded, EngineError, ManifestMismatch, NotServing
from async_rl.rollout.model_names import ModelNames
from async_rl.rollout.vllm_engine import VllmEngine
from async_rl.rollout.vllm_host import LabelSpan, Sampled
from async_rl.testing.pushes import push_of
from async_rl.testing.tiny_models import TinyModel, make_tiny_model
from async_rl.weights.manifest import Manifest, tensor_digest
from protocol.messages import FinishReason, SamplingParams

PROMPT = [5, 9, 2]


class ScriptedHost:
    """Samples one token per `step()` for every running request, with the label that it was last given."""

    def __init__(self) -> None:
        self.label = "default"
        self.paused: list[bool] = []
        self.salts: list[str] = []
        self.is_paused = False
        self.is_closed = False
        self.num_cached = 0
        self.broken: str | None = None
        self.stuck = False
        self.max_new: list[int] = []
        self.temperatures: list[float] = []
        self.held: dict[str, torch.Tensor] = {}
        self.on_output: Callable[[], object] = lambda: None
        self.mapped: tuple[str, torch.Tensor] | None = None
        self._running: list[tuple[int, list[str], asyncio.Future[None]]] = []

    def step(self, count: int = 1) -> None:
        if self.is_paused:
            return
        for wanted, labels, done in self._running:
            labels.extend([self.label] * min(count, wanted - len(labels)))
            if len(labels) == wanted and not done.done():
                done.set_result(None)

    @property
    def num_running(self) -> int:
        return sum(not done.done() for _, _, done in self._running)

    async def start(self) -> None:
        return

    async def close(self) -> None:
        self.is_closed = True

    async def sample(
        self, prompt_ids: Sequence[int], sampling: SamplingParams, *, salt: str, on_output: Callable[[], object]
    ) -> Sampled:
        self.on_output = on_output
        self.salts.append(salt)
        self.max_new.append(sampling.max_new_tokens)
        labels: list[str] = []
        done: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._running.append((sampling.max_new_tokens, labels, done))
        await done
        spans = [LabelSpan(label, index, index + 1) for index, label in enumerate(labels)]
        return Sampled([7] * len(labels), [-0.5] * len(labels), spans, False, self.num_cached)

    async def prompt_logprobs(self, token_ids: Sequence[int], *, salt: str) -> Sequence[float]:
        return [-float(index) for index in range(1, len(token_ids))]

    async def next_logprob(self, prefix_ids: Sequence[int], token_id: int, temperature: float, *, salt: str) -> float:
        self.temperatures.append(temperature)
        return -float(len(prefix_ids)) - 100 * token_id

    async def pause(self, *, clear_cache: bool) -> None:
        self.is_paused = True
        self.paused.append(clear_cache)

    async def load(self, update: Mapping[str, Any], label: str) -> Mapping[str, str]:
        assert self.is_paused
        if self.stuck:
            await asyncio.Event().wait()
        if self.broken:
            raise EngineError(self.broken)
        if self.mapped is None or self.mapped[0] != update["path"]:
            assert os.stat(update["path"]).st_size == update["num_bytes"]  # noqa: PTH116 - at once: it is in memory
            memory = torch.from_file(update["path"], shared=True, size=update["num_bytes"], dtype=torch.uint8)
            self.mapped = (update["path"], memory)
        memory = self.mapped[1]
        for name, dtype, shape, offset in update["entries"]:
            wire = getattr(torch, dtype)
            size = torch.Size(shape).numel() * wire.itemsize
            self.held[name] = memory[offset : offset + size].view(wire).view(shape).clone()
        self.label = label
        return {name: tensor_digest(tensor) for name, tensor in self.held.items()}

    async def relabel(self, label: str) -> None:
        self.label = label

    async def resume(self) -> None:
        self.is_paused = False


class Setup:
    def __init__(self, engine: VllmEngine, host: ScriptedHost) -> None:
        self.engine, self.host = engine, host

    async def generate(self, new: int = 4) -> asyncio.Task[Any]:
        """Started, and running within the host unless it has to wait."""
        task = asyncio.ensure_future(self.engine.generate(PROMPT, [SamplingParams(1.0, new, 0)]))
        await turns()
        return task

    async def push(self, version: int, *, serve: bool = True) -> Manifest:
        manifest, tensors = push_of(make_tiny_model(seed=version), version)
        await self.engine.swap(manifest, tensors)
        if serve:
            await self.engine.serve(version)
        return manifest


async def turns(count: int = 5) -> None:
    for _ in range(count):
        await asyncio.sleep(0)


Start = Callable[..., Awaitable[Setup]]


@pytest.fixture
async def start(tmp_path: Path) -> AsyncIterator[Start]:
    made: list[Setup] = []

    async def begin(kind: TinyModel = TinyModel.LLAMA, *, kv: Any = "recompute", max_running: int = 8, **options: Any) -> Setup:
        host = ScriptedHost()
        engine = VllmEngine(
            host,
            RolloutConfig(engine="vllm", kv=kv, max_running=max_running),
            "engine-0",
            names=ModelNames.of(make_tiny_model(kind)),
            max_context=16,
            vocab_size=22,
            staging_dir=tmp_path,
            **options,
        )
        await engine.start()
        made.append(Setup(engine, host))
        return made[-1]

    yield begin
    for setup in made:
        await setup.engine.close()
        assert [name for name in os.listdir(tmp_path) if name.endswith(".weights")] == []  # noqa: PTH208 - of a test's own


async def test_tokens_carry_the_version_of_the_weights_that_sampled_them(start: Start) -> None:
    setup = await start()
    await setup.push(1)
    task = await setup.generate(4)
    setup.host.step(3)
    await setup.push(2)
    setup.host.step()
    (completion,) = await task
    assert completion.versions.tolist() == [1, 1, 1, 2]
    assert completion.kv_versions.tolist() == [1, 1, 1, 2]
    assert completion.finish_reason is FinishReason.LENGTH
    assert setup.host.paused == [True, True]


@pytest.mark.parametrize(("num_cached", "oldest"), [(0, 2), (3, 1)], ids=["computed", "from the cache"])
async def test_kept_kv_is_as_old_as_the_cache_that_it_may_come_from(start: Start, num_cached: int, oldest: int) -> None:
    """A request that was queued under version 1 and begins under version 2 may read what version 1 cached."""
    setup = await start(kv="keep")
    setup.host.num_cached = num_cached
    await setup.push(1)
    task = await setup.generate(2)
    await setup.push(2)
    setup.host.step(2)
    (completion,) = await task
    assert completion.versions.tolist() == [2, 2]
    assert completion.kv_versions.tolist() == [oldest, oldest]
    assert setup.host.paused == [False, False]


async def test_the_prefix_cache_is_not_shared_between_versions(start: Start) -> None:
    setup = await start()
    for version in (1, 2):
        await setup.push(version)
        task = await setup.generate(1)
        setup.host.step()
        await task
    assert len(set(setup.host.salts)) == 2


async def test_what_unproven_weights_sampled_is_held_back_until_they_are_served(start: Start) -> None:
    setup = await start()
    await setup.push(1)
    task = await setup.generate(2)
    await setup.push(2, serve=False)
    setup.host.step(2)
    await turns()
    assert not task.done()
    await setup.engine.serve(2)
    (completion,) = await task
    assert completion.versions.tolist() == [2, 2]


async def test_what_refused_weights_sampled_is_given_to_nobody(start: Start) -> None:
    setup = await start()
    await setup.push(1)
    finished, running = await setup.generate(1), await setup.generate(8)
    await setup.push(2, serve=False)
    setup.host.step(1)
    await setup.engine.withdraw("the probe differs")
    for task in (finished, running):
        with pytest.raises(NotServing, match="the probe differs"):
            await task
    assert setup.host.is_paused
    assert setup.engine.serving_version is None


async def test_weights_that_were_replaced_before_they_were_served_count_for_nothing(start: Start) -> None:
    setup = await start()
    await setup.push(1)
    task = await setup.generate(8)
    await setup.push(2, serve=False)
    setup.host.step(1)
    await setup.push(3)
    with pytest.raises(NotServing):
        await task


async def test_requests_survive_the_withdrawal_of_proven_weights(start: Start) -> None:
    setup = await start()
    await setup.push(1)
    task = await setup.generate(2)
    setup.host.step()
    await setup.engine.withdraw("evicted: late")
    await setup.push(2)
    setup.host.step()
    (completion,) = await task
    assert completion.versions.tolist() == [1, 2]


async def test_requests_wait_for_a_served_version_for_a_bounded_time(start: Start) -> None:
    setup = await start(wait_timeout_s=0.02)
    await setup.push(1)
    running = await setup.generate(2)
    await setup.engine.withdraw("evicted: late")
    with pytest.raises(NotServing, match=r"waited 0\.02 s"):
        await running
    await setup.push(2, serve=False)
    with pytest.raises(NotServing):
        await setup.engine.generate(PROMPT, [SamplingParams(1.0, 1, 0)])


async def test_weights_that_did_not_come_through_this_engine_are_an_error(start: Start) -> None:
    """Somebody else's push, or a server that was started again with the weights of its directory."""
    setup = await start()
    await setup.push(1)
    task = await setup.generate(2)
    setup.host.label = "default"
    setup.host.step(2)
    with pytest.raises(EngineError, match="'default'"):
        await task


async def test_a_load_that_fails_ends_the_engine(start: Start) -> None:
    setup = await start()
    await setup.push(1)
    running = await setup.generate(4)
    setup.host.broken = "rank 1 died"
    with pytest.raises(EngineError, match="rank 1 died"):
        await setup.push(2)
    with pytest.raises(EngineError, match="rank 1 died"):
        await running
    assert setup.host.is_paused
    assert setup.engine.serving_version is None
    with pytest.raises(EngineError, match="rank 1 died"):
        await setup.engine.generate(PROMPT, [SamplingParams(1.0, 1, 0)])


async def test_a_load_that_hangs_names_the_engine(start: Start) -> None:
    setup = await start(command_timeout_s=0.02)
    setup.host.stuck = True
    with pytest.raises(EngineError, match=r"waited 0.02 s for engine engine-0: the swap to version 1"):
        await setup.push(1)


async def test_digests_are_of_what_was_loaded(start: Start) -> None:
    setup = await start()
    manifest = await setup.push(1)
    assert setup.engine.digests(manifest) == {entry.name: entry.digest for entry in manifest.entries}


async def test_an_untied_engine_gets_a_tied_tensor_under_both_names(start: Start) -> None:
    setup = await start(TinyModel.LLAMA)
    manifest, tensors = push_of(make_tiny_model(TinyModel.LLAMA_TIED, num_key_value_heads=4), 1)
    await setup.engine.swap(manifest, tensors)
    assert torch.equal(setup.host.held["lm_head.weight"], setup.host.held["model.embed_tokens.weight"])


async def test_buffers_are_refused(start: Start) -> None:
    model = make_tiny_model()
    model.register_buffer("scale", torch.ones(1))
    setup = await start()
    setup.engine._names = ModelNames.of(model)
    with pytest.raises(ManifestMismatch, match=r"buffers \(scale\)"):
        await setup.engine.swap(*push_of(model, 1))


async def test_a_prompt_gets_no_more_tokens_than_the_context_has_left(start: Start) -> None:
    setup = await start()
    await setup.push(1)
    task = await setup.generate(100)
    assert setup.host.max_new == [13]
    setup.host.step(13)
    assert len((await task)[0].token_ids) == 13


async def test_no_more_requests_run_than_may_and_the_next_begin_under_the_weights_of_then(start: Start) -> None:
    now = [0.0]
    setup = await start(max_running=1, now=lambda: now[0])
    await setup.push(1)
    first, second = await setup.generate(2), await setup.generate(2)
    assert setup.host.num_running == 1
    await setup.push(2)
    now[0] = 3.0
    setup.host.step(2)
    await first
    await turns()
    assert setup.host.num_running == 1
    setup.host.step(2)
    (completion,) = await second
    assert completion.queued_s == 3.0
    assert completion.versions.tolist() == [2, 2]
    assert len(set(setup.host.salts)) == 2


async def test_requests_that_have_not_begun_survive_a_withdrawal(start: Start) -> None:
    setup = await start(max_running=1)
    await setup.push(1)
    both = asyncio.ensure_future(setup.engine.generate(PROMPT, [SamplingParams(1.0, 2, seed) for seed in range(2)]))
    await turns()
    await setup.engine.withdraw("evicted: late")
    await setup.push(2)
    for _ in range(2):
        setup.host.step(2)
        await turns()
    assert [completion.versions.tolist() for completion in await both] == [[2, 2], [2, 2]]


async def test_cancelling_a_call_cancels_its_requests(start: Start) -> None:
    setup = await start()
    await setup.push(1)
    task = await setup.generate(4)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert setup.host.num_running == 0


async def test_scores_at_other_temperatures_are_of_each_next_token(start: Start) -> None:
    setup = await start()
    (plain,) = await setup.engine.score([[3, 4, 5]], temperature=1.0)
    assert plain.tolist() == [-1.0, -2.0]
    (tempered, nothing) = await setup.engine.score([[3, 4, 5], [3]], temperature=0.5)
    assert tempered.tolist() == [-401.0, -502.0]
    assert setup.host.temperatures == [0.5, 0.5]
    assert nothing.dtype == np.float32
    assert nothing.size == 0
    for bad in ([], [3] * 17, [22]):
        with pytest.raises(DataError):
            await setup.engine.score([bad], temperature=1.0)


async def test_a_sequence_as_long_as_the_context_is_scored_to_its_end(start: Start) -> None:
    """vLLM takes no prompt that leaves no room for a token."""
    setup = await start()
    (scores,) = await setup.engine.score([[3] * 16], temperature=1.0)
    assert scores.tolist() == [*(-float(index) for index in range(1, 15)), -15.0 - 300]


async def test_a_temperature_that_vllm_would_raise_is_refused(start: Start) -> None:
    setup = await start()
    await setup.push(1)
    with pytest.raises(EngineError, match=r"temperature=0\.001"):
        await setup.engine.generate(PROMPT, [SamplingParams(0.001, 1, 0)])


async def test_sampling_is_work_that_must_make_progress_unless_it_is_paused(start: Start) -> None:
    now = [0.0]
    setup = await start(now=lambda: now[0])
    await setup.push(1)
    assert setup.engine.work.what == ""
    task = await setup.generate(2)
    now[0] = 5.0
    assert (setup.engine.work.what, setup.engine.work.stalled_s) == ("sampling with vLLM", 5.0)
    setup.host.on_output()
    assert setup.engine.work.stalled_s == 0.0
    await setup.engine.withdraw("evicted: late")
    assert setup.engine.work.what == ""
    await setup.push(2)
    assert setup.engine.work.what == "sampling with vLLM"
    setup.host.step(2)
    await task
    assert setup.engine.work.what == ""


async def test_nothing_is_scored_while_vllm_is_paused(start: Start) -> None:
    setup = await start()
    await setup.push(1)
    await setup.engine.withdraw("late")
    with pytest.raises(NotServing, match="late"):
        await setup.engine.score([[3, 4]], temperature=1.0)


async def test_a_deadline_of_the_host_is_said_by_the_engine(start: Start) -> None:
    setup = await start(command_timeout_s=0.02)
    setup.host.prompt_logprobs = lambda *_, **__: asyncio.Event().wait()  # type: ignore[method-assign,assignment]  # a hung host
    with pytest.raises(DeadlineExceeded, match="a score"):
        await setup.engine.score([[3, 4]], temperature=1.0)
