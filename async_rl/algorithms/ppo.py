"""Proximal policy optimization: the clipped surrogate, its decoupled form for off-policy data, clip-higher, dual clip.

With r = policy/anchor per token, A the advantage and clip(r) = r within [1 − low, 1 + high]:

    surrogate = min(r A, clip(r) A)                       and, with dual clip, max(surrogate, c A) where A < 0
    loss      = −w · surrogate,       w = the importance weight anchor/behavior (1 where the anchor is the behavior policy)

| name | anchor | source |
|---|---|---|
| clipped_surrogate | behavior | Schulman et al. 2017, eq. 7 (arXiv:1707.06347) |
| decoupled_clip | proximal | Hilton et al. 2021 (arXiv:2110.00641); AReaL, Fu et al. 2025 (arXiv:2505.24298) |

clip.high > clip.low is "clip-higher", Yu et al. 2025 (DAPO, arXiv:2503.14476, eq. 10). Dual clip: Ye et al. 2020, eq. 5
(arXiv:1912.09729), c = 3 there: it bounds what a very bad action of an unlikely policy can do.
"""

from __future__ import annotations

import torch
from torch import Tensor

from async_rl.algorithms.importance import ImportanceRatio, ImportanceWeight, importance_ratio, importance_weight
from async_rl.algorithms.tokens import Anchor, LossOutput, LossSettings, LossStats, LossTokens, masked


def clipped_surrogate(tokens: LossTokens, settings: LossSettings) -> LossOutput:
    """Return −min(r A, clip(r) A) with r = policy/behavior: clipped against the policy that sampled.

    Biased once the clip binds; it needs no other correction, and learns nothing from what is far off-policy. Reads neither
    proximal_logprobs nor the importance settings.
    """
    ratio = importance_ratio(tokens.policy_logprobs, tokens.behavior_logprobs, tokens.loss_mask)
    return finish(surrogate(ratio, tokens, settings), None, ratio, tokens, clipped=_clip_binds(ratio, tokens, settings))


def decoupled_clip(tokens: LossTokens, settings: LossSettings) -> LossOutput:
    """Return −w · min(r A, clip(r) A) with r = policy/proximal and w = proximal/behavior, detached, truncated at the cap.

    The clip keeps each update near the proximal policy, however old the sample; the weight accounts for who sampled it.
    The weight is always there: with proximal = policy (one step per drawn batch) r is 1 and w is policy/behavior. The
    truncation is not the paper's: it bounds the variance, at the price of a bias above the cap.
    """
    ratio = importance_ratio(tokens.policy_logprobs, tokens.proximal_logprobs, tokens.loss_mask)
    weight = importance_weight(tokens.proximal_logprobs, tokens, settings)
    return finish(surrogate(ratio, tokens, settings), weight, ratio, tokens, clipped=_clip_binds(ratio, tokens, settings))


def surrogate(ratio: ImportanceRatio, tokens: LossTokens, settings: LossSettings) -> Tensor:
    """min(r A, clip(r) A) per token, [T], and not below c A where A < 0 with dual clip."""
    clip, advantages_T = settings.clip, tokens.credit
    lower_T = torch.minimum(ratio.values * advantages_T, ratio.values.clamp(1.0 - clip.low, 1.0 + clip.high) * advantages_T)
    if settings.dual_clip is None:
        return lower_T
    return torch.where(advantages_T < 0, torch.maximum(lower_T, settings.dual_clip * advantages_T), lower_T)


def _clip_binds(ratio: ImportanceRatio, tokens: LossTokens, settings: LossSettings) -> Tensor:
    """bool [T]: the clip (or the dual clip) took the gradient away."""
    clip, advantages_T, r_T = settings.clip, tokens.advantages, ratio.values.detach()
    binds = ((r_T > 1.0 + clip.high) & (advantages_T > 0)) | ((r_T < 1.0 - clip.low) & (advantages_T < 0))
    if settings.dual_clip is not None:
        binds |= (r_T > settings.dual_clip) & (advantages_T < 0)
    return binds


def anchored(tokens: LossTokens, settings: LossSettings, default: Anchor) -> tuple[Tensor, ImportanceWeight | None]:
    """(logprobs of the policy that ratios are taken against, weight from behavior to it; None where they are one)"""
    if (settings.anchor or default) == "behavior":
        return tokens.behavior_logprobs.detach(), None
    return tokens.proximal_logprobs.detach(), importance_weight(tokens.proximal_logprobs, tokens, settings)


def finish(
    surrogate_T: Tensor, weight: ImportanceWeight | None, ratio: ImportanceRatio, tokens: LossTokens, *, clipped: Tensor
) -> LossOutput:
    """The loss −w · surrogate with its statistics."""
    mask_T = tokens.loss_mask
    num_tokens = mask_T.sum()
    none = torch.zeros_like(num_tokens)
    losses_T = -surrogate_T if weight is None else -weight.values * surrogate_T
    stats = LossStats(
        num_tokens=num_tokens,
        num_clipped=(clipped & mask_T).sum(),
        num_clamped=ratio.num_clamped,
        num_truncated=none if weight is None else weight.num_truncated,
        ratio_sum=masked(ratio.values.detach(), mask_T).sum(dtype=torch.float64),
        weight_sum=num_tokens if weight is None else weight.raw_sum,
        weight_squared_sum=num_tokens if weight is None else weight.raw_squared_sum,
        num_masked=none if weight is None else weight.num_masked,
    )
    return LossOutput(masked(losses_T, mask_T), stats)
