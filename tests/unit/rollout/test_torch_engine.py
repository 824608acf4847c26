from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from async_rl.config.rollout import RolloutConfig
from async_rl.errors import DataError, EngineError, ManifestMismatch, NotServing
from async_rl.rollout.loaded_model import LoadedModel, load_model
from async_rl.rollout.torch_engine import TorchEngine
from async_rl.testing.pushes import push_of
from async_rl.testing.roles import until
from async_rl.testing.tiny_models import TinyModel, make_tiny_model, save_tiny_model
from async_rl.weights.manifest import Manifest
from protocol.messages import SamplingParams

PROMPT = [5, 9, 2]
LONG = SamplingParams(1.0, 200, seed=1)
Start = Callable[..., Awaitable[TorchEngine]]


@pytest.fixture
async def start(tmp_path: Path) -> AsyncIterator[Start]:
    engines: list[TorchEngine] = []

    async def begin(kind: TinyModel = TinyModel.LLAMA, *, config: dict[str, Any] | None = None, **options: Any) -> TorchEngine:
        path = save_tiny_model(tmp_path / "model", kind)
        engine = TorchEngine(path, RolloutConfig(**(config or {})), "engine-0", **options)
        engines.append(engine)
        await engine.start()
        return engine

    yield begin
    for engine in engines:
        await engine.close()


def failing_after(steps: int) -> Callable[..., LoadedModel]:
    """A loader of a real model whose decoding breaks after some steps."""

    def load(path: Path, config: RolloutConfig, now: Callable[[], float]) -> LoadedModel:
        loaded = load_model(path, config, now)
        advance, left = loaded.batch.advance, [steps]

        def broken() -> Any:
            left[0] -= 1
            if left[0] < 0:
                raise MemoryError("no more memory")
            return advance()

        loaded.batch.advance = broken  # type: ignore[method-assign]  # the fault is injected into the real object
        return loaded

    return load


async def test_a_failure_while_decoding_reaches_everyone_who_waits(start: Start) -> None:
    engine = await start(load=failing_after(3))
    await engine.serve(0)
    waiting = [asyncio.ensure_future(engine.generate(PROMPT, [LONG])) for _ in range(5)]
    results = await asyncio.wait_for(asyncio.gather(*waiting, return_exceptions=True), 10)
    assert all(isinstance(result, EngineError) and "no more memory" in str(result) for result in results)
    assert engine.serving_version is None
    for call in (engine.generate(PROMPT, [LONG]), engine.score([PROMPT], temperature=1.0), engine.serve(0)):
        with pytest.raises(EngineError, match="no more memory"):
            await asyncio.wait_for(call, 10)


async def test_a_cancellation_that_meets_the_answer_of_a_command_is_not_swallowed(start: Start) -> None:
    engine = await start()
    loop = asyncio.get_running_loop()
    answered: asyncio.Future[object] = loop.create_future()
    waiting = asyncio.ensure_future(engine._bounded(answered, "an answer"))
    await asyncio.sleep(0)
    answered.set_result(None)
    waiting.cancel()
    with pytest.raises(asyncio.CancelledError):
        await waiting


async def test_waiting_for_a_version_is_bounded(start: Start) -> None:
    engine = await start(wait_timeout_s=0.05)
    await engine.serve(0)
    running = asyncio.ensure_future(engine.generate(PROMPT, [msgspec.structs.replace(LONG, max_new_tokens=250)] * 64))
    await asyncio.sleep(0)
    await engine.swap(*push_of(make_tiny_model(seed=1), 1))
    with pytest.raises(NotServing, match=r"0\.05 s for engine engine-0 .* version 1 was swapped in"):
        await asyncio.wait_for(running, 10)
    await engine.serve(1)
    (completion,) = await engine.generate(PROMPT, [SamplingParams(1.0, 3, seed=1)])
    assert completion.versions.tolist() == [1, 1, 1]


