"""One optimizer step: forward and backward over micro-batches, one aggregation over the whole step, clip, AdamW.

Every rank calls with the same number of micro-batches. What a step does is decided from reduced numbers only, so ranks agree.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.utils import clip_grads_with_norm_, get_total_norm
from torch.optim import AdamW

from async_rl.algorithms.aggregation import TOKEN_MEAN, Aggregation, StepCounts, aggregate
from async_rl.algorithms.kl import KlEstimator, KlForm, kl_loss
from async_rl.algorithms.losses import LossFn, LossSettings, LossStats, LossTokens
from async_rl.algorithms.off_policy import OffPolicyReport, off_policy_report
from async_rl.algorithms.proximal import interpolated_logprobs
from async_rl.errors import ShapeError
from async_rl.trainer.packing import MicroBatch
from async_rl.trainer.policy import PolicyModel
from async_rl.trainer.sharding import full_tensor
from async_rl.trainer.token_records import TokenRecords


class SkipReason(StrEnum):
    """Why a step changed nothing: neither weights nor optimizer state, and no version is counted."""

    NO_TOKENS = "no_tokens"  # every token of every rank is masked
    NON_FINITE_LOSS = "non_finite_loss"
    NON_FINITE_GRADIENT = "non_finite_gradient"


@dataclass(frozen=True, slots=True)
class StepStats:
    """What one step did, equal on every rank.

    loss: aggregated over all ranks, the KL term included. grad_norm: before clipping. num_tokens: forward, prompts included.
    off_policy: the policy against the one that sampled. entropy: mean over trained tokens, nats; None unless asked for.
    kl: mean over trained tokens of the KL loss before its coefficient; None without a reference.
    loss_sums: the loss's own sums (LossStats) by name.
    """

    applied: bool
    skip_reason: SkipReason | None
    learning_rate: float
    loss: float
    grad_norm: float
    num_tokens: int
    num_trained_tokens: int
    num_trained_sequences: int
    num_micro_batches: int
    off_policy: OffPolicyReport
    entropy: float | None
    kl: float | None
    loss_sums: Mapping[str, float]


@dataclass(frozen=True, slots=True)
class KlSettings:
    """A KL loss to the reference policy, times `coefficient`, beside the policy loss."""

    coefficient: float
    estimator: KlEstimator = "k3"
    form: KlForm = "unbiased"


@dataclass(frozen=True, slots=True)
class StepSettings:
    """The objective and its limits."""

    loss_fn: LossFn
    loss_settings: LossSettings
    aggregation: Aggregation = TOKEN_MEAN
    kl: KlSettings | None = None
    grad_clip: float = 1.0
    with_entropy: bool = False
    on_micro_batch: Callable[[int], object] = lambda index: None
    """Told after each micro-batch: the step makes progress."""


def make_optimizer(
    model: nn.Module, *, learning_rate: float, betas: tuple[float, float] = (0.9, 0.999), weight_decay: float = 0.0
) -> AdamW:
    """Return AdamW over the float32 master weights. Matrices decay; norms and biases do not."""
    matrices = [p for p in model.parameters() if p.requires_grad and p.dim() >= 2]
    vectors = [p for p in model.parameters() if p.requires_grad and p.dim() < 2]
    groups = [{"params": matrices, "weight_decay": weight_decay}, {"params": vectors, "weight_decay": 0.0}]
    return AdamW([group for group in groups if group["params"]], lr=learning_rate, betas=betas, fused=True)


@dataclass(frozen=True, slots=True, eq=False)
class OtherLogprobs:
    """Logprobs of other policies than the one that trains, [T] per micro-batch.

    proximal: None for the policy itself, detached: right for the first step of a drawn batch. steps_since_proximal: if given,
    proximal logprobs are interpolated by version instead. reference: needed with a KL loss.
    """

    proximal: Sequence[Tensor] | None = None
    steps_since_proximal: int | None = None
    reference: Sequence[Tensor] | None = None


def train_step(
    policy: PolicyModel,
    optimizer: AdamW,
    micro_batches: Sequence[MicroBatch],
    *,
    settings: StepSettings,
    learning_rate: float,
    others: OtherLogprobs | None = None,
) -> StepStats:
    """Apply one step to the policy, or none of it.

    The loss is summed over the trained tokens of all micro-batches and ranks, divided as `settings.aggregation` says by counts
    over all of them. A step without trained tokens, or with a loss or gradient that is not finite, is skipped and says so.
    Raises: ShapeError, on every rank, if ranks have different numbers of micro-batches.
    """
    totals = _reduce_counts(policy, micro_batches)
    if totals.step.num_tokens == 0:
        return _skipped(totals, SkipReason.NO_TOKENS, learning_rate)
    sums = _Sums(policy.device)
    for index, micro_batch in enumerate(micro_batches):
        _backward(policy, micro_batch.to(policy.device), _of(others, index), settings, totals.step, sums)
        settings.on_micro_batch(index)
    gradients = [p.grad for p in policy.parameters() if p.grad is not None]
    norm = full_tensor(get_total_norm(gradients))
    reduced = sums.reduce(policy)
    reason = apply_gradients(
        policy, optimizer, loss=reduced.loss, norm=norm, grad_clip=settings.grad_clip, learning_rate=learning_rate
    )
    return _stats(totals, reduced, reason, learning_rate, float(norm), settings)


def apply_gradients(
    model: nn.Module, optimizer: AdamW, *, loss: float, norm: Tensor, grad_clip: float, learning_rate: float
) -> SkipReason | None:
    """Clip the gradients to grad_clip and step, or drop them and say why: a loss or norm over all ranks that is not finite."""
    reason = None
    if not math.isfinite(loss):
        reason = SkipReason.NON_FINITE_LOSS
    elif not math.isfinite(float(norm)):
        reason = SkipReason.NON_FINITE_GRADIENT
    else:
        clip_grads_with_norm_([p for p in model.parameters() if p.grad is not None], grad_clip, norm)
        for group in optimizer.param_groups:
            group["lr"] = learning_rate
        optimizer.step()
    optimizer.zero_grad(set_to_none=True)
    return reason


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
    step: StepCounts
    num_tokens: int
    num_micro_batches: int


@dataclass(frozen=True, slots=True)
class _Reduced:
    loss: float
    entropy_sum: float
    kl_sum: float
    loss_sums: Mapping[str, float]
    off_policy: OffPolicyReport


@dataclass(frozen=True, slots=True)
class _Others:
    """OtherLogprobs of one micro-batch."""

    proximal: Tensor | None = None
    steps_since_proximal: int | None = None
    reference: Tensor | None = None


def _of(others: OtherLogprobs | None, index: int) -> _Others:
    if others is None:
        return _Others()
    return _Others(
        None if others.proximal is None else others.proximal[index],
        others.steps_since_proximal,
        None if others.reference is None else others.reference[index],
    )


class _Sums:
    """What micro-batches add up, on the device until the end of the step."""

    def __init__(self, device: torch.device) -> None:
        self.scalars = torch.zeros(3, dtype=torch.float64, device=device)  # loss, entropy, KL
        self.loss_stats = LossStats.zeros(device)
        self.tokens = TokenRecords(device)

    @torch.no_grad()
    def add(
        self, micro_batch: MicroBatch, loss: Tensor, logprobs: Tensor, entropy: Tensor | None, kl: Tensor, stats: LossStats
    ) -> None:
        entropy_sum = loss.new_zeros(()) if entropy is None else entropy.sum()
        self.scalars += torch.stack([loss.double(), entropy_sum.double(), kl.sum().double()])
        self.loss_stats = self.loss_stats + stats
        self.tokens.add(micro_batch, logprobs)

    def reduce(self, policy: PolicyModel) -> _Reduced:
        """Add up over ranks, and gather what the off-policy report is made of."""
        vector = torch.cat([self.scalars, self.loss_stats.to_vector()])
        if policy.group is not None:
            dist.all_reduce(vector, group=policy.group)
        loss, entropy_sum, kl_sum = vector[:3].tolist()
        stats = LossStats.from_vector(vector[3:]).to_floats()
        return _Reduced(loss, entropy_sum, kl_sum, stats, self.tokens.report(policy.group))


def _backward(
    policy: PolicyModel,
    micro_batch: MicroBatch,
    others: _Others,
    settings: StepSettings,
    counts: StepCounts,
    sums: _Sums,
) -> None:
    logprobs, entropy = _logprobs(policy, micro_batch, with_entropy=settings.with_entropy)
    tokens = LossTokens(
        policy_logprobs=logprobs,
        proximal_logprobs=_proximal(logprobs, micro_batch, others),
        behavior_logprobs=micro_batch.behavior_logprobs,
        advantages=micro_batch.advantages,
        loss_mask=micro_batch.loss_mask,
        sequence_ids=micro_batch.sequence_ids,
        num_sequences=micro_batch.num_runs,
    )
    output = settings.loss_fn(tokens, settings.loss_settings)
    losses, kl = output.token_losses, torch.zeros_like(logprobs)
    if settings.kl is not None and others.reference is not None:
        kl = kl_loss(others.reference, tokens, estimator=settings.kl.estimator, form=settings.kl.form)
        losses = losses + settings.kl.coefficient * kl
    loss = aggregate(losses, tokens, counts, settings.aggregation)
    # FSDP averages gradients over ranks; the loss is a sum over them. An empty micro-batch must still run backward, or peers
    # hang in FSDP collectives: keep the graph whatever the loss did.
    torch.autograd.backward(loss * policy.num_ranks + logprobs[:0].sum())
    sums.add(micro_batch, loss, logprobs, entropy, kl, output.stats)


def _proximal(logprobs: Tensor, micro_batch: MicroBatch, others: _Others) -> Tensor:
    if others.steps_since_proximal is not None:
        return interpolated_logprobs(
            logprobs, micro_batch.behavior_logprobs, micro_batch.lags, steps_since_proximal=others.steps_since_proximal
        )
    return logprobs.detach() if others.proximal is None else others.proximal


def _logprobs(policy: PolicyModel, micro_batch: MicroBatch, *, with_entropy: bool) -> tuple[Tensor, Tensor | None]:
    return policy.logprobs(
        micro_batch.token_ids,
        micro_batch.position_ids,
        micro_batch.cu_seqlens,
        micro_batch.loss_mask,
        micro_batch.temperatures,
        parents=micro_batch.parents,
        with_entropy=with_entropy,
    )


def _reduce_counts(policy: PolicyModel, micro_batches: Sequence[MicroBatch]) -> _Counts:
    num_tokens = sum(micro_batch.num_tokens for micro_batch in micro_batches)
    num_trained = sum(micro_batch.num_trained for micro_batch in micro_batches)
    num_sequences = sum(micro_batch.num_trained_sequences for micro_batch in micro_batches)
    count = len(micro_batches)
    if policy.group is None:
        return _Counts(StepCounts(num_trained, num_sequences), num_tokens, count)
    totals = torch.tensor([num_tokens, num_trained, num_sequences, count], device=policy.device)
    extremes = torch.tensor([count, -count], device=policy.device)
    dist.all_reduce(totals, group=policy.group)
    dist.all_reduce(extremes, op=dist.ReduceOp.MAX, group=policy.group)
    most, fewest = int(extremes[0]), -int(extremes[1])
    if most != fewest:
        raise ShapeError(f"ranks have {fewest} to {most} micro-batches; every rank needs the same number (packing.balance)")
    return _Counts(StepCounts(int(totals[1]), int(totals[2])), int(totals[0]), int(totals[3]))


def _skipped(totals: _Counts, reason: SkipReason, learning_rate: float) -> StepStats:
    empty = torch.zeros(0)
    nothing = _Reduced(0.0, 0.0, 0.0, LossStats.zeros().to_floats(), off_policy_report(empty, empty.long(), empty.long()))
    return _stats(totals, nothing, reason, learning_rate, 0.0, None)


def _stats(
    totals: _Counts,
    reduced: _Reduced,
    reason: SkipReason | None,
    learning_rate: float,
    grad_norm: float,
    settings: StepSettings | None,
) -> StepStats:
    count = max(totals.step.num_tokens, 1)
    return StepStats(
        applied=reason is None,
        skip_reason=reason,
        learning_rate=learning_rate,
        loss=reduced.loss,
        grad_norm=grad_norm,
        num_tokens=totals.num_tokens,
        num_trained_tokens=totals.step.num_tokens,
        num_trained_sequences=totals.step.num_sequences,
        num_micro_batches=totals.num_micro_batches,
        off_policy=reduced.off_policy,
        entropy=reduced.entropy_sum / count if settings is not None and settings.with_entropy else None,
        kl=reduced.kl_sum / count if settings is not None and settings.kl is not None else None,
        loss_sums=reduced.loss_sums,
    )
