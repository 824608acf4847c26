"""What every RolloutEngine must do. An engine enters the suite with one line in ENGINES."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import PreTrainedModel

from async_rl.config.rollout import RolloutConfig, VllmConfig
from async_rl.errors import DataError, EngineError, ManifestMismatch, NotServing
from async_rl.rollout.engine import Completion, RolloutEngine
from async_rl.rollout.engines import vllm_engine
from async_rl.rollout.torch_engine import TorchEngine
from async_rl.rollout.vllm_host import VllmHost
from async_rl.testing.pushes import push_of
from async_rl.testing.shared_hosts import HostFactory, SharedHost, SharedHosts
from async_rl.testing.tiny_models import TinyModel, make_tiny_model, save_tiny_model
from async_rl.weights.manifest import Manifest
from protocol.messages import FinishReason, SamplingParams
from protocol.seeds import group_seed, trajectory_seed

EngineFactory = Callable[[Path, RolloutConfig, str], RolloutEngine]


def in_process(path: Path, config: RolloutConfig, max_context: int) -> VllmHost:
    from async_rl.rollout.vllm_in_process import InProcessHost

    return InProcessHost(path, config, max_context)


def server(path: Path, config: RolloutConfig, max_context: int) -> VllmHost:
    from async_rl.rollout.vllm_server import ServerHost

    return ServerHost(path, config, max_context)


HOSTS: dict[str, HostFactory] = {"vllm": in_process, "vllm-server": server}
ENGINES = ["torch", *(pytest.param(name, marks=pytest.mark.vllm) for name in HOSTS)]
VLLM_SIZES: dict[TinyModel, dict[str, int]] = {TinyModel.GPT2: {"n_head": 2}}
"""vLLM's CPU kernels know no head of fewer than 32 dimensions."""

SHARPNESS = 3.0
PROMPT = [5, 9, 2, 17, 4]
TOLERANCE = 1e-4


@dataclass
class Bench:
    """Makes started engines over one tiny model, and closes them."""

    make: EngineFactory
    directory: Path
    is_vllm: bool = False
    kind: TinyModel = TinyModel.LLAMA
    started: list[RolloutEngine] = field(default_factory=list)

    async def engine(self, engine_id: str = "engine-0", **config: Any) -> RolloutEngine:
        if not (self.directory / "config.json").exists():
            save_tiny_model(self.directory, self.kind, sharpness=SHARPNESS, **self.sizes)
        vllm = VllmConfig(kv_cache_bytes=64 * 2**20)
        engine = self.make(self.directory, RolloutConfig(vllm=vllm, **config), engine_id)
        await engine.start()
        self.started.append(engine)
        return engine

    def model(self, version: int) -> PreTrainedModel:
        """The policy of a version; version 0 is what the directory holds."""
        return make_tiny_model(self.kind, seed=version, sharpness=SHARPNESS, **self.sizes)

    @property
    def sizes(self) -> dict[str, int]:
        return VLLM_SIZES.get(self.kind, {"head_dim": 32}) if self.is_vllm else {}

    async def push(self, engine: RolloutEngine, version: int) -> Manifest:
        manifest, tensors = push_of(self.model(version), version)
        engine.check(manifest)
        await engine.swap(manifest, tensors)
        await engine.serve(version)
        return manifest


def vllm_factory(hosts: SharedHosts, make: HostFactory) -> EngineFactory:
    def engine(path: Path, config: RolloutConfig, engine_id: str) -> RolloutEngine:
        return vllm_engine(
            path, config, engine_id, lambda *arguments: SharedHost(hosts, make, *arguments), staging_dir=path.parent
        )

    return engine


@pytest.fixture(params=ENGINES)
async def bench(request: pytest.FixtureRequest, tmp_path: Path) -> AsyncIterator[Bench]:
    make: EngineFactory = TorchEngine
    if request.param != "torch":
        make = vllm_factory(request.getfixturevalue("shared_hosts"), HOSTS[request.param])
    made = Bench(make, tmp_path / "model", is_vllm=request.param != "torch")
    yield made
    for engine in made.started:
        await engine.close()


def params(seed: int = 0, *, new: int = 12, temperature: float = 1.0, stop: tuple[int, ...] = ()) -> SamplingParams:
    return SamplingParams(temperature, new, seed, stop)


@torch.no_grad()
def logprobs_of(model: PreTrainedModel, ids: Sequence[int], temperature: float) -> np.ndarray:
    """[len − 1], by a plain forward pass."""
    tensor = torch.tensor([list(ids)])
    logits = model(input_ids=tensor, attention_mask=torch.ones_like(tensor), use_cache=False).logits[0].float()
    return torch.log_softmax(logits / temperature, -1)[:-1].gather(1, tensor[0, 1:, None])[:, 0].numpy()


