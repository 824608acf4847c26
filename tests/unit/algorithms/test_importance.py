from __future__ import annotations

import math

import pytest
import torch

from async_rl.algorithms.importance import LOG_RATIO_BOUND, ImportanceWeight, importance_ratio, importance_weight
from async_rl.algorithms.tokens import ClipRange, LossSettings, LossTokens
from async_rl.errors import ShapeError

LN2 = math.log(2.0)


def weigh(log_weights: list[float], mask: list[bool]) -> ImportanceWeight:
    proximal = torch.tensor(log_weights, requires_grad=True)
    zeros = torch.zeros(len(mask))
    tokens = LossTokens(proximal, proximal, zeros, zeros, torch.tensor(mask))
    return importance_weight(proximal, tokens, LossSettings(ClipRange(0.2, 0.2), importance_cap=2.0))


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
    weight = weigh([nan], [True])
    assert math.isnan(weight.values.item())


def test_ratio_has_no_gradient_into_the_old_policy() -> None:
    old = torch.zeros(1, requires_grad=True)
    assert not importance_ratio(torch.ones(1), old, torch.tensor([True])).values.requires_grad


def test_half_precision_logprobs_are_compared_in_float32() -> None:
    ratio = importance_ratio(torch.zeros(1, dtype=torch.bfloat16), torch.full((1,), 1e-3), torch.tensor([True]))
    assert ratio.values.dtype == torch.float32
    assert ratio.values.item() == pytest.approx(math.exp(-1e-3), rel=1e-6)


def test_weight_is_truncated_detached_and_its_raw_sums_are_kept() -> None:
    weight = weigh([2 * LN2, 0.0, -LN2, 9.0], [True, True, True, False])
    assert weight.values.tolist() == pytest.approx([2.0, 1.0, 0.5, 1.0])  # raw 4, 1, 1/2
    assert not weight.values.requires_grad
    assert int(weight.num_truncated) == 1
    assert float(weight.raw_sum) == pytest.approx(5.5)
    assert float(weight.raw_squared_sum) == pytest.approx(16 + 1 + 0.25)


def test_an_absurd_weight_is_truncated_to_the_cap_with_finite_sums() -> None:
    weight = weigh([1000.0], [True])
    assert weight.values.tolist() == [2.0]
    assert math.isfinite(float(weight.raw_squared_sum))


def test_lengths_that_differ_are_refused_by_name() -> None:
    with pytest.raises(ShapeError, match=r"policy_logprobs=\[2\], old_logprobs=\[3\]"):
        importance_ratio(torch.zeros(2), torch.zeros(3), torch.ones(2, dtype=torch.bool))
    with pytest.raises(ShapeError):
        importance_ratio(torch.zeros(2, 1), torch.zeros(2, 1), torch.ones(2, 1, dtype=torch.bool))
