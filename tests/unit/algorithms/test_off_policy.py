from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from async_rl.algorithms.importance import effective_sample_size
from async_rl.algorithms.off_policy import OffPolicyReport, off_policy_report

LN2 = math.log(2.0)


def report(
    log_ratios: list[float] | Tensor, *, sequences: list[int] | None = None, lags: list[int] | None = None
) -> OffPolicyReport:
    logs = torch.as_tensor(log_ratios, dtype=torch.float64)
    ids = torch.zeros(len(logs), dtype=torch.int64) if sequences is None else torch.tensor(sequences)
    return off_policy_report(logs, ids, torch.ones(len(logs), dtype=torch.int32) if lags is None else torch.tensor(lags))


def test_report_by_hand() -> None:
    result = report([LN2, 0.0, -LN2], sequences=[7, 7, 3], lags=[0, 2, 0])
    assert (result.num_tokens, result.num_sequences) == (3, 2)
    assert result.ratio_mean == pytest.approx(3.5 / 3)
    assert (result.ratio_min, result.ratio_p01, result.ratio_p50) == pytest.approx((0.5, 0.5, 1.0))
    assert (result.ratio_p99, result.ratio_max) == pytest.approx((2.0, 2.0))
    assert result.log_ratio_max_abs == pytest.approx(LN2)
    assert result.k1 == pytest.approx(0.0, abs=1e-12)
    assert result.k3 == pytest.approx(((2 - 1 - LN2) + (0.5 - 1 + LN2)) / 3)
    assert result.ess_token == pytest.approx(3.5**2 / (4 + 1 + 0.25) / 3)
    assert result.ess_sequence == pytest.approx(2.5**2 / (4 + 0.25) / 2)  # weights 2 × 1 and 1/2
    assert (result.lag_token_mean, result.lag_token_max) == (pytest.approx(2 / 3), 2)
    assert (result.same_version_tokens, result.same_version_gap_max, result.same_version_gap_mean) == (
        2,
        pytest.approx(LN2),
        pytest.approx(LN2),
    )


def test_percentiles_are_nearest_rank() -> None:
    result = report(torch.log(torch.arange(1, 201, dtype=torch.float64)))
    assert (result.ratio_p01, result.ratio_p50, result.ratio_p99) == pytest.approx((2.0, 100.0, 198.0), rel=1e-5)


def test_effective_sample_size_is_that_of_the_raw_weights() -> None:
    result = report([math.log(100.0)] + [0.0] * 9)
    assert result.ess_token == pytest.approx(109**2 / (100**2 + 9) / 10)  # 0.119; truncated at 2 it would be 0.93


def test_sequence_weights_beyond_any_float_still_have_a_sample_size() -> None:
    result = report([500.0] * 4 + [0.0] * 4, sequences=[0] * 4 + [1] * 4)
    assert result.ess_sequence == pytest.approx(0.5)  # one of two sequences has all the weight
    assert math.isfinite(result.k3)


def test_report_of_nothing_says_no_difference() -> None:
    result = report([])
    assert (result.num_tokens, result.ratio_mean, result.k3, result.ess_token, result.ess_sequence) == (0, 1.0, 0.0, 1.0, 1.0)
    assert result.same_version_gap_max is None
    assert effective_sample_size(0.0, 0.0) == 0.0


def test_kl_estimates_agree_with_the_exact_value_in_expectation() -> None:
    behavior, policy = torch.tensor([0.5, 0.3, 0.2]).log(), torch.tensor([0.25, 0.25, 0.5]).log()
    exact = 0.5 * math.log(2) + 0.3 * math.log(1.2) + 0.2 * math.log(0.4)
    tokens = torch.tensor([0] * 5 + [1] * 3 + [2] * 2)  # exactly behavior's proportions
    result = report((policy - behavior)[tokens])
    assert result.k1 == pytest.approx(exact, rel=1e-5)
    assert result.k3 == pytest.approx(exact, rel=1e-5)
