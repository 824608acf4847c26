"""KL divergence to a reference policy, estimated from sampled tokens.

With d = log policy − log reference of a sampled token (Schulman 2020, "Approximating KL divergence"):

    k1 = d                 unbiased, may be negative
    k2 = d² / 2            biased, low variance
    k3 = exp(−d) − 1 + d   unbiased, never negative

An unbiased *value* is no unbiased *gradient*. Differentiated as a loss, under samples of the policy itself, k1 has an
expected gradient of 0, k2 exactly that of KL(policy ‖ reference), k3 that of another divergence. What is right on- and
off-policy at the level of the token, and the default here ("unbiased"), multiplies by r = policy/behavior:

    r · k1 and r · k3 with r differentiated, r · k2 with r detached

Source: the product rule on Σ_y policy(y) k(y); DeepSeek-V3.2, 2025, eq. 7 uses r · k3. r is not truncated, so a token far
off-policy weighs much: watch the ratio's percentiles. In a reward no gradient passes, and k1 is the unbiased choice.
"""

from __future__ import annotations

from typing import Literal, TypeAlias

import torch
from torch import Tensor

from async_rl.algorithms.importance import LOG_RATIO_BOUND, bounded_exp, log_ratio
from async_rl.algorithms.tokens import LossTokens, masked, working

KlEstimator: TypeAlias = Literal["k1", "k2", "k3"]
KlForm: TypeAlias = Literal["unbiased", "plain"]


def kl_values(log_ratio_T: Tensor, estimator: KlEstimator) -> Tensor:
    """Return k1, k2 or k3 of log policy/reference, elementwise."""
    if estimator == "k1":
        return log_ratio_T
    if estimator == "k2":
        return log_ratio_T.square() / 2
    bounded = log_ratio_T.clamp(-LOG_RATIO_BOUND, LOG_RATIO_BOUND)
    return torch.exp(-bounded) - 1.0 + bounded


def kl_loss(ref_logprobs_T: Tensor, tokens: LossTokens, *, estimator: KlEstimator, form: KlForm = "unbiased") -> Tensor:
    """Return the KL loss per token, [T], 0 where not trained; multiply by a coefficient and aggregate like any loss.

    form `plain` differentiates k itself: with k1 that trains nothing, with k3 another divergence.
    """
    d_T = log_ratio(tokens.policy_logprobs, ref_logprobs_T.detach(), tokens.loss_mask)
    values_T = kl_values(d_T, estimator)
    if form == "unbiased":
        ratio_T = bounded_exp(log_ratio(tokens.policy_logprobs, tokens.behavior_logprobs.detach(), tokens.loss_mask)).values
        values_T = (ratio_T.detach() if estimator == "k2" else ratio_T) * values_T
    return masked(values_T, tokens.loss_mask)


def kl_penalty(sampled_logprobs_T: Tensor, ref_logprobs_T: Tensor, loss_mask_T: Tensor, estimator: KlEstimator) -> Tensor:
    """Return k per token as a constant, [T], of the policy that sampled: what a reward is reduced by, times a coefficient."""
    d_T = working(sampled_logprobs_T.detach()) - working(ref_logprobs_T.detach())
    return kl_values(masked(d_T, loss_mask_T), estimator)
