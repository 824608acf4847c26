from __future__ import annotations

import copy
import math
from collections.abc import Sequence
from pathlib import Path

import pytest
import torch
from torch import Tensor
from torch.optim import AdamW

from async_rl.algorithms.losses import ClipRange, LossFn, LossSettings, clipped_surrogate, decoupled_clip
from async_rl.testing.batches import credit_loss, first_step_gradients, make_sample, random_samples
from async_rl.testing.tiny_models import TinyModel, save_tiny_model
from async_rl.trainer.distributed import joined_ranks
from async_rl.trainer.packing import MicroBatch, filler_micro_batch, pack
from async_rl.trainer.policy import PolicyModel, PolicyOptions, load_policy, shard_policy
from async_rl.trainer.step import (
    OtherLogprobs,
    SkipReason,
    StepSettings,
    StepStats,
    make_optimizer,
    policy_logprobs,
    train_step,
)

LOSS = LossSettings(ClipRange(0.2, 0.28))
A = make_sample([3, 4, 5], trained=[2], advantages=8.0)  # one trained token, loss 8
B = make_sample([6, 7, 8, 9], advantages=2.0)  # three, loss 2 each


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tiny_model(tmp_path_factory.mktemp("model"), TinyModel.LLAMA_TIED, sharpness=2.0)


def learner(directory: Path) -> tuple[PolicyModel, AdamW]:
    policy = load_policy(directory)
    return policy, make_optimizer(policy, learning_rate=1e-3)


def step(
    policy: PolicyModel,
    optimizer: AdamW,
    micro_batches: Sequence[MicroBatch],
    *,
    loss_fn: LossFn = credit_loss,
    grad_clip: float = math.inf,
    proximal: Sequence[Tensor] | None = None,
) -> StepStats:
    settings = StepSettings(loss_fn, LOSS, grad_clip=grad_clip, with_entropy=True)
    return train_step(
        policy, optimizer, micro_batches, settings=settings, learning_rate=1e-3, others=OtherLogprobs(proximal=proximal)
    )


def weights(policy: PolicyModel) -> dict[str, Tensor]:
    return {name: tensor.clone() for name, tensor in policy.named_full_tensors()}


def assert_same(one: dict[str, Tensor], other: dict[str, Tensor], *, atol: float = 0.0) -> None:
    assert one.keys() == other.keys()
    for name, tensor in one.items():
        torch.testing.assert_close(tensor, other[name], rtol=0, atol=atol, msg=lambda text, name=name: f"{name}: {text}")


def test_the_loss_is_the_mean_over_tokens_however_they_are_packed(directory: Path) -> None:
    results = []
    for micro_batches in (pack([A, B], 100), [*pack([A], 100), *pack([B], 100)], [*pack([B, A], 100), filler_micro_batch()]):
        policy, optimizer = learner(directory)
        stats = step(policy, optimizer, micro_batches)
        assert stats.loss == pytest.approx(3.5, abs=1e-6)  # (8 + 2 + 2 + 2) / 4: not 5, the mean of means, nor 1.75
        assert (stats.num_tokens, stats.num_trained_tokens, stats.num_micro_batches) == (7, 4, len(micro_batches))
        results.append((first_step_gradients(policy, optimizer), stats.grad_norm))
    for gradients, norm in results[1:]:
        assert norm == pytest.approx(results[0][1], rel=1e-5)
        assert_same(gradients, results[0][0], atol=5e-6)  # of gradients up to 5


