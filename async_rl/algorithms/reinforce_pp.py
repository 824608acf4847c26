"""REINFORCE++: credit normalised over the whole batch instead of within a prompt's group.

    reinforce_pp             A = (r − mean) / std                          over all trained tokens of the step
    reinforce_pp_baseline    A = ((r − group mean) − mean) / std           likewise

mean and std (unbiased) are over the tokens of the step, so a trajectory counts as often as it has trained tokens; what is not
trained counts once, as nothing would be left of an untrained group otherwise. With a KL penalty in the reward
(`kl_in = "reward"`) r has it taken off, which is the paper's form.

Source: Hu et al. 2025, REINFORCE++ (arXiv:2501.03262), §3 and its variant with a group baseline. Biased: the std, and the
mean, depend on the trajectory's own reward, the less the larger the batch.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from async_rl.algorithms.credit import AdvantageSettings, Float64Array, RewardGroup, all_equal

STD_EPS = 1e-8
"""Added to the std of the batch, as the authors' implementation does."""


def reinforce_pp(groups: Sequence[RewardGroup], settings: AdvantageSettings) -> Sequence[Float64Array]:
    """Whitened rewards. It needs no siblings: a group of one is fine."""
    return _whitened(groups, [group.known for group in groups])


def reinforce_pp_baseline(groups: Sequence[RewardGroup], settings: AdvantageSettings) -> Sequence[Float64Array]:
    """Whitened differences to the group's mean. A single valid reward has no sibling, and a difference of 0."""
    return _whitened(groups, [_centered(group.known) for group in groups])


def _centered(known: Float64Array) -> Float64Array:
    centered: Float64Array = known * 0.0 if len(known) < 2 or all_equal(known) else known - known.mean()
    return centered


def _whitened(groups: Sequence[RewardGroup], values: Sequence[Float64Array]) -> Sequence[Float64Array]:
    flat = np.concatenate([*values, np.zeros(0)])
    counts = np.concatenate([*(np.maximum(group.num_tokens[group.valid], 1) for group in groups), np.zeros(0, dtype=np.int64)])
    total = counts.sum()
    if total < 2 or all_equal(flat):
        return [np.zeros(len(group.rewards)) for group in groups]
    mean = (counts * flat).sum() / total
    std = np.sqrt((counts * (flat - mean) ** 2).sum() / (total - 1))
    return [group.spread((value - mean) / (std + STD_EPS)) for group, value in zip(groups, values, strict=True)]
