from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor

from async_rl.errors import ConfigError, ShapeError
from async_rl.model.attention import PACKED
from async_rl.model.load import load_causal_lm
from async_rl.model.logprobs import LogitTransform
from async_rl.testing.batches import make_sample
from async_rl.testing.tiny_models import TinyModel, save_tiny_model
from async_rl.trainer.distributed import joined_ranks
from async_rl.trainer.packing import MicroBatch, pack
from async_rl.trainer.policy import PolicyModel, PolicyOptions, load_policy, verify_logprobs

A = [3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13]
B = [20, 19, 18, 17, 4]


def logprobs(policy: PolicyModel, batch: MicroBatch, *, with_entropy: bool = False) -> tuple[Tensor, Tensor | None]:
    return policy.logprobs(
        batch.token_ids, batch.position_ids, batch.cu_seqlens, batch.loss_mask, batch.temperatures, with_entropy=with_entropy
    )


def by_definition(policy: PolicyModel, ids: list[int], temperature: float) -> Tensor:
    """log_softmax of the model's own logits, one sequence, transformers' eager attention."""
    policy.hf.set_attn_implementation("eager")
    logits = policy.hf(input_ids=torch.tensor([ids]), use_cache=False).logits[0, :-1] / temperature
    policy.hf.set_attn_implementation(PACKED)
    return torch.log_softmax(logits, -1).gather(1, torch.tensor(ids)[1:, None])[:, 0]


@pytest.mark.parametrize("kind", list(TinyModel))
def test_packed_equals_unpacked_in_value_and_gradient(kind: TinyModel, tmp_path: Path) -> None:
    policy = load_policy(save_tiny_model(tmp_path, kind, sharpness=2.0))
    (batch,) = pack([make_sample(A, temperature=0.7), make_sample(B, temperature=1.3)], 100)
    packed, _ = logprobs(policy, batch)
    separate = torch.cat([torch.zeros(1), by_definition(policy, A, 0.7), torch.zeros(1), by_definition(policy, B, 1.3)])
    torch.testing.assert_close(packed, separate, rtol=1e-6, atol=2e-6)
    weights = torch.linspace(-1, 1, len(packed))
    parameters = list(policy.parameters())
    mine = torch.autograd.grad((packed * weights).sum(), parameters)
    theirs = torch.autograd.grad((separate * weights).sum(), parameters)
    scale = max(float(gradient.abs().max()) for gradient in theirs)
    for got, wanted in zip(mine, theirs, strict=True):
        torch.testing.assert_close(got / scale, wanted / scale, rtol=0, atol=1e-6)


def test_altering_one_sequence_leaves_the_logprobs_and_gradients_of_the_other_alone(tmp_path: Path) -> None:
    policy = load_policy(save_tiny_model(tmp_path, sharpness=3.0))
    results = []
    for first in (A, [9] * len(A)):
        (batch,) = pack([make_sample(first), make_sample(B)], 100)
        values, _ = logprobs(policy, batch)
        of_b = values[len(A) :]
        gradients = torch.autograd.grad(of_b.sum(), list(policy.parameters()))
        results.append((of_b.detach(), gradients))
    (one, gradients_one), (other, gradients_other) = results
    torch.testing.assert_close(one, other, rtol=0, atol=1e-6)
    for mine, theirs in zip(gradients_one, gradients_other, strict=True):
        torch.testing.assert_close(mine, theirs, rtol=1e-5, atol=1e-5)


def test_only_selected_tokens_get_a_logprob_and_an_entropy(tmp_path: Path) -> None:
    policy = load_policy(save_tiny_model(tmp_path))
    (batch,) = pack([make_sample(A, trained=[2, 5]), make_sample(B, trained=[])], 100)
    values, entropy = logprobs(policy, batch, with_entropy=True)
    assert entropy is not None
    assert values.nonzero()[:, 0].tolist() == [2, 5]
    assert entropy.nonzero()[:, 0].tolist() == [2, 5]
    everything, _ = logprobs(policy, pack([make_sample(A), make_sample(B)], 100)[0])
    torch.testing.assert_close(values[[2, 5]], everything[[2, 5]], rtol=0, atol=1e-6)


def test_a_selected_first_token_is_refused(tmp_path: Path) -> None:
    policy = load_policy(save_tiny_model(tmp_path))
    select = torch.tensor([False, True, True, True])  # the second sequence starts at 2
    with pytest.raises(ShapeError, match="first token"):
        policy.logprobs(torch.tensor([3, 4, 5, 6]), torch.tensor([0, 1, 0, 1]), torch.tensor([0, 2, 4]), select, 1.0)


