from __future__ import annotations

import math

import pytest
import torch

from async_rl.algorithms.importance import (
    LOG_RATIO_BOUND,
    effective_sample_size,
    importance_ratio,
    importance_weight,
    summarize_ratios,
)
from async_rl.errors import ShapeError

LN2 = math.log(2.0)


def test_ratio_and_its_gradient_by_hand() -> None:
    policy = torch.tensor([-1.0 + LN2, -1.0, -5.0], requires_grad=True)
    ratio = importance_ratio(policy, torch.full((3,), -1.0), torch.tensor([True, True, False]))
    assert ratio.values.tolist() == pytest.approx([2.0, 1.0, 1.0])
    (gradient,) = torch.autograd.grad(ratio.values.sum(), policy)
    assert gradient.tolist() == pytest.approx([2.0, 1.0, 0.0])  # d exp(x)/dx; nothing where masked
    assert int(ratio.num_clamped) == 0


@pytest.mark.parametrize("sign", [1.0, -1.0])
def test_a_huge_log_ratio_is_clamped_counted_and_without_gradient(sign: float) -> None:
    policy = torch.tensor([sign * 200.0, 0.0], requires_grad=True)
    ratio = importance_ratio(policy, torch.zeros(2), torch.tensor([True, True]))
    assert ratio.values.tolist() == pytest.approx([math.exp(sign * LOG_RATIO_BOUND), 1.0])
    assert int(ratio.num_clamped) == 1
    (gradient,) = torch.autograd.grad(ratio.values.sum(), policy)
    assert gradient.tolist() == [0.0, 1.0]


def test_clamps_are_counted_only_where_trained() -> None:
    ratio = importance_ratio(torch.tensor([200.0, 200.0]), torch.zeros(2), torch.tensor([True, False]))
    assert int(ratio.num_clamped) == 1


def test_nan_surfaces_where_trained_and_only_there() -> None:
    nan = float("nan")
    policy = torch.tensor([nan, nan], requires_grad=True)
    ratio = importance_ratio(policy, torch.zeros(2), torch.tensor([True, False])).values
    assert math.isnan(ratio[0].item())
    assert ratio[1].item() == 1.0
    weight = importance_weight(torch.tensor([nan]), torch.zeros(1), torch.tensor([True]), cap=2.0)
    assert math.isnan(weight.values.item())


def test_ratio_has_no_gradient_into_the_old_policy() -> None:
    old = torch.zeros(1, requires_grad=True)
    assert not importance_ratio(torch.ones(1), old, torch.tensor([True])).values.requires_grad


def test_half_precision_logprobs_are_compared_in_float32() -> None:
    ratio = importance_ratio(torch.zeros(1, dtype=torch.bfloat16), torch.full((1,), 1e-3), torch.tensor([True]))
    assert ratio.values.dtype == torch.float32
    assert ratio.values.item() == pytest.approx(math.exp(-1e-3), rel=1e-6)


def test_weight_is_truncated_detached_and_its_raw_sums_are_kept() -> None:
    proximal = torch.tensor([2 * LN2, 0.0, -LN2, 9.0], requires_grad=True)
    weight = importance_weight(proximal, torch.zeros(4), torch.tensor([True, True, True, False]), cap=2.0)
    assert weight.values.tolist() == pytest.approx([2.0, 1.0, 0.5, 1.0])  # raw 4, 1, 1/2
    assert not weight.values.requires_grad
    assert int(weight.num_truncated) == 1
    assert float(weight.raw_sum) == pytest.approx(5.5)
    assert float(weight.raw_squared_sum) == pytest.approx(16 + 1 + 0.25)


def test_an_absurd_weight_is_truncated_to_the_cap_with_finite_sums() -> None:
    weight = importance_weight(torch.tensor([1000.0]), torch.zeros(1), torch.tensor([True]), cap=2.0)
    assert weight.values.tolist() == [2.0]
    assert math.isfinite(float(weight.raw_squared_sum))


def test_summary_by_hand() -> None:
    behavior = torch.full((4,), -1.0)
    policy = behavior + torch.tensor([LN2, 0.0, -LN2, 50.0])
    summary = summarize_ratios(policy, behavior, torch.tensor([True, True, True, False]))
    assert summary.num_tokens == 3
    assert summary.ratio_mean == pytest.approx(3.5 / 3)
    assert (summary.ratio_min, summary.ratio_p01, summary.ratio_p50) == pytest.approx((0.5, 0.5, 1.0))
    assert (summary.ratio_p99, summary.ratio_max) == pytest.approx((2.0, 2.0))
    assert summary.log_ratio_max_abs == pytest.approx(LN2)
    assert summary.kl_k1 == pytest.approx(0.0, abs=1e-7)
    assert summary.kl_k3 == pytest.approx(((2 - 1 - LN2) + (0.5 - 1 + LN2)) / 3)
    assert summary.ess_fraction == pytest.approx(3.5**2 / (4 + 1 + 0.25) / 3)


def test_percentiles_are_nearest_rank() -> None:
    policy = torch.log(torch.arange(1, 201, dtype=torch.float64))
    summary = summarize_ratios(policy, torch.zeros(200), torch.ones(200, dtype=torch.bool))
    assert (summary.ratio_p01, summary.ratio_p50, summary.ratio_p99) == pytest.approx((2.0, 100.0, 198.0), rel=1e-5)


def test_effective_sample_size_is_that_of_the_raw_weights() -> None:
    policy = torch.tensor([math.log(100.0)] + [0.0] * 9)
    summary = summarize_ratios(policy, torch.zeros(10), torch.ones(10, dtype=torch.bool))
    assert summary.ess_fraction == pytest.approx(109**2 / (100**2 + 9) / 10)  # 0.119; truncated at 2 it would be 0.93


def test_summary_of_nothing_says_no_difference() -> None:
    summary = summarize_ratios(torch.zeros(2), torch.zeros(2), torch.zeros(2, dtype=torch.bool))
    assert (summary.num_tokens, summary.ratio_mean, summary.kl_k3, summary.ess_fraction) == (0, 1.0, 0.0, 1.0)
    assert effective_sample_size(0.0, 0.0) == 0.0


def test_kl_estimates_agree_with_the_exact_value_in_expectation() -> None:
    behavior, policy = torch.tensor([0.5, 0.3, 0.2]).log(), torch.tensor([0.25, 0.25, 0.5]).log()
    exact = 0.5 * math.log(2) + 0.3 * math.log(1.2) + 0.2 * math.log(0.4)
    tokens = torch.tensor([0] * 5 + [1] * 3 + [2] * 2)  # exactly behavior's proportions
    summary = summarize_ratios(policy[tokens], behavior[tokens], torch.ones(10, dtype=torch.bool))
    assert summary.kl_k1 == pytest.approx(exact, rel=1e-5)
    assert summary.kl_k3 == pytest.approx(exact, rel=1e-5)


def test_lengths_that_differ_are_refused_by_name() -> None:
    with pytest.raises(ShapeError, match=r"policy_logprobs=\[2\], old_logprobs=\[3\]"):
        importance_ratio(torch.zeros(2), torch.zeros(3), torch.ones(2, dtype=torch.bool))
    with pytest.raises(ShapeError):
        importance_ratio(torch.zeros(2, 1), torch.zeros(2, 1), torch.ones(2, 1, dtype=torch.bool))
