"""Advantages against numbers that were computed elsewhere from the papers' formulas, and rows worked by hand."""

from __future__ import annotations

import math

import pytest

from async_rl.algorithms.advantages import ADVANTAGES
from async_rl.algorithms.credit import AdvantageSettings, RewardGroup
from async_rl.algorithms.dapo import overlong_penalty

GOLDEN = {
    "grpo": ([0.577349, -1.154699, 0.577349], [1.154699, -0.577349, -0.577349]),
    "dr_grpo": ([0.333333, -0.666667, 0.333333], [0.666667, -0.333333, -0.333333]),
    "rloo": ([0.5, -1.0, 0.5], [1.0, -0.5, -0.5]),
    "reinforce_pp_baseline": ([0.687184, -1.374369, 0.687184], [1.374369, -0.687184, -0.687184]),
}


@pytest.mark.parametrize("estimator", GOLDEN)
def test_two_groups_of_three(estimator: str) -> None:
    groups = [RewardGroup.of(rewards, num_tokens=[3, 3, 3]) for rewards in ([1, 0, 1], [1, 0, 0])]
    credited = ADVANTAGES[estimator](groups, AdvantageSettings(eps=1e-6))
    for values, expected in zip(credited, GOLDEN[estimator], strict=True):
        assert values.tolist() == pytest.approx(expected, abs=1e-6)


def test_reinforce_pp_whitens_over_the_tokens_of_the_batch() -> None:
    """Rewards 1, 0 | 1 with 1, 2 and 1 tokens: tokens 1, 0, 0, 1, mean 1/2, unbiased variance 4 × 1/4 / 3 = 1/3."""
    groups = [RewardGroup.of([1, 0], num_tokens=[1, 2]), RewardGroup.of([1], num_tokens=[1])]
    credited = ADVANTAGES["reinforce_pp"](groups, AdvantageSettings())
    expected = 0.5 * math.sqrt(3.0)
    assert credited[0].tolist() == pytest.approx([expected, -expected], rel=1e-6)
    assert credited[1].tolist() == pytest.approx([expected], rel=1e-6)


@pytest.mark.parametrize(("length", "penalty"), [(0, 0.0), (80, 0.0), (85, -0.25), (90, -0.5), (100, -1.0), (130, -1.0)])
def test_overlong_penalty_falls_over_the_buffer(length: int, penalty: float) -> None:
    assert overlong_penalty(length, max_length=100, buffer=20) == penalty
    assert overlong_penalty(length, max_length=100, buffer=0) == 0.0