async def test_a_copy_that_fails_midway_leaves_an_engine_that_serves_nothing(start: Start) -> None:
    engine = await start()
    await engine.serve(0)
    manifest, tensors = push_of(make_tiny_model(seed=1), 1)
    half = dict(tensors)
    name = manifest.entries[len(manifest.entries) // 2].name
    half[name] = half[name].to("meta")  # has the right shape and no data: the copy raises when it gets there
    with pytest.raises(EngineError, match="midway"):
        await engine.swap(manifest, half)
    assert engine.serving_version is None
    with pytest.raises(NotServing, match="midway"):
        await engine.generate(PROMPT, [LONG])
    for version in (0, 1):
        with pytest.raises(EngineError, match="swap first"):
            await engine.serve(version)
    await engine.swap(manifest, tensors)
    await engine.serve(1)
    assert engine.serving_version == 1


async def test_a_tensor_that_was_not_received_changes_nothing(start: Start) -> None:
    engine = await start()
    await engine.serve(0)
    before, _ = push_of(make_tiny_model(), 0)
    manifest, tensors = push_of(make_tiny_model(seed=1), 1)
    with pytest.raises(ManifestMismatch, match="not received"):
        await engine.swap(manifest, {name: tensor for name, tensor in tensors.items() if "mlp" not in name})
    assert engine.serving_version == 0
    assert engine.digests(before) == {entry.name: entry.digest for entry in before.entries}


def retied(manifest: Manifest, *ties: tuple[str, str]) -> Manifest:
    aliases = {alias for alias, _ in ties}
    return replace(manifest, ties=ties, entries=tuple(entry for entry in manifest.entries if entry.name not in aliases))


async def test_an_untied_engine_takes_a_tied_push(start: Start) -> None:
    engine = await start(TinyModel.LLAMA)
    model = make_tiny_model(seed=1)
    with torch.no_grad():
        model.get_output_embeddings().weight.copy_(model.get_input_embeddings().weight)
    manifest, tensors = push_of(model, 1)
    tied = retied(manifest, ("lm_head.weight", "model.embed_tokens.weight"))
    await engine.swap(tied, {name: tensor for name, tensor in tensors.items() if name != "lm_head.weight"})
    assert engine.digests(manifest) == {entry.name: entry.digest for entry in manifest.entries}


async def test_a_tied_engine_refuses_an_untied_push(start: Start) -> None:
    engine = await start(TinyModel.LLAMA_TIED)
    manifest, _ = push_of(make_tiny_model(TinyModel.LLAMA_TIED, tie_word_embeddings=False), 1)
    with pytest.raises(ManifestMismatch, match="tie_word_embeddings"):
        engine.check(manifest)


async def test_a_bfloat16_engine_holds_what_a_bfloat16_wire_carries(start: Start) -> None:
    engine = await start(config={"dtype": "bfloat16"})
    manifest, tensors = push_of(make_tiny_model(seed=1), 1, wire_dtype="bfloat16")
    await engine.swap(manifest, tensors)
    assert engine.digests(manifest) == {entry.name: entry.digest for entry in manifest.entries}
    await engine.serve(1)
    (completion,) = await engine.generate(PROMPT, [SamplingParams(1.0, 20, seed=1)])
    (scores,) = await engine.score([[*PROMPT, *completion.token_ids.tolist()]], temperature=1.0)
    assert completion.logprobs == pytest.approx(scores[len(PROMPT) - 1 :], abs=0.05)


async def test_what_cannot_be_decoded_is_refused_at_start_with_its_name(tmp_path: Path) -> None:
    config = AutoConfig.for_model("bloom", vocab_size=22, hidden_size=32, n_layer=1, n_head=2)
    AutoModelForCausalLM.from_config(config).save_pretrained(tmp_path)
    with pytest.raises(EngineError, match="Bloom"):
        await TorchEngine(tmp_path, RolloutConfig(), "engine-0").start()


async def test_a_missing_model_is_a_data_error(tmp_path: Path) -> None:
    engine = TorchEngine(tmp_path / "nothing", RolloutConfig(), "engine-0")
    with pytest.raises(DataError, match="nothing"):
        await engine.start()
    with pytest.raises(EngineError, match="did not start"):
        await engine.serve(0)


async def test_a_context_beyond_the_models_is_refused(start: Start) -> None:
    with pytest.raises(EngineError, match=r"max_context=257 .* 256"):
        await start(config={"max_context": 257})


async def test_an_engine_that_is_not_started_says_so(tmp_path: Path) -> None:
    with pytest.raises(EngineError, match="start"):
        await TorchEngine(tmp_path, RolloutConfig(), "engine-0").generate(PROMPT, [LONG])


async def test_requests_of_one_turn_of_the_loop_are_admitted_together(start: Start) -> None:
    waiting_at_step: list[int] = []

    def load(path: Path, config: RolloutConfig, now: Callable[[], float]) -> LoadedModel:
        loaded = load_model(path, config, now)
        advance = loaded.batch.advance

        def watched() -> Any:
            waiting_at_step.append(loaded.batch.num_waiting)
            return advance()

        loaded.batch.advance = watched  # type: ignore[method-assign]  # watches the real object
        return loaded

    engine = await start(load=load)
    await engine.serve(0)
    await asyncio.gather(
        *[engine.generate(PROMPT, [msgspec.structs.replace(LONG, seed=seed, max_new_tokens=5)]) for seed in range(20)]
    )
    assert [count for count in waiting_at_step if count] == [20]


async def test_a_request_right_behind_the_closing_is_answered(start: Start) -> None:
    engine = await start()
    await engine.serve(0)
    closing = asyncio.ensure_future(engine.close())  # its message is sent one turn of the loop before the requests'
    waiting = [asyncio.ensure_future(engine.generate(PROMPT, [LONG])) for _ in range(3)]
    results = await asyncio.wait_for(asyncio.gather(*waiting, return_exceptions=True), 30)
    assert [type(result) for result in results] == [EngineError] * 3
    await closing


def hanging_after(steps: int, hangs: threading.Event, release: threading.Event) -> Callable[..., LoadedModel]:
    """A loader of a real model whose decoding stands still after some steps, until it is let go."""

    def load(path: Path, config: RolloutConfig, now: Callable[[], float]) -> LoadedModel:
        loaded = load_model(path, config, now)
        advance, left = loaded.batch.advance, [steps]

        def hung() -> Any:
            left[0] -= 1
            if left[0] < 0:
                hangs.set()
                release.wait(30)
            return advance()

        loaded.batch.advance = hung  # type: ignore[method-assign]  # the fault is injected into the real object
        return loaded

    return load


async def rests(engine: TorchEngine) -> bool:
    return not engine.work.what


async def test_a_decoding_thread_that_hangs_shows_as_work_that_stands_still(start: Start) -> None:
    hangs, release, seconds = threading.Event(), threading.Event(), [0.0]
    engine = await start(load=hanging_after(3, hangs, release), now=lambda: seconds[0])
    await engine.serve(0)
    await until(partial(rests, engine))  # the thread answers before it sees that it has nothing more to do
    seconds[0] = 1000.0
    assert engine.work.stalled_s == 0.0  # nothing to decode is no stall
    running = asyncio.ensure_future(engine.generate(PROMPT, [msgspec.structs.replace(LONG, max_new_tokens=5)]))
    assert await asyncio.to_thread(hangs.wait, 10)
    assert engine.work.what == "decoding 1 sequences"
    seconds[0] = 1700.0
    assert engine.work.stalled_s == 700.0
    release.set()
    await asyncio.wait_for(running, 10)

    async def is_idle() -> bool:
        return not engine.work.what

    await until(is_idle, within_s=10)
    assert engine.work.stalled_s == 0.0
