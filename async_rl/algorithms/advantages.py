"""Advantage estimators by name, and a user's own by `module:function`: from the rewards of a step to credit per trajectory."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np

from async_rl.algorithms.credit import AdvantageFn, AdvantageSettings, BoolArray, Float64Array, RewardGroup
from async_rl.algorithms.group_relative import dr_grpo, grpo, per_group, rloo
from async_rl.algorithms.references import load_function
from async_rl.algorithms.reinforce_pp import reinforce_pp, reinforce_pp_baseline
from async_rl.algorithms.returns import trajectory_rewards
from async_rl.algorithms.staleness import GroupVerdict
from async_rl.errors import ShapeError
from protocol.messages import TrajectoryGroup

ADVANTAGES: Mapping[str, AdvantageFn] = {
    "grpo": per_group(grpo),
    "dr_grpo": per_group(dr_grpo),
    "rloo": per_group(rloo),
    "reinforce_pp": reinforce_pp,
    "reinforce_pp_baseline": reinforce_pp_baseline,
    "gae": trajectory_rewards,
}


def find_advantage(name: str) -> AdvantageFn:
    """Return the built-in estimator of that name, or the user's `module:function`.

    Raises: ConfigError if there is neither.
    """
    return ADVANTAGES[name] if name in ADVANTAGES else load_function(name, setting="algorithm.advantage", known=ADVANTAGES)


def credit_groups(groups: Sequence[RewardGroup], estimator: AdvantageFn, settings: AdvantageSettings) -> Sequence[Float64Array]:
    """Return the advantages of every trajectory of a step, [G] per group.

    Raises: ShapeError if the estimator returns another number of them; ValueError if one is not finite.
    """
    credited = [np.asarray(values, dtype=np.float64) for values in estimator(groups, settings)]
    if [values.shape for values in credited] != [group.rewards.shape for group in groups]:
        raise ShapeError(
            f"the advantage estimator returned shapes {[values.shape for values in credited]} for groups of "
            f"{[len(group.rewards) for group in groups]}; return one array [G] per group, in order"
        )
    for values, group in zip(credited, groups, strict=True):
        if not np.isfinite(values[group.valid]).all():
            raise ValueError(f"advantages {values.tolist()} of rewards {group.rewards.tolist()}: must be finite")
        values[~group.valid] = 0.0
    return credited


def group_rewards(group: TrajectoryGroup, verdict: GroupVerdict) -> tuple[Float64Array, BoolArray]:
    """Return (rewards [G], valid [G]) of a judged group; stale trajectories are valid (see `staleness`), NaN where invalid."""
    valid = np.array([trajectory.in_baseline for trajectory in verdict.trajectories], dtype=np.bool_)
    if len(valid) != len(group.trajectories):
        raise ShapeError(f"verdict on {len(valid)} trajectories for a group of {len(group.trajectories)}; judge this group")
    rewards = np.full(len(valid), np.nan)
    for index in np.flatnonzero(valid):
        reward = group.trajectories[index].reward
        rewards[index] = np.nan if reward is None or reward.value is None else reward.value
    return rewards, valid