def test_activation_checkpointing_changes_no_bit(tmp_path: Path) -> None:
    directory = save_tiny_model(tmp_path, TinyModel.QWEN3)
    (batch,) = pack([make_sample(A), make_sample(B)], 100)
    results = []
    for recompute in (False, True):
        policy = load_policy(directory, options=PolicyOptions(activation_checkpointing=recompute))
        values, _ = logprobs(policy, batch)
        results.append([values, *torch.autograd.grad(values.sum(), list(policy.parameters()))])
        assert all(".layers." not in name or "checkpoint" not in name for name, _ in policy.named_full_tensors())
    assert all(torch.equal(one, other) for one, other in zip(*results, strict=True))


def test_score_returns_every_token_but_the_first_whatever_the_passes(tmp_path: Path) -> None:
    policy = load_policy(save_tiny_model(tmp_path, sharpness=3.0))
    sequences = [A, B, [4], A * 3]
    scores = policy.score(sequences, temperature=0.7)
    assert [len(score) for score in scores] == [10, 4, 0, 32]
    assert all(score.dtype == np.float32 for score in scores)
    for sequence, score in zip(sequences, scores, strict=True):
        if len(sequence) > 1:
            torch.testing.assert_close(torch.from_numpy(score), by_definition(policy, sequence, 0.7), rtol=0, atol=1e-5)
    for one, other in zip(scores, policy.score(sequences, temperature=0.7, max_tokens=12), strict=True):
        np.testing.assert_allclose(one, other, rtol=0, atol=1e-5)


@pytest.mark.parametrize("kind", [TinyModel.LLAMA, TinyModel.LLAMA_TIED, TinyModel.GPT2])
def test_full_tensors_and_ties_cover_the_state_dict(kind: TinyModel, tmp_path: Path) -> None:
    directory = save_tiny_model(tmp_path, kind)
    policy = load_policy(directory)
    tensors = dict(policy.named_full_tensors())
    aliases = {alias for alias, _ in policy.ties()}
    assert set(tensors) | aliases == set(load_causal_lm(directory).state_dict())
    assert not set(tensors) & aliases
    assert bool(aliases) == (kind is not TinyModel.LLAMA)
    assert all(owner in tensors for _, owner in policy.ties())


def test_bfloat16_compute_stays_near_float32_and_its_weights_stay_float32(tmp_path: Path) -> None:
    directory = save_tiny_model(tmp_path, sharpness=2.0)
    exact = load_policy(directory)
    sequences = [A, B, A * 4]
    with joined_ranks() as ranks:
        rounded = load_policy(directory, options=PolicyOptions(dtype=torch.bfloat16), mesh=ranks.mesh)
        scores = rounded.score(sequences, temperature=1.0)
        assert {parameter.dtype for parameter in rounded.parameters()} == {torch.float32}
        differences = np.abs(np.concatenate(scores) - np.concatenate(exact.score(sequences, temperature=1.0)))
    # Measured on this model: mean 0.0017, maximum 0.0048 nats. A float32 pass would differ by 1e-6.
    assert 1e-4 < differences.mean() < 0.005
    assert differences.max() < 0.02


def test_a_model_whose_logits_are_not_understood_is_refused(tmp_path: Path) -> None:
    policy = load_policy(save_tiny_model(tmp_path, TinyModel.GEMMA2, sharpness=40.0))
    assert verify_logprobs(policy) < 1e-5
    policy.transform = LogitTransform()  # as if its soft cap were unknown
    with pytest.raises(ConfigError, match="differ from the model's own"):
        verify_logprobs(policy)


def test_models_that_cannot_run_packed_are_refused_with_the_reason(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="load it with attn"):
        PolicyModel(load_causal_lm(save_tiny_model(tmp_path / "sdpa")))
    with pytest.raises(ConfigError, match="float32"):
        PolicyModel(load_causal_lm(save_tiny_model(tmp_path / "half"), attn=PACKED, dtype=torch.bfloat16))
    rope = {"rope_type": "dynamic", "factor": 2.0, "rope_theta": 10000.0}
    with pytest.raises(ConfigError, match="rope_type='dynamic'"):
        load_policy(save_tiny_model(tmp_path / "rope", rope_parameters=rope))
