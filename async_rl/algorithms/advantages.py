"""Group-relative advantages: what a trajectory's reward says beside those of its siblings. float64, torch-free.

All estimators here subtract a baseline made of the group itself, so a single valid reward has none: its advantage is 0 and
it is counted. Invalid trajectories are neither in the baseline nor credited.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TypeAlias

import numpy as np
import numpy.typing as npt

from async_rl.algorithms.staleness import GroupVerdict
from async_rl.errors import ShapeError
from protocol.messages import TrajectoryGroup

Float64Array: TypeAlias = npt.NDArray[np.float64]
BoolArray: TypeAlias = npt.NDArray[np.bool_]

AdvantageFn: TypeAlias = Callable[[Float64Array, float], Float64Array]
"""(rewards [N], eps) → advantages [N], for N ≥ 2 valid rewards of one group that are not all equal."""


@dataclass(frozen=True, slots=True, eq=False)
class GroupAdvantages:
    """Advantages of one group.

    values: float64 [G], one per trajectory, 0 where invalid. baseline: mean of the valid rewards, None without any.
    num_no_baseline: valid trajectories that had no sibling to be compared with (0 or 1); their advantage is 0.
    all_equal: two or more valid rewards and no difference between them, so the group teaches nothing.
    """

    values: Float64Array
    baseline: float | None
    num_no_baseline: int
    all_equal: bool


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


def group_advantages(rewards: npt.ArrayLike, valid: npt.ArrayLike, *, estimator: str, eps: float = 1e-6) -> GroupAdvantages:
    """Return the advantages of one group, given its rewards [G] and which of them are valid [G] bool.

    estimator: a name in ADVANTAGES. eps: added to the standard deviation by estimators that divide by it.
    Equal rewards give exactly 0, whatever their mean rounds to.
    Raises: ShapeError if the lengths differ; ValueError on an unknown estimator or a valid reward that is not finite.
    """
    rewards_G = np.asarray(rewards, dtype=np.float64)
    valid_G = np.asarray(valid, dtype=np.bool_)
    if rewards_G.ndim != 1 or rewards_G.shape != valid_G.shape:
        raise ShapeError(f"rewards {rewards_G.shape} and valid {valid_G.shape} must be [G], one per trajectory of the group")
    if estimator not in ADVANTAGES:
        raise ValueError(f"estimator={estimator!r}: must be one of {', '.join(ADVANTAGES)}")
    known = rewards_G[valid_G]
    if not np.isfinite(known).all():
        raise ValueError(f"rewards={known.tolist()}: a valid reward must be finite; mark the others as invalid")

    values = np.zeros_like(rewards_G)
    all_equal = len(known) > 1 and bool((known == known[0]).all())
    if len(known) > 1 and not all_equal:
        values[valid_G] = ADVANTAGES[estimator](known, eps)
    baseline = float(known.mean()) if len(known) else None
    return GroupAdvantages(values, baseline, num_no_baseline=int(len(known) == 1), all_equal=all_equal)


def _grpo(rewards: Float64Array, eps: float) -> Float64Array:
    """(r − mean) / (std + eps), with the sample standard deviation (N − 1), as most published systems compute it.

    Source: Shao et al. 2024, DeepSeekMath, §4.1 (arXiv:2402.03300). The paper does not say which std; with N − 1 the
    rewards 1, 0, 1 give .577349, −1.154699.
    """
    advantages: Float64Array = (rewards - rewards.mean()) / (rewards.std(ddof=1) + eps)
    return advantages


def _dr_grpo(rewards: Float64Array, eps: float) -> Float64Array:
    """r − mean: (1 − 1/N) times the policy gradient in expectation, without the bias of dividing by the std.

    Source: Liu et al. 2025, Understanding R1-Zero-Like Training (arXiv:2503.20783).
    """
    advantages: Float64Array = rewards - rewards.mean()
    return advantages


def _rloo(rewards: Float64Array, eps: float) -> Float64Array:
    """r − mean of the other rewards: the unbiased policy gradient. Equals dr_grpo times N / (N − 1).

    Source: Kool et al. 2019; Ahmadian et al. 2024, Back to Basics (arXiv:2402.14740).
    """
    mean_of_others: Float64Array = (rewards.sum() - rewards) / (len(rewards) - 1)
    advantages: Float64Array = rewards - mean_of_others
    return advantages


ADVANTAGES: Mapping[str, AdvantageFn] = {"grpo": _grpo, "dr_grpo": _dr_grpo, "rloo": _rloo}
