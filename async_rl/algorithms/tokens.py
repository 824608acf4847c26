"""What a loss is given and what it returns: the tokens of one micro-batch, settings, per-token losses with their statistics.

A loss returns a value **per token**. Who may divide by what is decided elsewhere (`aggregation`), from counts over all
micro-batches and ranks of the step: a mean per micro-batch would weigh tokens by their neighbours.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from typing import Any, Literal, Protocol, TypeAlias

import torch
from torch import Tensor

from async_rl.errors import ShapeError

ImportanceTreatment: TypeAlias = Literal["none", "exact", "truncate", "mask"]
Level: TypeAlias = Literal["token", "sequence", "geometric"]
Anchor: TypeAlias = Literal["behavior", "proximal"]


@dataclass(frozen=True, slots=True)
class ClipRange:
    """Ratios are clipped to [1 − low, 1 + high]; low = 1 leaves no lower bound."""

    low: float
    high: float

    def __post_init__(self) -> None:
        if not (0 < self.low <= 1 and self.high > 0):
            raise ValueError(f"ClipRange low={self.low} high={self.high}: needs 0 < low <= 1 and high > 0")


@dataclass(frozen=True, slots=True)
class LossSettings:
    """What losses can be told; each reads what it needs.

    anchor: policy that ratios are taken against; None: the loss's own. dual_clip: lower bound c of A < 0, in units of A.
    importance: what becomes of weights behavior → proximal: `none` (1), `exact`, `truncate` at the cap, `mask` (0 where the
    weight is above the cap or below the floor). importance_level: weights per token, per sequence (the product of its
    tokens' weights) or geometric (the length-th root of that). args: a user's own.
    """

    clip: ClipRange
    importance_cap: float = 2.0
    importance: ImportanceTreatment = "truncate"
    importance_level: Level = "token"
    importance_floor: float = 0.0
    anchor: Anchor | None = None
    dual_clip: float | None = None
    args: Mapping[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if not self.importance_cap >= 1:
            raise ValueError(f"LossSettings importance_cap={self.importance_cap}: must be at least 1, the on-policy weight")
        if not 0 <= self.importance_floor <= 1:
            raise ValueError(f"LossSettings importance_floor={self.importance_floor}: must lie in [0, 1], the on-policy weight")
        if self.dual_clip is not None and not self.dual_clip > 1:
            raise ValueError(f"LossSettings dual_clip={self.dual_clip}: must be above 1, the on-policy ratio")


@dataclass(frozen=True, slots=True, eq=False)
class LossTokens:
    """The tokens of one micro-batch, all [T] and aligned: position t holds what belongs to token t.

    Logprobs in nats at the sampling temperature: policy (differentiable), proximal (the policy at the start of the drawn
    batch; on its first step the policy itself, detached), behavior (from the engine). loss_mask: bool, True where trained.
    sequence_ids: int64, which of num_sequences sequences a token belongs to; None: all are of one.
    Values where loss_mask is False never matter: they may be anything, NaN included.
    Raises: ShapeError if they differ in length.
    """

    policy_logprobs: Tensor
    proximal_logprobs: Tensor
    behavior_logprobs: Tensor
    advantages: Tensor
    loss_mask: Tensor
    sequence_ids: Tensor | None = None
    num_sequences: int = 1

    def __post_init__(self) -> None:
        names = ("policy_logprobs", "proximal_logprobs", "behavior_logprobs", "advantages", "loss_mask", "sequence_ids")
        given = {name: value for name in names if (value := getattr(self, name)) is not None}
        require_same_length(**given)

    @property
    def credit(self) -> Tensor:
        """Advantages, [T], and 0 where not trained: whatever is there must not reach a gradient by way of 0 × NaN."""
        return masked(working(self.advantages), self.loss_mask)

    def sum_per_sequence(self, values_T: Tensor) -> Tensor:
        """Sum over the trained tokens of each sequence, [S]."""
        kept = torch.where(self.loss_mask, values_T, 0.0)
        if self.sequence_ids is None:
            return kept.sum()[None]
        return kept.new_zeros(self.num_sequences).index_add(0, self.sequence_ids, kept)

    def spread(self, values_S: Tensor) -> Tensor:
        """Give every token the value of its sequence, [T]."""
        if self.sequence_ids is None:
            return values_S.expand(len(self.loss_mask))
        return values_S.index_select(0, self.sequence_ids)

    def trained_lengths(self) -> Tensor:
        """Trained tokens of each sequence, [S], at least 1 so that one can divide."""
        ones = torch.ones_like(self.policy_logprobs, requires_grad=False)
        return self.sum_per_sequence(ones).clamp(min=1)


@dataclass(frozen=True, slots=True, eq=False)
class LossStats:
    """Sums over trained tokens, float64 scalars on the loss's device: add them up across micro-batches and ranks.

    ratio: policy over the policy that the loss clips against. weight: proximal over behavior before truncation, at the
    level of the loss's settings (1 for a loss without). num_clipped: tokens whose gradient the clip removed, or (CISPO)
    whose ratio it changed. num_clamped: log-ratios beyond LOG_RATIO_BOUND. num_truncated: weights above the cap.
    num_masked: tokens that importance masking took out of the loss.
    """

    num_tokens: Tensor
    num_clipped: Tensor
    num_clamped: Tensor
    num_truncated: Tensor
    ratio_sum: Tensor
    weight_sum: Tensor
    weight_squared_sum: Tensor
    num_masked: Tensor

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
    """token_losses: [T], differentiable, 0 where not trained, not divided by anything."""

    token_losses: Tensor
    stats: LossStats

    @property
    def loss_sum(self) -> Tensor:
        """Scalar: the sum over trained tokens."""
        return self.token_losses.sum()


class LossFn(Protocol):
    """A policy loss: pure, a value per token, nothing read that is not an argument.

    With no trained token its values are 0 with a gradient graph, so that an empty micro-batch can run backward.
    """

    def __call__(self, tokens: LossTokens, settings: LossSettings) -> LossOutput: ...


def require_same_length(**tensors: Tensor) -> None:
    """Raises: ShapeError unless every tensor is one-dimensional and they have one length."""
    shapes = {name: tuple(tensor.shape) for name, tensor in tensors.items()}
    if len(set(shapes.values())) != 1 or any(len(shape) != 1 for shape in shapes.values()):
        listed = ", ".join(f"{name}={list(shape)}" for name, shape in shapes.items())
        raise ShapeError(f"{listed}: all must be [T] of the same length; align them by token")


def working(values: Tensor) -> Tensor:
    """`values` in the dtype that losses compute in: float32, or float64 for float64."""
    return values.to(torch.promote_types(values.dtype, torch.float32))


def masked(values_T: Tensor, loss_mask_T: Tensor) -> Tensor:
    """`values_T` where trained, 0 elsewhere (with no gradient to there)."""
    return torch.where(loss_mask_T, values_T, 0.0)
