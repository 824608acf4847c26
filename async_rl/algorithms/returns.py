"""Returns and generalised advantages over the tokens of one trajectory, where some are not the policy's. float64, torch-free.

Tokens that the policy did not sample (a tool's, the environment's) are no steps of the decision process: they end nothing, take
no discount, have no value of their own, and pass on what comes after them. A reward on one counts for the tokens before it.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from async_rl.algorithms.credit import AdvantageSettings, BoolArray, Float64Array, RewardGroup
from async_rl.errors import ShapeError

WHITEN_EPS = 1e-8
"""Added to the standard deviation of a step's advantages."""


def trajectory_rewards(groups: Sequence[RewardGroup], settings: AdvantageSettings) -> Sequence[Float64Array]:
    """The rewards as they are, 0 where invalid: a critic spreads each over the tokens of its trajectory afterwards."""
    return [group.spread(group.known) for group in groups]


def discounted_returns(rewards_T: Float64Array, loss_mask_T: BoolArray, *, gamma: float) -> Float64Array:
    """Return Σ gamma^k r over what follows each token, [T], k counted in the policy's own tokens.

    Masked tokens hold the return of what follows them. Raises: ShapeError unless both are [T].
    """
    _require_rows(rewards_T, loss_mask_T)
    returns = np.zeros(len(rewards_T))
    following = 0.0
    for t in reversed(range(len(rewards_T))):
        following = rewards_T[t] + (gamma if loss_mask_T[t] else 1.0) * following
        returns[t] = following
    return returns


def generalized_advantages(
    rewards_T: Float64Array, values_T: Float64Array, loss_mask_T: BoolArray, *, gamma: float, gae_lambda: float
) -> tuple[Float64Array, Float64Array]:
    """Return (advantages, returns), [T] each, 0 where not trained: what a policy and a value function learn from.

    A_t = Σ (gamma λ)^k δ, δ_t = r_t + gamma V(next own token) − V_t; the end has value 0, a reward between two own tokens
    belongs to the one before it. The return is A + V. Source: Schulman et al. 2016, eq. 16 (arXiv:1506.02438).
    Raises: ShapeError unless all are [T].
    """
    _require_rows(rewards_T, values_T, loss_mask_T)
    own = np.flatnonzero(loss_mask_T)
    advantages, returns = np.zeros(len(rewards_T)), np.zeros(len(rewards_T))
    bounds = np.append(own, len(rewards_T))
    following, next_value = 0.0, 0.0
    for index in reversed(range(len(own))):
        t = own[index]
        reward = float(rewards_T[bounds[index] : bounds[index + 1]].sum())
        delta = reward + gamma * next_value - values_T[t]
        following = delta + gamma * gae_lambda * following
        next_value = float(values_T[t])
        advantages[t], returns[t] = following, following + values_T[t]
    return advantages, returns


def whitened(advantages: Sequence[Float64Array], loss_masks: Sequence[BoolArray]) -> list[Float64Array]:
    """Shift and scale advantages, [T] per sample, to mean 0 and standard deviation 1 over all trained tokens; 0 elsewhere.

    Fewer than two trained tokens, or advantages that do not differ, give 0. Source: Huang et al. 2022, "The 37 implementation
    details of PPO", detail 7; over the step, not over a micro-batch.
    """
    trained = np.concatenate([*(rows[mask] for rows, mask in zip(advantages, loss_masks, strict=True)), np.zeros(0)])
    if len(trained) < 2 or (trained == trained[0]).all():
        return [np.zeros(len(rows)) for rows in advantages]
    mean, scale = trained.mean(), trained.std(ddof=1) + WHITEN_EPS
    return [np.where(mask, (rows - mean) / scale, 0.0) for rows, mask in zip(advantages, loss_masks, strict=True)]


def _require_rows(*arrays: Float64Array | BoolArray) -> None:
    if len({array.shape for array in arrays}) != 1 or arrays[0].ndim != 1:
        raise ShapeError(f"shapes {[array.shape for array in arrays]}: all must be [T], one value per token")
