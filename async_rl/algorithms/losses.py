"""Policy losses, each as its paper writes it.

Every loss returns a **sum** over the tokens where loss_mask is True. The train step divides by the number of trained tokens
of the whole optimizer step, over all micro-batches and ranks, so that a token weighs the same wherever it was packed: a mean
per micro-batch would weigh tokens by their neighbours. Masked positions may hold anything and get a gradient of exactly 0.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Protocol

import torch
from torch import Tensor

from async_rl.algorithms.importance import importance_ratio, importance_weight, require_same_length


@dataclass(frozen=True, slots=True)
class ClipRange:
    """Ratios are clipped to [1 − low, 1 + high]."""

    low: float
    high: float

    def __post_init__(self) -> None:
        if not (0 < self.low < 1 and self.high > 0):
            raise ValueError(f"ClipRange low={self.low} high={self.high}: needs 0 < low < 1 and high > 0")


@dataclass(frozen=True, slots=True)
class LossSettings:
    """What losses can be told; each reads what it needs. importance_cap: importance weights are truncated here (≥ 1)."""

    clip: ClipRange
    importance_cap: float = 2.0

    def __post_init__(self) -> None:
        if not self.importance_cap >= 1:
            raise ValueError(f"LossSettings importance_cap={self.importance_cap}: must be at least 1, the on-policy weight")


@dataclass(frozen=True, slots=True, eq=False)
class LossTokens:
    """The tokens of one micro-batch, all [T] and aligned: position t holds what belongs to token t.

    Logprobs in nats at the sampling temperature: policy (differentiable), proximal (the policy at the start of the drawn
    batch; on its first step the policy itself, detached), behavior (from the engine). loss_mask: bool, True where trained.
    Raises: ShapeError if they differ in length.
    """

    policy_logprobs: Tensor
    proximal_logprobs: Tensor
    behavior_logprobs: Tensor
    advantages: Tensor
    loss_mask: Tensor

    def __post_init__(self) -> None:
        require_same_length(**{f.name: getattr(self, f.name) for f in fields(self)})


@dataclass(frozen=True, slots=True, eq=False)
class LossStats:
    """Sums over trained tokens, float64 scalars on the loss's device: add them up across micro-batches and ranks.

    ratio: policy over the policy that the loss clips against. weight: proximal over behavior before truncation (1 for a
    loss without). num_clipped: tokens whose gradient the clip removed. num_clamped: log-ratios beyond LOG_RATIO_BOUND.
    """

    num_tokens: Tensor
    num_clipped: Tensor
    num_clamped: Tensor
    num_truncated: Tensor
    ratio_sum: Tensor
    weight_sum: Tensor
    weight_squared_sum: Tensor

    def __add__(self, other: LossStats) -> LossStats:
        return LossStats.from_vector(self.to_vector() + other.to_vector())

    def to_vector(self) -> Tensor:
        """All sums as one float64 tensor, for one all-reduce."""
        return torch.stack([getattr(self, f.name).double() for f in fields(self)])

    @staticmethod
    def from_vector(vector: Tensor) -> LossStats:
        """Inverse of `to_vector`."""
        return LossStats(*vector.unbind())

    @staticmethod
    def zeros(device: torch.device | str = "cpu") -> LossStats:
        """Where adding up starts."""
        return LossStats.from_vector(torch.zeros(len(fields(LossStats)), dtype=torch.float64, device=device))

    def to_floats(self) -> dict[str, float]:
        """The sums by name (a device sync)."""
        return dict(zip((f.name for f in fields(self)), self.to_vector().tolist(), strict=True))


@dataclass(frozen=True, slots=True, eq=False)
class LossOutput:
    """loss_sum: differentiable scalar, summed over trained tokens, not divided by anything."""

    loss_sum: Tensor
    stats: LossStats


class LossFn(Protocol):
    """A policy loss: pure, no reduction but the sum over trained tokens, nothing read that is not an argument.

    With no trained token it returns 0 with a gradient graph, so that an empty micro-batch can run backward.
    """

    def __call__(self, tokens: LossTokens, settings: LossSettings) -> LossOutput: ...


def clipped_surrogate(tokens: LossTokens, settings: LossSettings) -> LossOutput:
    """Return −Σ min(r A, clip(r) A) with r = policy/behavior: PPO, clipped against the policy that sampled.

    Reads neither proximal_logprobs nor importance_cap.
    Source: Schulman et al. 2017, eq. 7 (arXiv:1707.06347); clip.high > clip.low is "clip-higher", Yu et al. 2025
    (DAPO, arXiv:2503.14476).
    """
    surrogate = _surrogate(tokens.policy_logprobs, tokens.behavior_logprobs, tokens, settings.clip)
    return LossOutput(_masked_sum(-surrogate.values, tokens.loss_mask), surrogate.stats)


def decoupled_clip(tokens: LossTokens, settings: LossSettings) -> LossOutput:
    """Return −Σ w · min(r A, clip(r) A) with r = policy/proximal and w = min(proximal/behavior, cap), detached.

    The clip keeps each update near the proximal policy, however old the sample; the weight accounts for who sampled it.
    The weight is always there: with proximal = policy (one step per drawn batch) r is 1 and w is policy/behavior.
    Source: Hilton et al. 2021, the decoupled objective (arXiv:2110.00641); used for asynchronous RL by Fu et al. 2025 (AReaL,
    arXiv:2505.24298). The truncation is not theirs: it bounds the variance, at the price of a bias above the cap.
    """
    surrogate = _surrogate(tokens.policy_logprobs, tokens.proximal_logprobs, tokens, settings.clip)
    weight = importance_weight(
        tokens.proximal_logprobs, tokens.behavior_logprobs, tokens.loss_mask, cap=settings.importance_cap
    )
    stats = LossStats(
        num_tokens=surrogate.stats.num_tokens,
        num_clipped=surrogate.stats.num_clipped,
        num_clamped=surrogate.stats.num_clamped,
        num_truncated=weight.num_truncated,
        ratio_sum=surrogate.stats.ratio_sum,
        weight_sum=weight.raw_sum,
        weight_squared_sum=weight.raw_squared_sum,
    )
    return LossOutput(_masked_sum(-weight.values * surrogate.values, tokens.loss_mask), stats)


LOSSES: Mapping[str, LossFn] = {"decoupled_clip": decoupled_clip, "clipped_surrogate": clipped_surrogate}


@dataclass(frozen=True, slots=True, eq=False)
class _Surrogate:
    values: Tensor  # [T], before the sign and the mask
    stats: LossStats


def _surrogate(policy_logprobs_T: Tensor, old_logprobs_T: Tensor, tokens: LossTokens, clip: ClipRange) -> _Surrogate:
    """min(r A, clip(r, 1 − low, 1 + high) A) per token, with r = policy/old."""
    mask_T = tokens.loss_mask
    advantages_T = tokens.advantages.float()
    ratio = importance_ratio(policy_logprobs_T, old_logprobs_T, mask_T)
    unclipped_T = ratio.values * advantages_T
    clipped_T = ratio.values.clamp(1.0 - clip.low, 1.0 + clip.high) * advantages_T

    detached_T = ratio.values.detach()
    num_tokens = mask_T.sum()
    stats = LossStats(
        num_tokens=num_tokens,
        num_clipped=(clipped_T < unclipped_T).sum(),
        num_clamped=ratio.num_clamped,
        num_truncated=torch.zeros_like(num_tokens),
        ratio_sum=torch.where(mask_T, detached_T, 0.0).sum(dtype=torch.float64),
        weight_sum=num_tokens,
        weight_squared_sum=num_tokens,
    )
    return _Surrogate(torch.minimum(unclipped_T, clipped_T), stats)


def _masked_sum(values_T: Tensor, loss_mask_T: Tensor) -> Tensor:
    return torch.where(loss_mask_T, values_T, 0.0).sum()