def test_the_gradient_is_that_of_the_mean_of_the_models_own_logprobs(directory: Path) -> None:
    policy, optimizer = learner(directory)
    loss = torch.zeros(())
    for ids, trained, advantage in (([3, 4, 5], [2], 8.0), ([6, 7, 8, 9], [1, 2, 3], 2.0)):
        policy.hf.set_attn_implementation("eager")
        logits = policy.hf(input_ids=torch.tensor([ids]), use_cache=False).logits[0]
        policy.hf.set_attn_implementation("async_rl_packed")
        logs = torch.log_softmax(logits, -1)
        loss = loss + sum(advantage * logs[t - 1, ids[t]] for t in trained) / 4
    names = [name for name, _ in policy.hf.named_parameters()]
    expected = dict(zip(names, torch.autograd.grad(loss, list(policy.hf.parameters())), strict=True))
    step(policy, optimizer, pack([A, B], 100))
    assert_same(first_step_gradients(policy, optimizer), expected, atol=5e-6)  # of gradients up to 5


def test_masked_tokens_get_a_gradient_of_exactly_zero(directory: Path) -> None:
    # model, tool, model: what the model sampled at 3, 4 and 7, 8; a tool wrote 5 and 6
    sample = make_sample([3, 4, 5, 6, 7, 8, 9, 10, 11], trained=[3, 4, 7, 8], behavior_logprob=-2.9)
    policy, optimizer = learner(directory)
    rows: list[Tensor] = []
    policy.hf.base_model.norm.register_full_backward_hook(lambda module, grads, outputs: rows.append(outputs[0]))
    step(policy, optimizer, pack([sample], 100), loss_fn=decoupled_clip)
    ((gradient,),) = rows
    # token t is predicted at t − 1
    assert gradient.abs().sum(-1).nonzero()[:, 0].tolist() == [2, 3, 6, 7]


def test_a_step_without_trained_tokens_is_skipped_and_changes_nothing(directory: Path) -> None:
    policy, optimizer = learner(directory)
    before = weights(policy)
    stats = step(policy, optimizer, [*pack([make_sample([3, 4, 5], trained=[])], 10), filler_micro_batch()])
    assert (stats.applied, stats.skip_reason) == (False, SkipReason.NO_TOKENS)
    assert (stats.loss, stats.grad_norm, stats.num_trained_tokens) == (0.0, 0.0, 0)
    assert not optimizer.state
    assert_same(before, weights(policy))
    assert step(policy, optimizer, []).skip_reason is SkipReason.NO_TOKENS


@pytest.mark.parametrize("loss_fn", [decoupled_clip, clipped_surrogate])
def test_a_loss_that_is_not_finite_is_not_applied(loss_fn: LossFn, directory: Path) -> None:
    policy, optimizer = learner(directory)
    step(policy, optimizer, pack([A, B], 100))
    before, moments = weights(policy), copy.deepcopy(optimizer.state_dict()["state"])
    bad = make_sample([3, 4, 5], advantages=math.nan)
    stats = step(policy, optimizer, pack([A, bad], 100), loss_fn=loss_fn)
    assert (stats.applied, stats.skip_reason) == (False, SkipReason.NON_FINITE_LOSS)
    assert math.isnan(stats.loss)
    assert_same(before, weights(policy))
    after = optimizer.state_dict()["state"]
    assert all(torch.equal(after[i][key], moments[i][key]) for i in moments for key in moments[i])
    assert all(parameter.grad is None for parameter in policy.parameters())
    assert step(policy, optimizer, pack([A, B], 100)).applied  # and the next step is none the worse


def test_a_gradient_that_is_not_finite_is_not_applied(directory: Path) -> None:
    policy, optimizer = learner(directory)
    before = weights(policy)
    huge = make_sample([3, 4, 5], trained=[1, 2], advantages=[3e38, -3e38])  # sums to 0, overflows on the way back
    stats = step(policy, optimizer, pack([huge], 100))
    assert math.isfinite(stats.loss)
    assert (stats.applied, stats.skip_reason) == (False, SkipReason.NON_FINITE_GRADIENT)
    assert_same(before, weights(policy))


def test_the_gradient_is_clipped_to_its_norm(directory: Path) -> None:
    policy, optimizer = learner(directory)
    stats = step(policy, optimizer, pack([A, B], 100), grad_clip=0.5)
    clipped = first_step_gradients(policy, optimizer)
    norm = torch.stack([gradient.norm() for gradient in clipped.values()]).norm()
    assert stats.grad_norm > 1.0  # reported as it was
    assert float(norm) == pytest.approx(0.5, rel=1e-4)


