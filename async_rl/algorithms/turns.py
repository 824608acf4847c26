"""Credit per turn: the tokens of a turn are credited with what was earned in it and after it, not with what came before.

Source: process supervision, Shao et al. 2024, DeepSeekMath, §4.1.3 (arXiv:2402.03300), a turn being a step; there gamma = 1. As
rewards of turns are centred together, a trajectory's credit depends on how many turns it has.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from async_rl.algorithms.credit import BoolArray, Float64Array, all_equal
from async_rl.algorithms.returns import discounted_returns
from async_rl.errors import ShapeError
from protocol.messages import Trajectory

TURN = "turn."
"""A turn's reward travels as the component `turn.N` of its trajectory's reward, N from 1."""


def turn_rewards(trajectory: Trajectory, reward: float) -> Float64Array:
    """What each turn earned, [turns]; it adds up to `reward`, of which the last turn has what no turn has.

    reward: the trajectory's, which is what it was given but for penalties.
    """
    components = {} if trajectory.reward is None else trajectory.reward.components
    earned = np.array([components.get(f"{TURN}{number}", 0.0) for number in range(1, len(trajectory.turns) + 1)])
    if len(earned):
        earned[-1] += reward - earned.sum()
    return earned


def relative_to_group(earned: Sequence[Float64Array], valid: BoolArray, *, eps: float, scale: bool) -> list[Float64Array]:
    """(r − mean) / (std + eps) over every turn of the valid trajectories, [turns] each; 0 for the others.

    scale: divide by the standard deviation (N − 1); without it r − mean. Fewer than two rewards, or equal ones, give 0.
    Raises: ShapeError unless there is one `valid` per trajectory.
    """
    if len(earned) != len(valid):
        raise ShapeError(f"{len(earned)} trajectories and valid {valid.shape}: one per trajectory is needed")
    known = np.concatenate([*(turns for turns, is_valid in zip(earned, valid, strict=True) if is_valid), np.zeros(0)])
    if len(known) < 2 or all_equal(known):
        return [np.zeros(len(turns)) for turns in earned]
    divisor = known.std(ddof=1) + eps if scale else 1.0
    mean = known.mean()
    return [
        (turns - mean) / divisor if is_valid else np.zeros(len(turns)) for turns, is_valid in zip(earned, valid, strict=True)
    ]


def token_returns(trajectory: Trajectory, credit: Float64Array, *, gamma: float) -> Float64Array:
    """The credit of turns as returns of their tokens, [T]: each counts from its turn's last token backwards.

    gamma discounts per token of the policy's own; an observation's tokens take no step. Raises: ShapeError unless credit is
    [turns].
    """
    if credit.shape != (len(trajectory.turns),):
        raise ShapeError(f"credit {credit.shape} of {len(trajectory.turns)} turns: one value per turn is needed")
    rewards = np.zeros(len(trajectory.token_ids))
    for turn, value in zip(trajectory.turns, credit, strict=True):
        rewards[max(0, turn.end - 1)] += value
    return discounted_returns(rewards, trajectory.loss_mask != 0, gamma=gamma)
