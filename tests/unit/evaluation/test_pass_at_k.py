"""pass@k against enumeration, and its interval against how often it holds the truth."""

from __future__ import annotations

from itertools import combinations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from async_rl.evaluation.pass_at_k import clustered_interval, estimate_pass_at_k, pass_at_k, wilson


@settings(max_examples=60, deadline=None)
@given(st.integers(1, 8), st.data())
def test_it_is_the_share_of_k_subsets_that_hold_a_pass(n: int, data: st.DataObject) -> None:
    c, k = data.draw(st.integers(0, n)), data.draw(st.integers(1, n))
    passes = [index < c for index in range(n)]
    subsets = [any(passes[index] for index in chosen) for chosen in combinations(range(n), k)]
    assert pass_at_k(n, c, k) == pytest.approx(sum(subsets) / len(subsets))


def test_known_values() -> None:
    assert pass_at_k(4, 1, 2) == pytest.approx(0.5)  # 1 − C(3,2)/C(4,2) = 1 − 3/6
    assert (pass_at_k(5, 0, 3), pass_at_k(5, 3, 3)) == (0.0, 1.0 - 0.0 / 10)
    assert pass_at_k(200, 3, 100) == pytest.approx(1 - 100 * 99 * 98 / (200 * 199 * 198))


@pytest.mark.parametrize(("n", "c", "k"), [(4, 1, 5), (4, 1, 0), (4, 5, 1), (4, -1, 1)])
def test_what_cannot_be_counted_is_refused(n: int, c: int, k: int) -> None:
    with pytest.raises(ValueError, match=f"n={n} c={c} k={k}"):
        pass_at_k(n, c, k)


def test_prompts_with_too_few_valid_completions_are_left_out_not_counted_as_failures() -> None:
    estimate = estimate_pass_at_k([(4, 4), (4, 2), (1, 0), (0, 0)], 2)
    assert estimate is not None
    assert estimate.value == pytest.approx((1.0 + 5 / 6) / 2)  # 1 − C(2,2)/C(4,2) = 5/6
    assert estimate.prompts == 2
    assert estimate_pass_at_k([(1, 1)], 2) is None


def test_an_interval_has_a_width_where_every_prompt_failed_or_passed() -> None:
    low, high = clustered_interval([0.0] * 20, most=80)
    assert low == 0.0
    assert high == pytest.approx(1.96**2 / (20 + 1.96**2), rel=1e-3)  # Wilson's upper bound of 0 among 20
    assert clustered_interval([1.0] * 20, most=80)[1] == 1.0


def test_one_completion_a_prompt_is_nearly_wilsons_own_interval() -> None:
    values = [1.0] * 30 + [0.0] * 70
    assert clustered_interval(values, most=100) == pytest.approx(wilson(0.3, 99), rel=1e-6)  # s² has n − 1


def test_completions_of_one_prompt_are_not_independent() -> None:
    """Forty prompts that pass always or never: four completions of each tell no more than one."""
    alike = estimate_pass_at_k([(4, 4)] * 20 + [(4, 0)] * 20, 1)
    mixed = estimate_pass_at_k([(4, 2)] * 40, 1)
    assert alike is not None
    assert mixed is not None
    assert (alike.low, alike.high) == pytest.approx(wilson(0.5, 39), rel=1e-6)
    assert (mixed.low, mixed.high) == pytest.approx(wilson(0.5, 160), rel=1e-6)


@pytest.mark.parametrize("mean", [0.05, 0.3, 0.9])
def test_the_interval_holds_the_truth_about_as_often_as_it_says(mean: float) -> None:
    """1,500 evaluations of 60 prompts × 4; prompts differ in difficulty (beta, a + b = 2), so completions are clustered."""
    draw = np.random.default_rng(0)
    held = 0
    for _ in range(1500):
        chances = draw.beta(2 * mean, 2 * (1 - mean), size=60)
        passed = draw.binomial(4, chances)
        estimate = estimate_pass_at_k([(4, int(count)) for count in passed], 1)
        assert estimate is not None
        held += estimate.low <= mean <= estimate.high
    assert 0.925 <= held / 1500 <= 0.985
