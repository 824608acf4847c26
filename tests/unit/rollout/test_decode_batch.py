from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import DynamicCache, PreTrainedModel

from async_rl.config.rollout import RolloutConfig
from async_rl.rollout.engine import Completion
from async_rl.rollout.loaded_model import LoadedModel, load_model
from async_rl.rollout.requests import Request, checked_request
from async_rl.testing.pushes import push_of
from async_rl.testing.tiny_models import EOS_ID, TinyModel, make_tiny_model, save_tiny_model
from protocol.messages import FinishReason, SamplingParams

SHARPNESS = 3.0
VOCAB = 22


@dataclass
class Setup:
    """A loaded engine core, and the plain Hugging Face model with the same weights."""

    loaded: LoadedModel
    plain: PreTrainedModel
    directory: Path

    def submit(self, prompt: Sequence[int], sampling: Sequence[SamplingParams]) -> Request:
        request = checked_request(
            prompt, sampling, max_context=self.loaded.max_context, vocab_size=self.loaded.vocab_size, now_s=0.0
        )
        self.loaded.batch.submit(request)
        return request

    def run(self) -> None:
        while not self.loaded.batch.is_idle:
            self.loaded.batch.advance()


def make(directory: Path, kind: TinyModel = TinyModel.LLAMA, **config: Any) -> Setup:
    path = save_tiny_model(directory, kind, sharpness=SHARPNESS)
    loaded = load_model(path, RolloutConfig(**config), lambda: 0.0)
    return Setup(loaded, make_tiny_model(kind, sharpness=SHARPNESS), path)


@pytest.fixture
def llama(tmp_path: Path) -> Setup:
    return make(tmp_path)


def params(seed: int = 0, *, new: int = 10, temperature: float = 1.0, stop: tuple[int, ...] = ()) -> SamplingParams:
    return SamplingParams(temperature, new, seed, stop)


def prompt_of(length: int, seed: int = 0) -> list[int]:
    return [int(token) for token in np.random.default_rng(seed).integers(2, VOCAB, length)]


@torch.no_grad()
def replayed(model: PreTrainedModel, prompt: Sequence[int], completion: Completion, temperature: float) -> np.ndarray:
    """Logprobs of the completion's tokens by one full forward pass without cache or padding."""
    ids = torch.tensor([[*prompt, *completion.token_ids.tolist()]])
    logits = model(input_ids=ids, attention_mask=torch.ones_like(ids), use_cache=False).logits[0].float()
    logprobs = torch.log_softmax(logits / temperature, -1)[:-1].gather(1, ids[0, 1:, None])[:, 0]
    return logprobs[len(prompt) - 1 :].numpy()


def single(request: Request) -> Completion:
    (completion,) = request.result()
    return completion


def crowd() -> Iterator[tuple[list[int], list[SamplingParams]]]:
    """Twelve requests of different lengths, group sizes, temperatures, limits; some stop early."""
    rng = np.random.default_rng(7)
    for index in range(12):
        group = [
            params(100 * index + member, new=int(rng.integers(1, 40)), temperature=(1.0, 0.6)[index % 2], stop=(EOS_ID,))
            for member in range(int(rng.integers(1, 4)))
        ]
        yield prompt_of(int(rng.integers(1, 24)), seed=index), group


@pytest.mark.parametrize("kind", list(TinyModel))
def test_logprobs_equal_a_plain_forward_pass_under_continuous_admission(kind: TinyModel, tmp_path: Path) -> None:
    setup = make(tmp_path, kind, max_running=5)  # fewer rows than members: groups are split, rows end at different times
    requests = []
    for prompt, group in crowd():
        requests.append(setup.submit(prompt, group))
        setup.loaded.batch.advance()
    setup.run()
    for request in requests:
        for sampling, completion in zip(request.sampling, request.result(), strict=True):
            expected = replayed(setup.plain, request.prompt.tolist(), completion, sampling.temperature)
            assert completion.logprobs == pytest.approx(expected, abs=1e-5)
            stopped = completion.token_ids[-1] == EOS_ID
            assert completion.finish_reason is (FinishReason.STOP if stopped else FinishReason.LENGTH)
            assert stopped or len(completion.token_ids) == sampling.max_new_tokens
            assert EOS_ID not in completion.token_ids[:-1]


def test_a_request_draws_the_same_tokens_alone_and_in_a_crowd(llama: Setup) -> None:
    jobs = list(crowd())
    together = [llama.submit(prompt, group) for prompt, group in jobs]
    llama.run()
    for (prompt, group), request in zip(jobs, together, strict=True):
        for sampling, in_crowd in zip(group, request.result(), strict=True):
            alone = llama.submit(prompt, [sampling])
            llama.run()
            assert single(alone).token_ids.tolist() == in_crowd.token_ids.tolist()
            assert single(alone).logprobs == pytest.approx(in_crowd.logprobs, abs=1e-5)


