"""Advantages against the siblings of a trajectory: GRPO, Dr.GRPO, RLOO.

The baseline is made of the group itself, so a single valid reward has none: its advantage is 0. Invalid trajectories are
neither in the baseline nor credited. Equal rewards give exactly 0, whatever their mean rounds to.

| name | advantage | expectation of the gradient, on-policy |
|---|---|---|
| grpo | (r − mean) / (std + eps) | biased: prompts are weighed by 1/std |
| dr_grpo | r − mean | exactly (1 − 1/G) × the policy gradient |
| rloo | r − mean of the others | exactly the policy gradient |
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TypeAlias

from async_rl.algorithms.credit import AdvantageFn, AdvantageSettings, Float64Array, RewardGroup, all_equal

GroupFn: TypeAlias = Callable[[Float64Array, float], Float64Array]
"""(valid rewards [N], eps) → advantages [N], for N ≥ 2 rewards that are not all equal."""


def per_group(estimator: GroupFn) -> AdvantageFn:
    """An estimator of a step's groups out of one that looks at one group at a time."""

    def credit(groups: Sequence[RewardGroup], settings: AdvantageSettings) -> Sequence[Float64Array]:
        return [_credit_one(group, estimator, settings.eps) for group in groups]

    return credit


def _credit_one(group: RewardGroup, estimator: GroupFn, eps: float) -> Float64Array:
    known = group.known
    return group.spread(known * 0.0 if len(known) < 2 or all_equal(known) else estimator(known, eps))


def grpo(rewards: Float64Array, eps: float) -> Float64Array:
    """(r − mean) / (std + eps), with the sample standard deviation (N − 1), as most published systems compute it.

    Source: Shao et al. 2024, DeepSeekMath, §4.1 (arXiv:2402.03300). The paper does not say which std; with N − 1 the
    rewards 1, 0, 1 give .577349, −1.154699.
    """
    advantages: Float64Array = (rewards - rewards.mean()) / (rewards.std(ddof=1) + eps)
    return advantages


def dr_grpo(rewards: Float64Array, eps: float) -> Float64Array:
    """r − mean: (1 − 1/N) times the policy gradient in expectation, without the bias of dividing by the std.

    Source: Liu et al. 2025, Understanding R1-Zero-Like Training (arXiv:2503.20783).
    """
    advantages: Float64Array = rewards - rewards.mean()
    return advantages


def rloo(rewards: Float64Array, eps: float) -> Float64Array:
    """r − mean of the other rewards: the unbiased policy gradient. Equals dr_grpo times N / (N − 1).

    Source: Kool et al. 2019; Ahmadian et al. 2024, Back to Basics (arXiv:2402.14740).
    """
    mean_of_others: Float64Array = (rewards.sum() - rewards) / (len(rewards) - 1)
    advantages: Float64Array = rewards - mean_of_others
    return advantages
