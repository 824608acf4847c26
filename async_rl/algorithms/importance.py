"""Importance ratios and weights between the policies that sampled, anchor and learn.

Logprobs are in nats, at the sampling temperature, [T], aligned with their tokens. Values at positions where loss_mask is
False never matter: they may be anything, NaN included, and get a gradient of exactly 0. A NaN where loss_mask is True
comes through, so that the caller sees it.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from async_rl.errors import ShapeError

LOG_RATIO_BOUND = 20.0
"""|log-ratio| is clamped here before exp, and the clamped tokens are counted: e^20 = 4.9e8 is far beyond any clip range
or cap, and its product with an advantage still adds up in float32, where exp overflows above 88 and inf × 0 is NaN. A
clamped token has no gradient."""

RAW_LOG_WEIGHT_BOUND = 300.0
"""The effective sample size is that of the raw weights; e^600, a squared weight at this bound, still fits float64."""


@dataclass(frozen=True, slots=True, eq=False)
class ImportanceRatio:
    """values: float32 [T], policy/old, differentiable in the policy; 1 where not trained. num_clamped: scalar."""

    values: Tensor
    num_clamped: Tensor


@dataclass(frozen=True, slots=True, eq=False)
class ImportanceWeight:
    """values: float32 [T], truncated and detached; 1 where not trained. Scalars, over trained tokens:

    num_truncated: weights above the cap. raw_sum, raw_squared_sum: float64 sums of the weights before truncation, for
    the effective sample size (after truncation it would look better than it is).
    """

    values: Tensor
    num_truncated: Tensor
    raw_sum: Tensor
    raw_squared_sum: Tensor


def log_ratio(policy_logprobs_T: Tensor, old_logprobs_T: Tensor, loss_mask_T: Tensor) -> Tensor:
    """Return policy − old, float32 [T], and 0 where loss_mask_T is False (with no gradient to there).

    Raises: ShapeError unless all three are [T].
    """
    require_same_length(policy_logprobs=policy_logprobs_T, old_logprobs=old_logprobs_T, loss_mask=loss_mask_T)
    difference = policy_logprobs_T.float() - old_logprobs_T.float()
    return torch.where(loss_mask_T, difference, 0.0)


def importance_ratio(policy_logprobs_T: Tensor, old_logprobs_T: Tensor, loss_mask_T: Tensor) -> ImportanceRatio:
    """Return policy/old per token, differentiable in the policy. The log-ratio is clamped at ±LOG_RATIO_BOUND.

    Raises: ShapeError unless all three are [T].
    """
    unclamped = log_ratio(policy_logprobs_T, old_logprobs_T.detach(), loss_mask_T)
    num_clamped = (unclamped.detach().abs() > LOG_RATIO_BOUND).sum()
    return ImportanceRatio(unclamped.clamp(-LOG_RATIO_BOUND, LOG_RATIO_BOUND).exp(), num_clamped)


def importance_weight(
    proximal_logprobs_T: Tensor, behavior_logprobs_T: Tensor, loss_mask_T: Tensor, *, cap: float
) -> ImportanceWeight:
    """Return min(proximal/behavior, cap) per token, a constant to the gradient.

    Source: truncated importance sampling, Ionides 2008, applied per token.
    Raises: ShapeError unless all three are [T].
    """
    log_weight = log_ratio(proximal_logprobs_T.detach(), behavior_logprobs_T.detach(), loss_mask_T)
    raw = log_weight.double().clamp(max=RAW_LOG_WEIGHT_BOUND).exp()
    trained = torch.where(loss_mask_T, raw, 0.0)
    return ImportanceWeight(
        values=raw.clamp(max=cap).float(),
        num_truncated=(trained > cap).sum(),
        raw_sum=trained.sum(),
        raw_squared_sum=trained.square().sum(),
    )


@dataclass(frozen=True, slots=True)
class RatioSummary:
    """How far a policy is from the one that sampled, over trained tokens (zeros and ones without any: no difference).

    kl_k1, kl_k3: estimates of KL(behavior ‖ policy) in nats per token from tokens that behavior sampled. k1, the mean of
    behavior − policy, is unbiased and may be negative; k3, the mean of ratio − 1 − log ratio, is unbiased and is not.
    ess_fraction: effective sample size of the unclamped ratios over the number of tokens; 1 on-policy.
    """

    num_tokens: int
    ratio_mean: float
    ratio_min: float
    ratio_p01: float
    ratio_p50: float
    ratio_p99: float
    ratio_max: float
    log_ratio_max_abs: float
    kl_k1: float
    kl_k3: float
    ess_fraction: float


def summarize_ratios(policy_logprobs_T: Tensor, behavior_logprobs_T: Tensor, loss_mask_T: Tensor) -> RatioSummary:
    """Return the summary of policy/behavior over the trained tokens given, in float64 (a device sync; once a step).

    Percentiles do not add up: give it all tokens of the step. k1 and k3 after Schulman 2020, "Approximating KL divergence".
    Raises: ShapeError unless all three are [T].
    """
    log_ratio_N = log_ratio(policy_logprobs_T.detach(), behavior_logprobs_T.detach(), loss_mask_T)[loss_mask_T].double().cpu()
    num_tokens = log_ratio_N.numel()
    if num_tokens == 0:
        return RatioSummary(0, 1.0, 1.0, 1.0, 1.0, 1.0, 1.0, 0.0, 0.0, 0.0, 1.0)
    ratio_N = log_ratio_N.clamp(max=RAW_LOG_WEIGHT_BOUND).exp()
    ordered = ratio_N.sort().values
    total = float(ratio_N.sum())
    return RatioSummary(
        num_tokens=num_tokens,
        ratio_mean=total / num_tokens,
        ratio_min=float(ordered[0]),
        ratio_p01=_percentile(ordered, 0.01),
        ratio_p50=_percentile(ordered, 0.50),
        ratio_p99=_percentile(ordered, 0.99),
        ratio_max=float(ordered[-1]),
        log_ratio_max_abs=float(log_ratio_N.abs().max()),
        kl_k1=float(-log_ratio_N.mean()),
        kl_k3=float((ratio_N - 1.0 - log_ratio_N).mean()),
        ess_fraction=effective_sample_size(total, float(ratio_N.square().sum())) / num_tokens,
    )


def effective_sample_size(weight_sum: float, weight_squared_sum: float) -> float:
    """Return (Σw)² / Σw² of raw (not truncated) weights; 0 without weights. Source: Kish 1965."""
    return weight_sum * weight_sum / weight_squared_sum if weight_squared_sum > 0 else 0.0


def require_same_length(**tensors: Tensor) -> None:
    """Raises: ShapeError unless every tensor is one-dimensional and they have one length."""
    shapes = {name: tuple(tensor.shape) for name, tensor in tensors.items()}
    if len(set(shapes.values())) != 1 or any(len(shape) != 1 for shape in shapes.values()):
        listed = ", ".join(f"{name}={list(shape)}" for name, shape in shapes.items())
        raise ShapeError(f"{listed}: all must be [T] of the same length; align them by token")


def _percentile(ordered: Tensor, fraction: float) -> float:
    """Nearest rank: the smallest value with at least `fraction` of all values at or below it."""
    rank = max(0, -int(-fraction * ordered.numel() // 1) - 1)
    return float(ordered[rank])
