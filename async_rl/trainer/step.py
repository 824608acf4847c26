"""One optimizer step: forward and backward over micro-batches, one global mean over trained tokens, clip, AdamW.

Every rank calls with the same number of micro-batches. What a step does is decided from reduced numbers only, so ranks agree.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn.utils import clip_grads_with_norm_, get_total_norm
from torch.optim import AdamW

from async_rl.algorithms.losses import LossFn, LossSettings, LossStats, LossTokens
from async_rl.errors import ShapeError
from async_rl.trainer.packing import MicroBatch
from async_rl.trainer.policy import PolicyModel, full_tensor


class SkipReason(StrEnum):
    """Why a step changed nothing: neither weights nor optimizer state, and no version is counted."""

    NO_TOKENS = "no_tokens"  # every token of every rank is masked
    NON_FINITE_LOSS = "non_finite_loss"
    NON_FINITE_GRADIENT = "non_finite_gradient"


@dataclass(frozen=True, slots=True)
class StepStats:
    """What one step did, equal on every rank.

    loss: mean over trained tokens of all ranks. grad_norm: before clipping. num_tokens: forward, prompts included.
    behavior_gap_max, behavior_gap_mean: |policy − behavior| and policy − behavior logprob over trained tokens, nats.
    entropy: mean over trained tokens, nats; None unless asked for. loss_sums: the loss's own sums (LossStats) by name.
    """

    applied: bool
    skip_reason: SkipReason | None
    learning_rate: float
    loss: float
    grad_norm: float
    num_tokens: int
    num_trained_tokens: int
    num_micro_batches: int
    behavior_gap_max: float
    behavior_gap_mean: float
    entropy: float | None
    loss_sums: Mapping[str, float]


@dataclass(frozen=True, slots=True)
class StepSettings:
    """The objective and its limits."""

    loss_fn: LossFn
    loss_settings: LossSettings
    grad_clip: float = 1.0
    with_entropy: bool = False
    on_micro_batch: Callable[[int], object] = lambda index: None
    """Told after each micro-batch: the step makes progress."""


def make_optimizer(
    policy: PolicyModel, *, learning_rate: float, betas: tuple[float, float] = (0.9, 0.999), weight_decay: float = 0.0
) -> AdamW:
    """Return AdamW over the float32 master weights. Matrices decay; norms and biases do not."""
    matrices = [p for p in policy.parameters() if p.requires_grad and p.dim() >= 2]
    vectors = [p for p in policy.parameters() if p.requires_grad and p.dim() < 2]
    groups = [{"params": matrices, "weight_decay": weight_decay}, {"params": vectors, "weight_decay": 0.0}]
    return AdamW([group for group in groups if group["params"]], lr=learning_rate, betas=betas, fused=True)


def train_step(
    policy: PolicyModel,
    optimizer: AdamW,
    micro_batches: Sequence[MicroBatch],
    *,
    settings: StepSettings,
    learning_rate: float,
    proximal_logprobs: Sequence[Tensor] | None = None,
) -> StepStats:
    """Apply one step to the policy, or none of it.

    The loss is the sum over all trained tokens of all micro-batches and ranks, divided once by their number. Without
    proximal_logprobs ([T] per micro-batch) the policy itself, detached, is the proximal policy: right for the first step of a
    drawn batch. A step without trained tokens, or with a loss or gradient that is not finite, is skipped and says so.
    Raises: ShapeError, on every rank, if ranks have different numbers of micro-batches.
    """
    totals = _reduce_counts(policy, micro_batches)
    if totals.num_trained_tokens == 0:
        return _skipped(totals, SkipReason.NO_TOKENS, learning_rate)
    sums = _Sums(policy.device)
    # FSDP averages gradients over ranks; the loss is a sum over ranks divided by the global token count.
    scale = policy.num_ranks / totals.num_trained_tokens
    for index, micro_batch in enumerate(micro_batches):
        proximal = None if proximal_logprobs is None else proximal_logprobs[index]
        _backward(policy, micro_batch.to(policy.device), proximal, settings, scale, sums)
        settings.on_micro_batch(index)
    gradients = [p.grad for p in policy.parameters() if p.grad is not None]
    norm = full_tensor(get_total_norm(gradients))
    reduced = sums.reduce(policy)
    grad_norm = float(norm)
    reason = None
    if not math.isfinite(reduced.loss_sum):
        reason = SkipReason.NON_FINITE_LOSS
    elif not math.isfinite(grad_norm):
        reason = SkipReason.NON_FINITE_GRADIENT
    else:
        clip_grads_with_norm_(_trained(policy), settings.grad_clip, norm)
        for group in optimizer.param_groups:
            group["lr"] = learning_rate
        optimizer.step()
    optimizer.zero_grad(set_to_none=True)
    return _stats(totals, reduced, reason, learning_rate, grad_norm, settings)


@torch.no_grad()
def policy_logprobs(
    policy: PolicyModel, micro_batches: Sequence[MicroBatch], *, on_micro_batch: Callable[[int], object] = lambda index: None
) -> list[Tensor]:
    """Return the policy's logprobs of trained tokens per micro-batch ([T], 0 elsewhere): the proximal policy of later steps.

    Every rank calls it with the same number of micro-batches.
    """
    results = []
    for index, micro_batch in enumerate(micro_batches):
        logprobs, _ = _logprobs(policy, micro_batch, with_entropy=False)
        results.append(logprobs)
        on_micro_batch(index)
    return results


@dataclass(frozen=True, slots=True)
class _Counts:
    num_tokens: int
    num_trained_tokens: int
    num_micro_batches: int


@dataclass(frozen=True, slots=True)
class _Reduced:
    loss_sum: float
    gap_sum: float
    gap_max: float
    entropy_sum: float
    loss_sums: Mapping[str, float]


class _Sums:
    """What micro-batches add up, on the device until the end of the step."""

    def __init__(self, device: torch.device) -> None:
        self.scalars = torch.zeros(3, dtype=torch.float64, device=device)  # loss, gap, entropy
        self.gap_max = torch.zeros(1, dtype=torch.float64, device=device)
        self.loss_stats = LossStats.zeros(device)

    @torch.no_grad()
    def add(
        self, micro_batch: MicroBatch, loss_sum: Tensor, logprobs: Tensor, entropy: Tensor | None, stats: LossStats
    ) -> None:
        gap = (logprobs - micro_batch.behavior_logprobs)[micro_batch.loss_mask].double()
        entropy_sum = loss_sum.new_zeros(()) if entropy is None else entropy.sum()
        self.scalars += torch.stack([loss_sum.double(), gap.sum(), entropy_sum.double()])
        if gap.numel():
            self.gap_max = torch.maximum(self.gap_max, gap.abs().max())
        self.loss_stats = self.loss_stats + stats

    def reduce(self, policy: PolicyModel) -> _Reduced:
        """Add up over ranks (two small tensor collectives)."""
        vector = torch.cat([self.scalars, self.loss_stats.to_vector()])
        if policy.group is not None:
            dist.all_reduce(vector, group=policy.group)
            dist.all_reduce(self.gap_max, op=dist.ReduceOp.MAX, group=policy.group)
        loss_sum, gap_sum, entropy_sum = vector[:3].tolist()
        stats = LossStats.from_vector(vector[3:]).to_floats()
        return _Reduced(loss_sum, gap_sum, float(self.gap_max), entropy_sum, stats)


def _backward(
    policy: PolicyModel,
    micro_batch: MicroBatch,
    proximal: Tensor | None,
    settings: StepSettings,
    scale: float,
    sums: _Sums,
) -> None:
    logprobs, entropy = _logprobs(policy, micro_batch, with_entropy=settings.with_entropy)
    tokens = LossTokens(
        policy_logprobs=logprobs,
        proximal_logprobs=logprobs.detach() if proximal is None else proximal,
        behavior_logprobs=micro_batch.behavior_logprobs,
        advantages=micro_batch.advantages,
        loss_mask=micro_batch.loss_mask,
    )
    output = settings.loss_fn(tokens, settings.loss_settings)
    # An empty micro-batch must still run backward, or peers hang in FSDP collectives: keep the graph whatever the loss did.
    torch.autograd.backward(output.loss_sum * scale + logprobs[:0].sum())
    sums.add(micro_batch, output.loss_sum, logprobs, entropy, output.stats)


def _logprobs(policy: PolicyModel, micro_batch: MicroBatch, *, with_entropy: bool) -> tuple[Tensor, Tensor | None]:
    return policy.logprobs(
        micro_batch.token_ids,
        micro_batch.position_ids,
        micro_batch.cu_seqlens,
        micro_batch.loss_mask,
        micro_batch.temperatures,
        with_entropy=with_entropy,
    )


def _trained(policy: PolicyModel) -> list[Tensor]:
    return [parameter for parameter in policy.parameters() if parameter.grad is not None]


def _reduce_counts(policy: PolicyModel, micro_batches: Sequence[MicroBatch]) -> _Counts:
    num_tokens = sum(micro_batch.num_tokens for micro_batch in micro_batches)
    num_trained = sum(micro_batch.num_trained for micro_batch in micro_batches)
    count = len(micro_batches)
    if policy.group is None:
        return _Counts(num_tokens, num_trained, count)
    totals = torch.tensor([num_tokens, num_trained, count], device=policy.device)
    extremes = torch.tensor([count, -count], device=policy.device)
    dist.all_reduce(totals, group=policy.group)
    dist.all_reduce(extremes, op=dist.ReduceOp.MAX, group=policy.group)
    most, fewest = int(extremes[0]), -int(extremes[1])
    if most != fewest:
        raise ShapeError(f"ranks have {fewest} to {most} micro-batches; every rank needs the same number (packing.balance)")
    return _Counts(int(totals[0]), int(totals[1]), int(totals[2]))


def _skipped(totals: _Counts, reason: SkipReason, learning_rate: float) -> StepStats:
    nothing = _Reduced(0.0, 0.0, 0.0, 0.0, LossStats.zeros().to_floats())
    return _stats(totals, nothing, reason, learning_rate, 0.0, None)


def _stats(
    totals: _Counts,
    reduced: _Reduced,
    reason: SkipReason | None,
    learning_rate: float,
    grad_norm: float,
    settings: StepSettings | None,
) -> StepStats:
    count = max(totals.num_trained_tokens, 1)
    return StepStats(
        applied=reason is None,
        skip_reason=reason,
        learning_rate=learning_rate,
        loss=reduced.loss_sum / count,
        grad_norm=grad_norm,
        num_tokens=totals.num_tokens,
        num_trained_tokens=totals.num_trained_tokens,
        num_micro_batches=totals.num_micro_batches,
        behavior_gap_max=reduced.gap_max,
        behavior_gap_mean=reduced.gap_sum / count,
        entropy=reduced.entropy_sum / count if settings is not None and settings.with_entropy else None,
        loss_sums=reduced.loss_sums,
    )
