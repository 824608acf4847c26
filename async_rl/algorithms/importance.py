"""Importance ratios and weights between the policies that sampled, anchor and learn.

Logprobs are in nats, at the sampling temperature, [T], aligned with their tokens. Values at positions where loss_mask is
False never matter: they may be anything, NaN included, and get a gradient of exactly 0. A NaN where loss_mask is True
comes through, so that the caller sees it.

A *ratio* is differentiable and what a clip acts on; a *weight* is a constant that corrects for who sampled.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from async_rl.algorithms.tokens import Level, LossSettings, LossTokens, require_same_length, working

LOG_RATIO_BOUND = 20.0
"""|log-ratio| is clamped here before exp, and the clamped tokens are counted: e^20 = 4.9e8 is far beyond any clip range
or cap, and its product with an advantage still adds up in float32, where exp overflows above 88 and inf × 0 is NaN. A
clamped token has no gradient."""

RAW_LOG_WEIGHT_BOUND = 300.0
"""The effective sample size is that of the raw weights; e^600, a squared weight at this bound, still fits float64."""


@dataclass(frozen=True, slots=True, eq=False)
class ImportanceRatio:
    """values: [T], policy/old, differentiable in the policy; 1 where not trained. num_clamped: scalar, trained tokens."""

    values: Tensor
    num_clamped: Tensor


@dataclass(frozen=True, slots=True, eq=False)
class ImportanceWeight:
    """values: [T], detached, as they multiply the loss; 1 where not trained. Scalars, over trained tokens:

    num_truncated: weights above the cap. num_masked: tokens whose weight became 0. raw_sum, raw_squared_sum: float64 sums of
    the weights before truncation, for the effective sample size (after truncation it would look better than it is).
    """

    values: Tensor
    num_truncated: Tensor
    num_masked: Tensor
    raw_sum: Tensor
    raw_squared_sum: Tensor


def log_ratio(policy_logprobs_T: Tensor, old_logprobs_T: Tensor, loss_mask_T: Tensor) -> Tensor:
    """Return policy − old, [T], and 0 where loss_mask_T is False (with no gradient to there).

    Raises: ShapeError unless all three are [T].
    """
    require_same_length(policy_logprobs=policy_logprobs_T, old_logprobs=old_logprobs_T, loss_mask=loss_mask_T)
    return torch.where(loss_mask_T, working(policy_logprobs_T) - working(old_logprobs_T), 0.0)


def importance_ratio(policy_logprobs_T: Tensor, old_logprobs_T: Tensor, loss_mask_T: Tensor) -> ImportanceRatio:
    """Return policy/old per token, differentiable in the policy. The log-ratio is clamped at ±LOG_RATIO_BOUND.

    Raises: ShapeError unless all three are [T].
    """
    return bounded_exp(log_ratio(policy_logprobs_T, old_logprobs_T.detach(), loss_mask_T))


def bounded_exp(log_ratio_T: Tensor) -> ImportanceRatio:
    """exp of log-ratios, clamped at ±LOG_RATIO_BOUND."""
    num_clamped = (log_ratio_T.detach().abs() > LOG_RATIO_BOUND).sum()
    return ImportanceRatio(log_ratio_T.clamp(-LOG_RATIO_BOUND, LOG_RATIO_BOUND).exp(), num_clamped)


def at_level(log_ratio_T: Tensor, tokens: LossTokens, level: Level) -> Tensor:
    """Log-ratios of tokens, [T], as those of what each token is weighed by: itself, its sequence (the sum over its trained
    tokens) or its sequence's geometric mean (their average)."""
    if level == "token":
        return log_ratio_T
    sums_S = tokens.sum_per_sequence(log_ratio_T)
    return tokens.spread(sums_S if level == "sequence" else sums_S / tokens.trained_lengths())


def importance_weight(new_logprobs_T: Tensor, tokens: LossTokens, settings: LossSettings) -> ImportanceWeight:
    """Return the weight new/behavior, per token, sequence or geometric mean, treated as `settings.importance` says.

    `none` gives 1 everywhere. `exact` is unbiased at the level `sequence` and unbounded. `truncate`: min(weight, cap);
    Ionides 2008. `mask`: 0 above the cap and below the floor (bounds on new/behavior, not on its inverse); the token stays in
    every denominator, else those kept would be weighed up by it.
    """
    mask_T = tokens.loss_mask
    log_weight_T = at_level(log_ratio(new_logprobs_T.detach(), tokens.behavior_logprobs.detach(), mask_T).double(), tokens,
                            settings.importance_level)  # fmt: skip
    raw_T = torch.where(mask_T, log_weight_T.clamp(max=RAW_LOG_WEIGHT_BOUND).exp(), 1.0)
    values_T, masked_T = _treated(raw_T, settings)
    trained_T = torch.where(mask_T, raw_T, 0.0)
    return ImportanceWeight(
        values=values_T.to(working(new_logprobs_T).dtype),
        num_truncated=(trained_T > settings.importance_cap).sum(),
        num_masked=(masked_T & mask_T).sum(),
        raw_sum=trained_T.sum(),
        raw_squared_sum=trained_T.square().sum(),
    )


def _treated(raw_T: Tensor, settings: LossSettings) -> tuple[Tensor, Tensor]:
    """(weights as they multiply the loss, which of them masking set to 0)"""
    nothing = torch.zeros_like(raw_T, dtype=torch.bool)
    if settings.importance == "none":
        return torch.ones_like(raw_T), nothing
    if settings.importance == "truncate":
        return raw_T.clamp(max=settings.importance_cap), nothing
    if settings.importance == "mask":
        outside = (raw_T > settings.importance_cap) | (raw_T < settings.importance_floor)
        return torch.where(outside, 0.0, raw_T), outside
    return raw_T.clamp(max=LARGEST_WEIGHT), nothing


LARGEST_WEIGHT = 1e8
"""An `exact` weight beyond this is cut: times an advantage it must still add up in float32."""


def effective_sample_size(weight_sum: float, weight_squared_sum: float) -> float:
    """Return (Σw)² / Σw² of raw (not truncated) weights; 0 without weights. Source: Kish 1965."""
    return weight_sum * weight_sum / weight_squared_sum if weight_squared_sum > 0 else 0.0
