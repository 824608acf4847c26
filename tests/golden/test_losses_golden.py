"""Losses against numbers that were computed elsewhere from the papers' formulas, and rows worked by hand."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import Tensor

from async_rl.algorithms.aggregation import Aggregation, AggregationName, StepCounts, aggregate
from async_rl.algorithms.importance import importance_ratio
from async_rl.algorithms.kl import kl_loss
from async_rl.algorithms.losses import LOSSES, ClipRange, LossSettings, LossTokens

POLICY = torch.tensor([-0.5, -1.0, -0.2, -2.0, -0.3, -0.9, -1.5, 0.0])
PROXIMAL = torch.tensor([-0.7, -0.9, -0.6, -1.5, -0.1, -1.6, -1.4, 0.0])
BEHAVIOR = torch.tensor([-0.6, -1.3, -0.5, -3.5, -0.2, -1.5, -1.3, 0.0])
ADVANTAGES = torch.tensor([1.0, 1.0, 1.0, 1.0, -1.0, -1.0, -1.0, 0.0])
MASK = torch.tensor([True] * 7 + [False])
SEQUENCES = torch.tensor([0] * 4 + [1] * 4)
SYMMETRIC, HIGHER = ClipRange(0.2, 0.2), ClipRange(0.2, 0.28)

GOLDEN: dict[str, tuple[float, str, AggregationName, dict[str, Any]]] = {
    "PPO clip": (-0.0248639, "clipped_surrogate", "token_mean", {}),
    "dual clip": (-0.0982572, "clipped_surrogate", "token_mean", {"dual_clip": 1.5}),
    "clip-higher": (-0.0393500, "clipped_surrogate", "token_mean", {"clip": HIGHER}),
    "truncated token weight": (-0.1698348, "decoupled_clip", "token_mean", {}),
    "masked token weight": (0.0034597, "decoupled_clip", "token_mean", {"importance": "mask"}),
    "truncated sequence weight": (-0.6344384, "decoupled_clip", "token_mean", {"importance_level": "sequence"}),
    "GSPO, token mean": (-0.0817297, "gspo", "token_mean", {}),
    "GSPO": (0.0713154, "gspo", "sequence_mean_of_means", {}),
    "CISPO": (0.0880948, "cispo", "token_mean", {"clip": HIGHER}),
    "CISPO, capped only": (0.0328178, "cispo", "token_mean", {"clip": ClipRange(1.0, 0.28)}),
    "geometric-mean PPO": (0.0957007, "gmpo", "sequence_mean_of_means", {}),
    "mean of token sums": (-0.0870237, "clipped_surrogate", "sequence_mean_of_sums", {}),
    "mean of token means": (0.1339658, "clipped_surrogate", "sequence_mean_of_means", {}),
    "constant 4": (-0.0435119, "clipped_surrogate", "constant", {}),
}


def tokens(*, behavior: Tensor = BEHAVIOR, proximal: Tensor = PROXIMAL) -> LossTokens:
    return LossTokens(POLICY, proximal, behavior, ADVANTAGES, MASK, SEQUENCES, 2)


@pytest.mark.parametrize("row", GOLDEN)
def test_golden(row: str) -> None:
    expected, name, how, options = GOLDEN[row]
    # rows without a weight take the proximal policy as the one that sampled
    given = tokens() if name == "decoupled_clip" else tokens(behavior=PROXIMAL)
    output = LOSSES[name](given, LossSettings(**{"clip": SYMMETRIC, "importance_cap": 2.0, **options}))
    loss = aggregate(output.token_losses, given, StepCounts(7, 2), Aggregation(how, 4.0))
    assert float(loss) == pytest.approx(expected, abs=1e-6)


def test_decoupled_clip_without_a_gap_to_the_behavior_policy_is_ppo() -> None:
    output = LOSSES["decoupled_clip"](tokens(behavior=PROXIMAL), LossSettings(SYMMETRIC))
    assert float(output.loss_sum) / 7 == pytest.approx(-0.0248639, abs=1e-6)


@pytest.mark.parametrize("name", ["decoupled_clip", "clipped_surrogate", "gspo", "gmpo"])
def test_on_policy_every_surrogate_is_minus_the_sum_of_advantages(name: str) -> None:
    output = LOSSES[name](LossTokens(POLICY, POLICY, POLICY, ADVANTAGES, MASK), LossSettings(SYMMETRIC))
    assert float(output.loss_sum) == -1.0


TWO = torch.tensor([math.log(0.4), math.log(0.2)])  # one sequence: proximal .4 and .2, behavior .1 and .4
FROM = torch.tensor([math.log(0.1), math.log(0.4)])


@pytest.mark.parametrize(
    ("options", "weights"),
    [
        ({"importance": "exact"}, [4.0, 0.5]),
        ({"importance": "exact", "importance_level": "sequence"}, [2.0, 2.0]),  # 4 × 1/2
        ({"importance": "exact", "importance_level": "geometric"}, [math.sqrt(2.0)] * 2),
        ({"importance": "truncate", "importance_cap": 3.0}, [3.0, 0.5]),
        ({"importance": "mask", "importance_cap": 3.0}, [0.0, 0.5]),  # what is kept keeps its weight
        ({"importance": "mask", "importance_cap": 4.5, "importance_floor": 0.75}, [4.0, 0.0]),
        # bounds are on proximal/behavior, not on its inverse: 1/4 and 2 would keep the first and mask neither above 3
        ({"importance": "mask", "importance_cap": 3.0, "importance_floor": 0.75}, [0.0, 0.0]),
        ({"importance": "none"}, [1.0, 1.0]),
    ],
)
def test_importance_weights_by_hand(options: dict[str, Any], weights: list[float]) -> None:
    given = LossTokens(TWO, TWO, FROM, torch.ones(2), torch.ones(2, dtype=torch.bool))
    output = LOSSES["decoupled_clip"](given, LossSettings(SYMMETRIC, **options))
    assert output.token_losses.tolist() == pytest.approx([-weight for weight in weights], rel=1e-6)


def test_ratio_is_one_where_both_sides_temper_and_shows_a_side_that_does_not() -> None:
    logits = torch.tensor([2.0, 0.0])
    tempered, raw = (logits / 0.5).log_softmax(-1)[:1], logits.log_softmax(-1)[:1]
    assert float(tempered) == pytest.approx(-0.01815, abs=1e-5)
    mask = torch.tensor([True])
    assert importance_ratio(tempered, tempered.clone(), mask).values.tolist() == [1.0]
    assert importance_ratio(raw, tempered, mask).values.tolist() == pytest.approx([math.exp(-0.12693 + 0.01815)], abs=1e-4)


@pytest.mark.parametrize(
    ("estimator", "form", "expected"),
    [
        ("k1", "plain", 0.0),
        ("k2", "plain", -0.549),
        ("k3", "plain", -0.400),
        ("k1", "unbiased", -0.549),
        ("k2", "unbiased", -0.549),
        ("k3", "unbiased", -0.549),
    ],
)
def test_kl_gradient_of_two_outcomes(estimator: Any, form: Any, expected: float) -> None:
    """p = 0.5 each, the reference gives the first 0.9; exact expectation over one logit: the true gradient is −0.549."""
    logit = torch.zeros((), dtype=torch.float64, requires_grad=True)
    policy = torch.stack((torch.nn.functional.logsigmoid(logit), torch.nn.functional.logsigmoid(-logit)))
    reference = torch.tensor([0.9, 0.1], dtype=torch.float64).log()
    same, one = policy.detach(), torch.ones(2, dtype=torch.bool)
    given = LossTokens(policy, same, same, torch.zeros(2, dtype=torch.float64), one, torch.tensor([0, 1]), 2)
    expectation = (same.exp() * kl_loss(reference, given, estimator=estimator, form=form)).sum()
    (gradient,) = torch.autograd.grad(expectation, logit)
    assert float(gradient) == pytest.approx(expected, abs=1e-3)
