"""Exact expectations of gradients over every sequence that a policy may sample: vocabulary 3, length 4, float64.

A policy is a table of logits [4, 13 contexts at most, 3]: one row per prefix, so each of the 81 sequences has its own path and
nothing is approximated. An estimator is one of the package's losses; its expectation is the sum over what the *behavior* policy
samples, probability × gradient of the loss. Rewards are a fixed table. "Bias" is |E[g] − g*| / |g*| with the exact gradient g*.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache

import numpy as np
import torch
from torch import Tensor

from async_rl.algorithms.advantages import ADVANTAGES
from async_rl.algorithms.credit import AdvantageSettings, RewardGroup
from async_rl.algorithms.kl import KlEstimator, KlForm, kl_loss
from async_rl.algorithms.losses import LOSSES, ClipRange, LossSettings, LossTokens
from async_rl.algorithms.returns import generalized_advantages

VOCABULARY, LENGTH = 3, 4
NUM_SEQUENCES = VOCABULARY**LENGTH
NUM_PREFIXES = sum(VOCABULARY**depth for depth in range(LENGTH))
WIDE = ClipRange(0.999, 1e6)
"""No clip within reach: what is left is the estimator itself."""


@cache
def paths() -> tuple[Tensor, Tensor]:
    """(prefix row, token) of each position of each sequence, int64 [81, 4] each."""
    prefixes = [prefix for depth in range(LENGTH) for prefix in itertools.product(range(VOCABULARY), repeat=depth)]
    row = {prefix: index for index, prefix in enumerate(prefixes)}
    sequences = list(itertools.product(range(VOCABULARY), repeat=LENGTH))
    rows = [[row[sequence[:t]] for t in range(LENGTH)] for sequence in sequences]
    return torch.tensor(rows), torch.tensor(sequences)


def logprobs(logits: Tensor) -> Tensor:
    """Logprob of every token of every sequence, [81, 4]."""
    rows, tokens = paths()
    return logits.log_softmax(-1)[rows, tokens]


def random_policies(seed: int, distance: float) -> tuple[Tensor, Tensor, Tensor]:
    """(policy logits, behavior logits at about `distance` nats from them, rewards [81])"""
    generator = torch.Generator().manual_seed(seed)

    def normal(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator, dtype=torch.float64)

    policy = normal(NUM_PREFIXES, VOCABULARY)
    return (
        policy,
        policy + distance * normal(NUM_PREFIXES, VOCABULARY),
        torch.rand(NUM_SEQUENCES, generator=generator, dtype=torch.float64),
    )


def kl_per_token(policy: Tensor, behavior: Tensor) -> float:
    """KL(behavior ‖ policy) of whole sequences over their length, nats."""
    of_behavior = logprobs(behavior)
    return float((of_behavior.sum(1).exp() * (of_behavior - logprobs(policy)).sum(1)).sum() / LENGTH)


def true_gradient(policy: Tensor, rewards: Tensor) -> Tensor:
    """Of minus the expected reward."""
    logits = policy.clone().requires_grad_()
    value = (logprobs(logits).sum(1).exp() * rewards).sum()
    return -torch.autograd.grad(value, logits)[0]


def expected_gradient(
    loss: str,
    settings: LossSettings,
    policy: Tensor,
    behavior: Tensor,
    rewards: Tensor,
    *,
    baseline: float = 0.0,
    proximal: Tensor | None = None,
    advantages: Tensor | None = None,
) -> Tensor:
    """E over the behavior policy of the gradient of the loss, summed over each sequence's tokens.

    advantages: [81, 4], in place of the reward minus the baseline on every token.
    """
    logits = policy.clone().requires_grad_()
    own, sampled = logprobs(logits), logprobs(behavior)
    anchor = own.detach() if proximal is None else logprobs(proximal)
    tokens = LossTokens(
        own.flatten(),
        anchor.flatten(),
        sampled.flatten(),
        (rewards - baseline).repeat_interleave(LENGTH) if advantages is None else advantages.flatten(),
        torch.ones(NUM_SEQUENCES * LENGTH, dtype=torch.bool),
        torch.arange(NUM_SEQUENCES).repeat_interleave(LENGTH),
        NUM_SEQUENCES,
    )
    losses = LOSSES[loss](tokens, settings).token_losses.view(NUM_SEQUENCES, LENGTH).sum(1)
    return torch.autograd.grad((sampled.sum(1).exp() * losses).sum(), logits)[0]


def state_values(policy: Tensor, rewards: Tensor) -> Tensor:
    """The expected reward after each prefix, [40]: what a perfect critic says."""
    rows, _ = paths()
    probabilities = logprobs(policy).sum(1).exp()
    reached, earned = (torch.zeros(NUM_PREFIXES, dtype=torch.float64) for _ in range(2))
    for t in range(LENGTH):
        reached.index_add_(0, rows[:, t], probabilities)
        earned.index_add_(0, rows[:, t], probabilities * rewards)
    return earned / reached


def critic_advantages(values: Tensor, rewards: Tensor, *, gae_lambda: float) -> Tensor:
    """Generalised advantages [81, 4] of every sequence under a critic that says `values` [40] of the prefixes."""
    said, rewards_T, mask = values[paths()[0]].numpy(), np.zeros(LENGTH), np.ones(LENGTH, dtype=np.bool_)
    advantages = []
    for own, reward in zip(said, rewards.tolist(), strict=True):
        rewards_T[-1] = reward
        advantages.append(generalized_advantages(rewards_T, own, mask, gamma=1.0, gae_lambda=gae_lambda)[0])
    return torch.from_numpy(np.array(advantages))


def expected_group_gradient(estimator: str, policy: Tensor, rewards: Tensor, *, group_size: int) -> Tensor:
    """E over all groups that the policy itself may sample of the gradient of −Σ A log policy / G; exact, on-policy.

    By symmetry the first member's expected gradient is everyone's: E[A₁ ∇ log policy(y₁)] with A₁ averaged over its siblings.
    """
    logits = policy.clone().requires_grad_()
    own = logprobs(logits).sum(1)
    probability = own.detach().exp()
    credit = torch.zeros(NUM_SEQUENCES, dtype=torch.float64)
    siblings = list(itertools.product(range(NUM_SEQUENCES), repeat=group_size - 1))
    for first in range(NUM_SEQUENCES):
        groups = [RewardGroup.of([float(rewards[i]) for i in (first, *rest)]) for rest in siblings]
        values = ADVANTAGES[estimator](groups, AdvantageSettings(eps=1e-9))
        weights = torch.tensor([float(probability[list(rest)].prod()) for rest in siblings], dtype=torch.float64)
        credit[first] = float((weights * torch.tensor([float(value[0]) for value in values], dtype=torch.float64)).sum())
    return -torch.autograd.grad((probability * credit * own).sum(), logits)[0]


def expected_kl_gradient(estimator: KlEstimator, form: KlForm, policy: Tensor, behavior: Tensor, reference: Tensor) -> Tensor:
    """E over tokens that the behavior policy samples in fixed contexts, of the gradient of the KL loss, summed over contexts.

    At the level of the token: every context counts once, its three tokens with the behavior policy's probabilities.
    """
    logits = policy.clone().requires_grad_()
    own, sampled, ref = (x.log_softmax(-1).flatten() for x in (logits, behavior, reference))
    zeros, mask = torch.zeros_like(sampled), torch.ones(len(sampled), dtype=torch.bool)
    tokens = LossTokens(own, own.detach(), sampled, zeros, mask, torch.arange(len(sampled)), len(sampled))
    losses = kl_loss(ref, tokens, estimator=estimator, form=form)
    return torch.autograd.grad((sampled.exp() * losses).sum(), logits)[0]


def true_kl_gradient(policy: Tensor, reference: Tensor) -> Tensor:
    """Of Σ over contexts of KL(policy ‖ reference)."""
    logits = policy.clone().requires_grad_()
    own = logits.log_softmax(-1)
    value = (own.exp() * (own - reference.log_softmax(-1))).sum()
    return torch.autograd.grad(value, logits)[0]


def relative_bias(gradient: Tensor, exact: Tensor) -> float:
    return float((gradient - exact).norm() / exact.norm())


def median_bias(measure: Callable[[int], float], count: int) -> float:
    return sorted(measure(seed) for seed in range(count))[count // 2]


@dataclass(frozen=True)
class Row:
    """A line of the table: the claim, and the bias measured at each distance from the behavior policy."""

    name: str
    claim: str
    biases: Sequence[float]
    exact: bool

    @property
    def holds(self) -> bool:
        """An exact estimator is exact to 1e-12; a biased one is not."""
        return (
            all(bias <= 1e-12 for bias in self.biases)
            if self.exact
            else max(self.biases) > 1e-4 and all(math.isfinite(bias) for bias in self.biases)
        )
