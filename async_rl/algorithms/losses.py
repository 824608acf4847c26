"""The policy losses by name, and a user's own by `module:function`. Each family's file reads like its paper."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from typing import TypeAlias

import torch
from torch import Tensor

from async_rl.algorithms.gspo import gmpo, gspo
from async_rl.algorithms.importance import ImportanceRatio, importance_ratio
from async_rl.algorithms.ppo import clipped_surrogate, decoupled_clip, finish
from async_rl.algorithms.references import load_function
from async_rl.algorithms.reinforce import cispo, policy_gradient
from async_rl.algorithms.tokens import ClipRange, LossFn, LossOutput, LossSettings, LossStats, LossTokens
from async_rl.errors import ShapeError

__all__ = [
    "LOSSES",
    "ClipRange",
    "LossFn",
    "LossOutput",
    "LossSettings",
    "LossStats",
    "LossTokens",
    "TokenLossFn",
    "clipped_surrogate",
    "decoupled_clip",
    "find_loss",
    "from_token_losses",
]

LOSSES: Mapping[str, LossFn] = {
    "decoupled_clip": decoupled_clip,
    "clipped_surrogate": clipped_surrogate,
    "gspo": gspo,
    "gmpo": gmpo,
    "cispo": cispo,
    "policy_gradient": policy_gradient,
}

TokenLossFn: TypeAlias = Callable[[LossTokens, LossSettings], Tensor]
"""A user's loss: the loss of each token, [T], differentiable in tokens.policy_logprobs, divided by nothing. Values where
loss_mask is False are ignored. See `async_rl.testing.algorithms.check_loss` for what must hold of it."""


def find_loss(name: str) -> LossFn:
    """Return the built-in loss of that name, or the user's `module:function` (a TokenLossFn).

    Raises: ConfigError if there is neither.
    """
    return LOSSES[name] if name in LOSSES else from_token_losses(load_function(name, setting="algorithm.loss", known=LOSSES))


def from_token_losses(function: TokenLossFn) -> LossFn:
    """Wrap a user's function: masked, and with the statistics of the ratio policy/behavior."""
    return partial(_call, function)


def _call(function: TokenLossFn, tokens: LossTokens, settings: LossSettings) -> LossOutput:
    # The user's function sees harmless values where nothing is trained: 0 × NaN would reach the gradient otherwise.
    mask_T = tokens.loss_mask
    clean = LossTokens(
        policy_logprobs=torch.where(mask_T, tokens.policy_logprobs, 0.0),
        proximal_logprobs=torch.where(mask_T, tokens.proximal_logprobs, 0.0),
        behavior_logprobs=torch.where(mask_T, tokens.behavior_logprobs, 0.0),
        advantages=torch.where(mask_T, tokens.advantages, 0.0),
        loss_mask=mask_T,
        sequence_ids=tokens.sequence_ids,
        num_sequences=tokens.num_sequences,
    )
    losses_T = function(clean, settings)
    if losses_T.shape != mask_T.shape:
        raise ShapeError(f"the loss returned {tuple(losses_T.shape)} for {len(mask_T)} tokens; return one value per token, [T]")
    ratio = importance_ratio(clean.policy_logprobs.detach(), clean.behavior_logprobs, mask_T)
    nothing = mask_T.new_zeros(len(mask_T))
    return finish(-losses_T, None, ImportanceRatio(ratio.values, ratio.num_clamped), tokens, clipped=nothing)
