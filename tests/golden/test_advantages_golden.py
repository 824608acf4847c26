"""Advantages against numbers that were computed elsewhere from the papers' formulas."""

from __future__ import annotations

import pytest

from async_rl.algorithms.advantages import group_advantages

GOLDEN = {
    "grpo": ([0.577349, -1.154699, 0.577349], [1.154699, -0.577349, -0.577349]),
    "dr_grpo": ([0.333333, -0.666667, 0.333333], [0.666667, -0.333333, -0.333333]),
    "rloo": ([0.5, -1.0, 0.5], [1.0, -0.5, -0.5]),
}


@pytest.mark.parametrize("estimator", GOLDEN)
def test_two_groups_of_three(estimator: str) -> None:
    for rewards, expected in zip(([1, 0, 1], [1, 0, 0]), GOLDEN[estimator], strict=True):
        values = group_advantages(rewards, [True] * 3, estimator=estimator, eps=1e-6).values
        assert values.tolist() == pytest.approx(expected, abs=1e-6)