def sampled(prompt: Sequence[int], completion: Completion, logprobs: np.ndarray) -> np.ndarray:
    """The part of a sequence's logprobs that belongs to the completion."""
    assert len(logprobs) == len(prompt) + len(completion.token_ids) - 1
    return logprobs[len(prompt) - 1 :]


# -- serving -----------------------------------------------------------------------------------------------------------


async def test_weights_on_disk_are_not_served_until_a_version_is(bench: Bench) -> None:
    engine = await bench.engine()
    assert engine.serving_version is None
    with pytest.raises(NotServing, match="engine-0"):
        await engine.generate(PROMPT, [params()])
    await engine.serve(0)
    assert engine.serving_version == 0
    assert len(await engine.generate(PROMPT, [params()])) == 1


async def test_a_first_swap_alone_is_not_enough_to_serve(bench: Bench) -> None:
    engine = await bench.engine()
    await engine.swap(*push_of(bench.model(1), 1))
    assert engine.serving_version is None
    with pytest.raises(NotServing):
        await engine.generate(PROMPT, [params()])


async def test_withdrawn_weights_are_refused_until_a_later_version_is_served(bench: Bench) -> None:
    engine = await bench.engine()
    await bench.push(engine, 1)
    await engine.swap(*push_of(bench.model(2), 2))
    await engine.withdraw("the probe differs")
    assert engine.serving_version is None
    with pytest.raises(NotServing, match="the probe differs"):
        await engine.generate(PROMPT, [params()])
    with pytest.raises(EngineError):
        await engine.serve(2)
    await bench.push(engine, 3)
    (completion,) = await engine.generate(PROMPT, [params()])
    assert set(completion.versions.tolist()) == {3}


async def test_a_version_that_is_not_held_cannot_be_served(bench: Bench) -> None:
    engine = await bench.engine()
    await engine.swap(*push_of(bench.model(1), 1))
    with pytest.raises(EngineError, match="2"):
        await engine.serve(2)


async def test_requests_wait_between_swap_and_serve(bench: Bench) -> None:
    engine = await bench.engine()
    await bench.push(engine, 1)
    await engine.swap(*push_of(bench.model(2), 2))
    assert engine.serving_version is None
    waiting = asyncio.ensure_future(engine.generate(PROMPT, [params()]))
    await engine.score([PROMPT], temperature=1.0)  # answered after the request was taken in
    assert not waiting.done()
    await engine.serve(2)
    (completion,) = await waiting
    assert set(completion.versions.tolist()) == {2}


# -- completions -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("temperature", [1.0, 0.6])
async def test_every_token_has_its_id_logprob_and_versions(bench: Bench, temperature: float) -> None:
    engine = await bench.engine()
    await bench.push(engine, 3)
    completions = await engine.generate(PROMPT, [params(seed, temperature=temperature) for seed in range(3)])
    for completion in completions:
        arrays = (completion.token_ids, completion.logprobs, completion.versions, completion.kv_versions)
        assert [len(array) for array in arrays] == [12] * 4
        assert [array.dtype for array in arrays] == [np.int32, np.float32, np.int64, np.int64]
        assert set(completion.versions.tolist()) == set(completion.kv_versions.tolist()) == {3}
        assert completion.queued_s >= 0
        assert completion.generate_s >= 0
        expected = logprobs_of(bench.model(3), [*PROMPT, *completion.token_ids.tolist()], temperature)
        assert completion.logprobs == pytest.approx(sampled(PROMPT, completion, expected), abs=TOLERANCE)


async def test_logprobs_shifted_by_one_do_not_pass_for_right_ones(bench: Bench) -> None:
    engine = await bench.engine()
    await engine.serve(0)
    (completion,) = await engine.generate(PROMPT, [params(new=30)])
    (scores,) = await engine.score([[*PROMPT, *completion.token_ids.tolist()]], temperature=1.0)
    right = sampled(PROMPT, completion, scores)
    assert np.abs(completion.logprobs - right).max() <= TOLERANCE
    assert np.exp(np.abs(completion.logprobs - right)).max() == pytest.approx(1.0, abs=TOLERANCE)
    assert np.abs(np.roll(completion.logprobs, 1) - right).max() > 100 * TOLERANCE