def test_members_of_a_group_with_other_seeds_differ(llama: Setup) -> None:
    request = llama.submit(prompt_of(5), [params(seed, new=30) for seed in range(4)])
    llama.run()
    assert len({tuple(completion.token_ids.tolist()) for completion in request.result()}) == 4


def test_the_window_moves_and_grows_without_changing_what_is_sampled(llama: Setup) -> None:
    # Short requests keep the batch alive while the columns run past the buffer; then a prompt longer than the window comes.
    long_lived = llama.submit(prompt_of(3), [params(1, new=240)])
    short = []
    for index in range(60):
        short.append(llama.submit(prompt_of(2 + index % 7, seed=index), [params(1000 + index, new=4)]))
        for _ in range(4):
            llama.loaded.batch.advance()
    long_prompt = llama.submit(prompt_of(250, seed=3), [params(5, new=6)])
    llama.run()
    for request in [long_lived, long_prompt, *short]:
        expected = replayed(llama.plain, request.prompt.tolist(), single(request), 1.0)
        assert single(request).logprobs == pytest.approx(expected, abs=1e-5)
    assert len(single(long_lived).token_ids) == 240


def test_a_full_batch_reuses_its_columns_for_ever(llama: Setup) -> None:
    batch = llama.loaded.batch
    llama.submit(prompt_of(3), [params(0, new=20)])
    for index in range(40):  # at every moment one row is alive: columns only ever advance
        llama.submit(prompt_of(3, seed=index), [params(index, new=20)])
        for _ in range(10):
            batch.advance()
    assert batch.num_columns <= 128


def test_completion_ends_at_the_context(tmp_path: Path) -> None:
    setup = make(tmp_path, max_context=12)
    request = setup.submit(prompt_of(9), [params(new=50)])
    setup.run()
    assert len(single(request).token_ids) == 3
    assert single(request).finish_reason is FinishReason.LENGTH


def test_a_stop_token_at_the_first_position_is_the_whole_completion(llama: Setup) -> None:
    free = llama.submit(prompt_of(4), [params(3)])
    llama.run()
    first = int(single(free).token_ids[0])
    stopped = llama.submit(prompt_of(4), [params(3, stop=(21, first, 20))])
    llama.run()
    assert single(stopped).token_ids.tolist() == [first]
    assert single(stopped).logprobs == pytest.approx(single(free).logprobs[:1], abs=1e-6)
    assert single(stopped).finish_reason is FinishReason.STOP


def test_rows_keep_their_own_stop_tokens(llama: Setup) -> None:
    stops = [(), (5,), (5, 6, 7, 8, 9)]
    request = llama.submit(prompt_of(4), [params(3, new=40, stop=stop) for stop in stops])
    llama.run()
    free = request.result()[0].token_ids.tolist()
    for stop, completion in zip(stops[1:], request.result()[1:], strict=True):
        end = next((index + 1 for index, token in enumerate(free) if token in stop), len(free))
        assert completion.token_ids.tolist() == free[:end]


def test_aborting_frees_rows_and_leaves_the_others_alone(llama: Setup) -> None:
    kept = llama.submit(prompt_of(6), [params(1, new=30)])
    gone = llama.submit(prompt_of(9, seed=1), [params(2, new=30), params(3, new=30)])
    also_kept = llama.submit(prompt_of(4, seed=2), [params(4, new=30)])
    for _ in range(5):
        llama.loaded.batch.advance()
    llama.loaded.batch.abort(gone)
    assert llama.loaded.batch.num_running == 2
    llama.run()
    assert gone.num_left == 2
    for request in (kept, also_kept):
        expected = replayed(llama.plain, request.prompt.tolist(), single(request), 1.0)
        assert single(request).logprobs == pytest.approx(expected, abs=1e-5)


def changed(model_seed: int) -> PreTrainedModel:
    return make_tiny_model(TinyModel.LLAMA, seed=model_seed, sharpness=SHARPNESS)


def push(setup: Setup, model: PreTrainedModel, version: int, *, recompute: bool) -> None:
    manifest, tensors = push_of(model, version)
    setup.loaded.weights.names.require(manifest, tensors)
    setup.loaded.weights.copy(manifest, tensors)
    setup.loaded.batch.serve(version, recompute=recompute)


