"""Losses that are a weighted log-likelihood: the policy gradient itself, and CISPO.

    policy_gradient   −w · A · log policy          w = policy/behavior, detached: exact, truncated, masked, or left out
    cispo             −clip(r) · A · log policy    r = policy/anchor, detached

No token ever loses its gradient to a clip of the ratio: what is clipped is a constant.

policy_gradient: Williams 1992, with importance weights at the level that the settings say. With
`importance = "exact"` and `importance_level = "sequence"` its expectation over what the behavior policy samples is the policy
gradient exactly; truncation trades that for variance; weights per token leave out how likely the other tokens are, and are
biased; so is every mask.

cispo: MiniMax-M1, 2025, eq. 4 (arXiv:2506.13585). clip.low = 1 leaves no lower bound, as the paper does.
"""

from __future__ import annotations

from torch import Tensor

from async_rl.algorithms.importance import ImportanceRatio, importance_ratio, importance_weight
from async_rl.algorithms.ppo import anchored, finish
from async_rl.algorithms.tokens import LossOutput, LossSettings, LossTokens, masked, working


def policy_gradient(tokens: LossTokens, settings: LossSettings) -> LossOutput:
    """Return −w A log policy per token, with w = policy/behavior (detached) treated as the importance settings say."""
    weight = importance_weight(tokens.policy_logprobs, tokens, settings)
    ratio = _detached(importance_ratio(tokens.policy_logprobs, tokens.behavior_logprobs, tokens.loss_mask))
    nothing = tokens.loss_mask.new_zeros(len(tokens.loss_mask))
    return finish(_gain(tokens), weight, ratio, tokens, clipped=nothing)


def cispo(tokens: LossTokens, settings: LossSettings) -> LossOutput:
    """Return −clip(r) A log policy per token, with r = policy/anchor detached.

    num_clipped counts tokens whose weight the clip changed; their gradient is not lost.
    """
    anchor_T, weight = anchored(tokens, settings, "behavior")
    ratio = _detached(importance_ratio(tokens.policy_logprobs, anchor_T, tokens.loss_mask))
    clipped_T = ratio.values.clamp(1.0 - settings.clip.low, 1.0 + settings.clip.high)
    return finish(clipped_T * _gain(tokens), weight, ratio, tokens, clipped=clipped_T != ratio.values)


def _gain(tokens: LossTokens) -> Tensor:
    """A log policy per token; what is not trained is 0 before it is multiplied, as 0 × NaN would reach the gradient."""
    return tokens.credit * masked(working(tokens.policy_logprobs), tokens.loss_mask)


def _detached(ratio: ImportanceRatio) -> ImportanceRatio:
    return ImportanceRatio(ratio.values.detach(), ratio.num_clamped)