async def test_a_stop_token_ends_the_completion_and_is_its_last_token(bench: Bench) -> None:
    engine = await bench.engine()
    await engine.serve(0)
    (free,) = await engine.generate(PROMPT, [params(4, new=40)])
    stop = int(free.token_ids[5])
    end = free.token_ids.tolist().index(stop) + 1
    (stopped,) = await engine.generate(PROMPT, [params(4, new=40, stop=(stop,))])
    assert stopped.token_ids.tolist() == free.token_ids.tolist()[:end]
    assert len(stopped.logprobs) == end
    assert (free.finish_reason, stopped.finish_reason) == (FinishReason.LENGTH, FinishReason.STOP)


async def test_a_completion_ends_where_the_context_does(bench: Bench) -> None:
    engine = await bench.engine(max_context=8)
    await engine.serve(0)
    assert engine.max_context == 8
    (completion,) = await engine.generate(PROMPT, [params(new=50)])
    assert len(completion.token_ids) == 3
    assert completion.finish_reason is FinishReason.LENGTH


@pytest.mark.parametrize("prompt", [[], [3] * 8, [3] * 9, [3, 22], [-1]], ids=["empty", "full", "over", "unknown", "negative"])
async def test_an_impossible_prompt_is_a_data_error(bench: Bench, prompt: list[int]) -> None:
    engine = await bench.engine(max_context=8)
    await engine.serve(0)
    with pytest.raises(DataError):
        await engine.generate(prompt, [params()])


@pytest.mark.parametrize(
    "sampling",
    [
        SamplingParams(1.0, 4, 0, top_p=0.9),
        SamplingParams(1.0, 4, 0, top_k=5),
        SamplingParams(0.0, 4, 0),
        SamplingParams(1.0, 0, 0),
    ],
    ids=["top_p", "top_k", "temperature", "max_new_tokens"],
)
async def test_unsound_sampling_is_refused(bench: Bench, sampling: SamplingParams) -> None:
    engine = await bench.engine()
    await engine.serve(0)
    with pytest.raises(EngineError):
        await engine.generate(PROMPT, [sampling])


async def test_no_members_is_no_work(bench: Bench) -> None:
    engine = await bench.engine()
    await engine.serve(0)
    assert list(await engine.generate(PROMPT, [])) == []


# -- seeds -------------------------------------------------------------------------------------------------------------


async def test_a_request_draws_the_same_tokens_again_on_another_engine_and_in_a_crowd(bench: Bench) -> None:
    first, second = await bench.engine("engine-0"), await bench.engine("engine-1")
    await first.serve(0)
    await second.serve(0)
    seeds = [trajectory_seed(group_seed(42, "a:0:1:0"), member) for member in range(3)]
    alone = [(await first.generate(PROMPT, [params(seed)]))[0].token_ids.tolist() for seed in seeds]
    others = [second.generate(PROMPT[: 1 + i % 4], [params(1000 + i, new=3 + i) for _ in range(2)]) for i in range(10)]
    crowd, *_ = await asyncio.gather(second.generate(PROMPT, [params(seed) for seed in seeds]), *others)
    assert [completion.token_ids.tolist() for completion in crowd] == alone


async def test_samples_of_one_prompt_differ_within_and_across_groups(bench: Bench) -> None:
    engine = await bench.engine()
    await engine.serve(0)
    seeds = [trajectory_seed(group_seed(42, f"a:0:1:{repeat}"), member) for repeat in range(2) for member in range(4)]
    assert len(set(seeds)) == 8
    sampling = [params(seed, new=20) for seed in seeds]
    groups = await asyncio.gather(engine.generate(PROMPT, sampling[:4]), engine.generate(PROMPT, sampling[4:]))
    assert len({tuple(completion.token_ids.tolist()) for group in groups for completion in group}) == 8


# -- weights -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", [TinyModel.LLAMA, TinyModel.LLAMA_TIED, TinyModel.GPT2])
async def test_a_push_replaces_every_tensor(bench: Bench, kind: TinyModel) -> None:
    bench.kind = kind
    engine = await bench.engine()
    manifest = await bench.push(engine, 1)
    assert engine.digests(manifest) == {entry.name: entry.digest for entry in manifest.entries}
    (scores,) = await engine.score([PROMPT], temperature=0.7)
    assert scores == pytest.approx(logprobs_of(bench.model(1), PROMPT, 0.7), abs=TOLERANCE)
    assert np.abs(scores - logprobs_of(bench.model(0), PROMPT, 0.7)).max() > 100 * TOLERANCE


