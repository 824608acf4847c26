"""From the values of a step's samples to advantages per token, and to what the critic learns. Torch-free.

A trajectory's reward belongs to its last trained token; what a KL penalty takes off belongs to the token it is measured on.
Too-old tokens that are masked lie before those that train (versions only grow along a trajectory, and with them the KV's): no
advantage of a trained token reads theirs.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from async_rl.algorithms.credit import BoolArray, Float64Array
from async_rl.algorithms.returns import discounted_returns, generalized_advantages, whitened
from async_rl.algorithms.value import explained_variance
from async_rl.config.algorithm import CriticConfig
from async_rl.trainer.samples import TrainingSample
from protocol.messages import Float32Array


@dataclass(frozen=True, slots=True, eq=False)
class ValueTargets:
    """What the critic learns from a step: per sample its values as they were and the returns, float32 [T], 0 where not trained.

    explained_variance: of the discounted returns by the old values, over all trained tokens. Those returns hold nothing that
    the critic said, unlike the λ-returns that it learns from, which would flatter it.
    """

    old_values: Sequence[Float32Array]
    returns: Sequence[Float32Array]
    explained_variance: float | None
    value_mean: float | None
    return_mean: float | None


def credit_tokens(
    samples: Sequence[TrainingSample],
    values: Sequence[Float64Array],
    critic: CriticConfig,
    penalties: Sequence[Float64Array] | None = None,
) -> tuple[list[TrainingSample], ValueTargets]:
    """Return the samples with generalised advantages in place of their trajectories' rewards, and the critic's targets.

    samples: each trained token holds its trajectory's reward. values, penalties: [T] per sample; penalties are taken off the
    reward of their token.
    """
    rewards = [_token_rewards(sample) for sample in samples]
    if penalties is not None:
        rewards = [
            own - np.where(sample.loss_mask, off, 0.0) for own, sample, off in zip(rewards, samples, penalties, strict=True)
        ]
    masks = [sample.loss_mask for sample in samples]
    pairs = [
        generalized_advantages(own, value, mask, gamma=critic.gamma, gae_lambda=critic.gae_lambda)
        for own, value, mask in zip(rewards, values, masks, strict=True)
    ]
    advantages = [advantage for advantage, _ in pairs]
    if critic.whiten:
        advantages = whitened(advantages, masks)
    credited = [
        replace(sample, advantages=advantage.astype(np.float32)) for sample, advantage in zip(samples, advantages, strict=True)
    ]
    observed = [discounted_returns(own, mask, gamma=critic.gamma)[mask] for own, mask in zip(rewards, masks, strict=True)]
    said = [value[mask] for value, mask in zip(values, masks, strict=True)]
    return credited, _targets(said, observed, values, masks, [returns for _, returns in pairs])


def _token_rewards(sample: TrainingSample) -> Float64Array:
    """The trajectory's reward on its last trained token, [T]."""
    rewards = np.zeros(len(sample))
    trained = np.flatnonzero(sample.loss_mask)
    if trained.size:
        rewards[trained[-1]] = sample.advantages[trained[-1]]
    return rewards


def _targets(
    said: Sequence[Float64Array],
    observed: Sequence[Float64Array],
    values: Sequence[Float64Array],
    masks: Sequence[BoolArray],
    returns: Sequence[Float64Array],
) -> ValueTargets:
    all_said, all_observed = (np.concatenate([*rows, np.zeros(0)]) for rows in (said, observed))
    return ValueTargets(
        old_values=[np.where(mask, value, 0.0).astype(np.float32) for value, mask in zip(values, masks, strict=True)],
        returns=[rows.astype(np.float32) for rows in returns],
        explained_variance=explained_variance(all_said, all_observed),
        value_mean=float(all_said.mean()) if all_said.size else None,
        return_mean=float(all_observed.mean()) if all_observed.size else None,
    )