def sampled_over_two_versions(setup: Setup, *, recompute: bool) -> tuple[list[Request], list[PreTrainedModel]]:
    """Six rows of different lengths; version 4 takes over after 7 steps, and a request comes after it."""
    requests = [setup.submit(prompt_of(3 + 4 * i, seed=i), [params(10 * i + j, new=18) for j in range(2)]) for i in range(3)]
    setup.loaded.batch.serve(3, recompute=recompute)
    for _ in range(7):
        setup.loaded.batch.advance()
    newer = changed(1)
    push(setup, newer, 4, recompute=recompute)
    requests.append(setup.submit(prompt_of(5, seed=9), [params(77, new=18)]))
    setup.run()
    return requests, [setup.plain, newer]


def test_recompute_makes_every_logprob_its_own_versions(llama: Setup) -> None:
    requests, (older, newer) = sampled_over_two_versions(llama, recompute=True)
    for request in requests:
        for completion in request.result():
            versions = completion.versions
            assert versions.tolist() == ([3] * 8 + [4] * 10 if request is not requests[-1] else [4] * 18)
            assert completion.kv_versions.tolist() == versions.tolist()
            for version, model in ((3, older), (4, newer)):
                expected = replayed(model, request.prompt.tolist(), completion, 1.0)
                at = versions == version
                assert completion.logprobs[at] == pytest.approx(expected[at], abs=1e-5)


@torch.no_grad()
def replayed_over_mixed_kv(
    older: PreTrainedModel, newer: PreTrainedModel, prompt: Sequence[int], completion: Completion, num_older: int
) -> np.ndarray:
    """The older model reads all but its last sampled token; the newer one goes on from the older one's KV."""
    ids = torch.tensor([[*prompt, *completion.token_ids.tolist()]])
    cut = len(prompt) + num_older - 1
    cache = DynamicCache(config=older.config)
    logits = []
    for model, part, seen in ((older, ids[:, :cut], cut), (newer, ids[:, cut:], ids.shape[1])):
        output = model(input_ids=part, attention_mask=torch.ones((1, seen)), past_key_values=cache, use_cache=True)
        logits.append(output.logits[0].float())
    logprobs = torch.log_softmax(torch.cat(logits), -1)[:-1].gather(1, ids[0, 1:, None])[:, 0]
    return logprobs[len(prompt) - 1 :].numpy()


@pytest.mark.filterwarnings("ignore:.*past_key_values.*:FutureWarning")
def test_keep_goes_on_over_the_old_kv_and_says_so(llama: Setup) -> None:
    requests, (older, newer) = sampled_over_two_versions(llama, recompute=False)
    for request in requests[:-1]:
        for completion in request.result():
            assert completion.versions.tolist() == [3] * 8 + [4] * 10
            assert completion.kv_versions.tolist() == [3] * 18
            expected = replayed_over_mixed_kv(older, newer, request.prompt.tolist(), completion, num_older=8)
            assert completion.logprobs == pytest.approx(expected, abs=1e-5)
            pure = replayed(newer, request.prompt.tolist(), completion, 1.0)
            assert np.abs(pure - completion.logprobs)[8:].max() > 1e-2  # no version's own, as documented
    assert single(requests[-1]).kv_versions.tolist() == [4] * 18


def test_scoring_does_not_disturb_running_rows(llama: Setup) -> None:
    request = llama.submit(prompt_of(6), [params(1, new=20)])
    sequences = [np.array(prompt_of(length, seed=length)) for length in (30, 1, 7)]
    for _ in range(5):
        llama.loaded.batch.advance()
        llama.loaded.score(sequences, 0.6)
    llama.run()
    assert single(request).logprobs == pytest.approx(replayed(llama.plain, prompt_of(6), single(request), 1.0), abs=1e-5)


@torch.no_grad()
@pytest.mark.parametrize("kind", list(TinyModel))
def test_scores_equal_a_plain_forward_pass(kind: TinyModel, tmp_path: Path) -> None:
    setup = make(tmp_path, kind)
    sequences = [np.array(prompt_of(length, seed=length)) for length in (30, 1, 7)]
    scores = setup.loaded.score(sequences, 0.6)
    for ids, found in zip(sequences, scores, strict=True):
        tensor = torch.from_numpy(ids)[None]
        logits = setup.plain(input_ids=tensor, attention_mask=torch.ones_like(tensor), use_cache=False).logits[0].float()
        expected = torch.log_softmax(logits / 0.6, -1)[:-1].gather(1, tensor[0, 1:, None])[:, 0]
        assert found == pytest.approx(expected.numpy(), abs=1e-5)
        assert len(found) == len(ids) - 1