async def test_each_tensor_alone_changes_what_is_computed(bench: Bench) -> None:
    """A tensor that is held but not used (a stale packed copy is) would pass the digests."""
    engine = await bench.engine()
    base = bench.model(0)
    (before,) = await engine.score([PROMPT], temperature=1.0)
    for version, name in enumerate(base.state_dict(), start=1):
        model = bench.model(0)
        with torch.no_grad():
            noise = torch.randn(model.state_dict()[name].shape, generator=torch.Generator().manual_seed(version))
            model.state_dict()[name].add_(0.3 * noise)
        await engine.swap(*push_of(model, version))
        (after,) = await engine.score([PROMPT], temperature=1.0)
        assert np.abs(after - before).max() > 100 * TOLERANCE, name
        assert after == pytest.approx(logprobs_of(model, PROMPT, 1.0), abs=TOLERANCE), name


async def test_scores_are_of_the_held_weights_served_or_not(bench: Bench) -> None:
    engine = await bench.engine()
    await bench.push(engine, 1)
    await engine.swap(*push_of(bench.model(2), 2))
    (scores,) = await engine.score([PROMPT], temperature=1.0)
    assert scores == pytest.approx(logprobs_of(bench.model(2), PROMPT, 1.0), abs=TOLERANCE)


async def test_a_manifest_of_another_model_is_refused_and_nothing_changes(bench: Bench) -> None:
    engine = await bench.engine()
    await bench.push(engine, 1)
    other = make_tiny_model(TinyModel.LLAMA, num_hidden_layers=2)
    manifest, tensors = push_of(other, 2)
    with pytest.raises(ManifestMismatch, match=r"layers\.2"):
        engine.check(manifest)
    with pytest.raises(ManifestMismatch):
        await engine.swap(manifest, tensors)
    assert engine.serving_version == 1


async def run_across_pushes(bench: Bench, engine: RolloutEngine) -> Sequence[Completion]:
    """Sample long completions while versions are pushed as fast as they go, until some completion saw two of them."""
    version = 1
    await bench.push(engine, version)
    for attempt in range(20):  # how many pushes fall into one generation is up to the scheduler
        sampling = [params(100 * attempt + member, new=200, temperature=0.8) for member in range(3)]
        running = asyncio.ensure_future(engine.generate(PROMPT, sampling))
        while not running.done():
            version += 1
            await bench.push(engine, version)
        completions = await running
        if all(len(set(completion.versions.tolist())) >= 2 for completion in completions):
            return completions
    raise AssertionError("no push fell into a running generation")


async def test_requests_survive_swaps_and_replay_under_the_versions_they_name(bench: Bench) -> None:
    engine = await bench.engine(kv="recompute")
    for completion in await run_across_pushes(bench, engine):
        versions = completion.versions
        assert len(versions) == 200
        assert (np.diff(versions) >= 0).all()
        assert (completion.kv_versions == versions).all()
        ids = [*PROMPT, *completion.token_ids.tolist()]
        for version in np.unique(versions).tolist():
            expected = sampled(PROMPT, completion, logprobs_of(bench.model(version), ids, 0.8))
            at = versions == version
            assert completion.logprobs[at] == pytest.approx(expected[at], abs=TOLERANCE)


async def test_kept_kv_is_recorded_as_old(bench: Bench) -> None:
    engine = await bench.engine(kv="keep")
    for completion in await run_across_pushes(bench, engine):
        assert (np.diff(completion.versions) >= 0).all()
        assert set(completion.kv_versions.tolist()) == {completion.versions[0]}


# -- ends --------------------------------------------------------------------------------------------------------------


async def test_a_cancelled_request_frees_its_place(bench: Bench) -> None:
    engine = await bench.engine(max_running=2)
    await engine.serve(0)
    hog = asyncio.ensure_future(engine.generate(PROMPT, [params(seed, new=240) for seed in range(64)]))
    await asyncio.sleep(0)
    await engine.score([PROMPT], temperature=1.0)  # the request is running by now
    hog.cancel()
    with pytest.raises(asyncio.CancelledError):
        await hog
    async with asyncio.timeout(10):
        assert len(await engine.generate(PROMPT, [params()])) == 1


async def test_closing_answers_everyone_who_waits(bench: Bench) -> None:
    engine = await bench.engine(max_running=1)
    await engine.serve(0)
    waiting = [asyncio.ensure_future(engine.generate(PROMPT, [params(seed, new=240)])) for seed in range(50)]
    await asyncio.sleep(0)
    await engine.close()
    results = await asyncio.wait_for(asyncio.gather(*waiting, return_exceptions=True), 10)
    assert any(isinstance(result, EngineError) for result in results)
    assert all(isinstance(result, EngineError) or len(result) == 1 for result in results)
    with pytest.raises(EngineError):
        await engine.generate(PROMPT, [params()])