def test_the_policy_itself_is_the_proximal_one_unless_another_is_given(directory: Path) -> None:
    policy, optimizer = learner(directory)
    micro_batches = pack([A, B], 100)
    (own,) = policy_logprobs(policy, micro_batches)
    stats = step(policy, optimizer, micro_batches, loss_fn=decoupled_clip)
    assert stats.loss_sums["ratio_sum"] == pytest.approx(4.0, abs=1e-6)  # four ratios of exactly 1
    policy, optimizer = learner(directory)
    shifted = torch.where(micro_batches[0].loss_mask, own - math.log(1.1), 0.0)
    stats = step(policy, optimizer, micro_batches, loss_fn=decoupled_clip, proximal=[shifted])
    assert stats.loss_sums["ratio_sum"] == pytest.approx(4.4, abs=1e-4)


def test_the_gap_to_the_behavior_policy_is_measured_on_trained_tokens(directory: Path) -> None:
    policy, optimizer = learner(directory)
    micro_batches = pack([A, B], 100)
    (own,) = policy_logprobs(policy, micro_batches)
    gaps = (own + 3.0)[micro_batches[0].loss_mask]  # every behavior logprob is −3
    stats = step(policy, optimizer, micro_batches)
    assert stats.off_policy.log_ratio_max_abs == pytest.approx(float(gaps.abs().max()), abs=1e-6)
    assert stats.off_policy.k1 == pytest.approx(-float(gaps.mean()), abs=1e-6)
    assert stats.entropy is not None
    assert 0 < stats.entropy < math.log(22)


def test_only_matrices_decay(directory: Path) -> None:
    policy = load_policy(directory)
    optimizer = make_optimizer(policy, learning_rate=0.1, weight_decay=0.5)
    before = weights(policy)
    nothing = make_sample([3, 4, 5], advantages=0.0)
    assert step(policy, optimizer, pack([nothing], 10)).applied
    for name, after in weights(policy).items():
        factor = 1 - 1e-3 * 0.5 if after.dim() >= 2 else 1.0  # train_step sets the learning rate: 1e-3
        torch.testing.assert_close(after, before[name] * factor, rtol=1e-6, atol=0, msg=name)


def test_steps_are_bit_exact(directory: Path) -> None:
    runs = []
    for _ in range(2):
        policy, optimizer = learner(directory)
        samples = random_samples([5, 9, 13, 20, 7], seed=1)
        for _ in range(3):
            step(policy, optimizer, pack(samples, 30), loss_fn=decoupled_clip, grad_clip=1.0)
        runs.append(weights(policy))
    assert_same(*runs)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_one_sharded_rank_trains_what_the_plain_model_trains(dtype: torch.dtype, directory: Path) -> None:
    micro_batches = pack(random_samples([5, 9, 13, 20, 7]), 30)
    plain, plain_optimizer = learner(directory)
    step(plain, plain_optimizer, micro_batches)
    with joined_ranks() as ranks:
        sharded = load_policy(directory, options=PolicyOptions(dtype=dtype))
        shard_policy(sharded, ranks.mesh)
        optimizer = make_optimizer(sharded, learning_rate=1e-3)
        stats = step(sharded, optimizer, micro_batches)
        gradients = first_step_gradients(sharded, optimizer)
    assert stats.applied
    expected = first_step_gradients(plain, plain_optimizer)
    assert {gradient.dtype for gradient in gradients.values()} == {torch.float32}
    norm = torch.stack([gradient.norm() for gradient in expected.values()]).norm()
    difference = torch.stack([(gradients[name] - expected[name]).norm() for name in expected]).norm()
    assert difference / norm < (1e-6 if dtype is torch.float32 else 0.03)  # measured in bfloat16: 0.0105
