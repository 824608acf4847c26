"""How far training is from the policy that sampled: one report per optimizer step, from all its trained tokens, in float64.

Nothing here is clamped before it is measured: an effective sample size of truncated weights would look better than it is.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from async_rl.algorithms.importance import RAW_LOG_WEIGHT_BOUND, effective_sample_size


@dataclass(frozen=True, slots=True)
class OffPolicyReport:
    """The policy against the one that sampled, over the trained tokens of a step (as if on-policy without any).

    ess_token, ess_sequence: effective sample size of the ratios policy/behavior, per token and per sequence (the product of
    its tokens' ratios), over the number of them; 1 on-policy. k1, k3: estimates of KL(behavior ‖ policy), nats per token; k1
    may be negative. ratio_*: percentiles of the tokens' ratios (nearest rank). lag_token_*: versions between a token's
    oldest policy and the trainer. same_version_*: tokens with lag 0, where policy and behavior logprob are one number if
    engine and trainer agree; the largest and the mean absolute difference, None without such tokens.
    """

    num_tokens: int
    num_sequences: int
    ess_token: float
    ess_sequence: float
    k1: float
    k3: float
    ratio_mean: float
    ratio_min: float
    ratio_p01: float
    ratio_p50: float
    ratio_p99: float
    ratio_max: float
    log_ratio_max_abs: float
    lag_token_mean: float
    lag_token_max: int
    same_version_tokens: int
    same_version_gap_max: float | None
    same_version_gap_mean: float | None


def off_policy_report(log_ratios_N: Tensor, sequence_ids_N: Tensor, lags_N: Tensor) -> OffPolicyReport:
    """Return the report of N trained tokens: log policy − log behavior, the sequence (any integers) and the lag of each.

    k1 and k3 after Schulman 2020, "Approximating KL divergence"; effective sample size after Kish 1965.
    """
    logs = log_ratios_N.detach().double().cpu()
    lags = lags_N.cpu()
    count = logs.numel()
    if count == 0:
        return OffPolicyReport(0, 0, 1.0, 1.0, 0.0, 0.0, 1.0, 1.0, 1.0, 1.0, 1.0, 1.0, 0.0, 0.0, 0, 0, None, None)
    ratios = logs.clamp(max=RAW_LOG_WEIGHT_BOUND).exp()
    ordered = ratios.sort().values
    _, sequences = np.unique(sequence_ids_N.cpu().numpy(), return_inverse=True)
    sequence_logs = torch.zeros(int(sequences.max()) + 1, dtype=torch.float64).index_add(0, torch.from_numpy(sequences), logs)
    gaps = logs[lags == 0].abs()
    return OffPolicyReport(
        num_tokens=count,
        num_sequences=len(sequence_logs),
        ess_token=_ess_share(logs),
        ess_sequence=_ess_share(sequence_logs),
        k1=float(-logs.mean()),
        k3=float((ratios - 1.0 - logs).mean()),
        ratio_mean=float(ratios.mean()),
        ratio_min=float(ordered[0]),
        ratio_p01=_percentile(ordered, 0.01),
        ratio_p50=_percentile(ordered, 0.50),
        ratio_p99=_percentile(ordered, 0.99),
        ratio_max=float(ordered[-1]),
        log_ratio_max_abs=float(logs.abs().max()),
        lag_token_mean=float(lags.double().mean()),
        lag_token_max=int(lags.max()),
        same_version_tokens=len(gaps),
        same_version_gap_max=float(gaps.max()) if len(gaps) else None,
        same_version_gap_mean=float(gaps.mean()) if len(gaps) else None,
    )


def _ess_share(log_weights: Tensor) -> float:
    """(Σw)² / (n Σw²); relative to the largest weight, so that no product of many ratios overflows."""
    weights = (log_weights - log_weights.max()).exp()
    return effective_sample_size(float(weights.sum()), float(weights.square().sum())) / log_weights.numel()


def _percentile(ordered: Tensor, fraction: float) -> float:
    """Nearest rank: the smallest value with at least `fraction` of all values at or below it."""
    rank = max(0, -int(-fraction * ordered.numel() // 1) - 1)
    return float(ordered[rank])
