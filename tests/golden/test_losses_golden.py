"""Losses against numbers that were computed elsewhere from the papers' formulas, and gradients against exact expectations."""

from __future__ import annotations

import itertools
import math

import pytest
import torch
from torch import Tensor

from async_rl.algorithms.advantages import group_advantages
from async_rl.algorithms.importance import importance_ratio
from async_rl.algorithms.losses import LOSSES, ClipRange, LossSettings, LossTokens, clipped_surrogate, decoupled_clip

POLICY = torch.tensor([-0.5, -1.0, -0.2, -2.0, -0.3, -0.9, -1.5, 0.0])
PROXIMAL = torch.tensor([-0.7, -0.9, -0.6, -1.5, -0.1, -1.6, -1.4, 0.0])
BEHAVIOR = torch.tensor([-0.6, -1.3, -0.5, -3.5, -0.2, -1.5, -1.3, 0.0])
ADVANTAGES = torch.tensor([1.0, 1.0, 1.0, 1.0, -1.0, -1.0, -1.0, 0.0])
MASK = torch.tensor([True] * 7 + [False])
SYMMETRIC = ClipRange(0.2, 0.2)


def tokens(*, behavior: Tensor = BEHAVIOR, proximal: Tensor = PROXIMAL) -> LossTokens:
    return LossTokens(POLICY, proximal, behavior, ADVANTAGES, MASK)


@pytest.mark.parametrize(("clip", "expected"), [(SYMMETRIC, -0.0248639), (ClipRange(0.2, 0.28), -0.0393500)])
def test_ppo_clip_and_clip_higher(clip: ClipRange, expected: float) -> None:
    output = clipped_surrogate(tokens(behavior=PROXIMAL), LossSettings(clip))
    assert float(output.loss_sum) / 7 == pytest.approx(expected, abs=1e-6)


def test_decoupled_clip_is_ppo_times_the_truncated_token_weight() -> None:
    output = decoupled_clip(tokens(), LossSettings(SYMMETRIC, importance_cap=2.0))
    assert float(output.loss_sum) / 7 == pytest.approx(-0.1698348, abs=1e-6)


def test_decoupled_clip_without_a_gap_to_the_behavior_policy_is_ppo() -> None:
    output = decoupled_clip(tokens(behavior=PROXIMAL), LossSettings(SYMMETRIC))
    assert float(output.loss_sum) / 7 == pytest.approx(-0.0248639, abs=1e-6)


def test_ratio_is_one_where_both_sides_temper_and_shows_a_side_that_does_not() -> None:
    logits = torch.tensor([2.0, 0.0])
    tempered, raw = (logits / 0.5).log_softmax(-1)[:1], logits.log_softmax(-1)[:1]
    assert float(tempered) == pytest.approx(-0.01815, abs=1e-5)
    mask = torch.tensor([True])
    assert importance_ratio(tempered, tempered.clone(), mask).values.tolist() == [1.0]
    assert importance_ratio(raw, tempered, mask).values.tolist() == pytest.approx([math.exp(-0.12693 + 0.01815)], abs=1e-4)


REWARD_OF_ACTION = (1.0, 0.0, 0.3)


def expected_gradient(estimator: str | None, policy_logits: Tensor, behavior_logits: Tensor, group_size: int) -> Tensor:
    """Exact E[gradient of the mean loss] over all groups of one-token answers that behavior may sample.

    Without an estimator the advantage is the reward itself, so what is left is the loss's own gradient.
    """
    behavior = behavior_logits.log_softmax(-1)
    total = torch.zeros(3, dtype=torch.float64)
    settings = LossSettings(ClipRange(0.2, 0.2), importance_cap=1e6)
    for actions in itertools.product(range(3), repeat=group_size):
        index = torch.tensor(actions)
        rewards = [REWARD_OF_ACTION[action] for action in actions]
        credit = rewards if estimator is None else group_advantages(rewards, [True] * group_size, estimator=estimator).values
        logits = policy_logits.clone().requires_grad_()
        policy = logits.log_softmax(-1)[index]
        advantages, mask = torch.as_tensor(credit), torch.ones(group_size, dtype=torch.bool)
        loss = decoupled_clip(LossTokens(policy, policy.detach(), behavior[index], advantages, mask), settings).loss_sum
        (gradient,) = torch.autograd.grad(loss / group_size, logits)
        total += behavior[index].sum().exp() * gradient
    return total


def true_gradient(policy_logits: Tensor) -> Tensor:
    """Of minus the expected reward: −p_a (r_a − J), by hand."""
    p = policy_logits.softmax(-1)
    rewards = torch.tensor(REWARD_OF_ACTION, dtype=torch.float64)
    return -p * (rewards - (p * rewards).sum())


POLICY_LOGITS = torch.tensor([0.3, -0.2, 0.5], dtype=torch.float64)
BEHAVIOR_LOGITS = torch.tensor([-0.4, 0.6, 0.1], dtype=torch.float64)


def test_token_weights_make_a_one_token_gradient_exact_off_policy() -> None:
    gradient = expected_gradient(None, POLICY_LOGITS, BEHAVIOR_LOGITS, group_size=1)
    torch.testing.assert_close(gradient, true_gradient(POLICY_LOGITS), rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize(("estimator", "factor"), [("rloo", 1.0), ("dr_grpo", 2 / 3)])
def test_leave_one_out_gives_the_exact_gradient_and_the_group_mean_a_known_fraction(estimator: str, factor: float) -> None:
    gradient = expected_gradient(estimator, POLICY_LOGITS, POLICY_LOGITS, group_size=3)
    torch.testing.assert_close(gradient, factor * true_gradient(POLICY_LOGITS), rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("name", LOSSES)
def test_on_policy_every_loss_is_minus_the_sum_of_advantages(name: str) -> None:
    output = LOSSES[name](LossTokens(POLICY, POLICY, POLICY, ADVANTAGES, MASK), LossSettings(SYMMETRIC))
    assert float(output.loss_sum) == -1.0
