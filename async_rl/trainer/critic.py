"""The critic of one rank: value model, optimizer, schedule; its values, and what it learns from a step.

It takes the micro-batches of the policy's step, after it, and only if that step was applied.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn.utils import get_total_norm

from async_rl.algorithms.value import clipped_value_loss
from async_rl.config.run import RunConfig
from async_rl.trainer.packing import MicroBatch
from async_rl.trainer.schedule import Schedule
from async_rl.trainer.sharding import full_tensor
from async_rl.trainer.step import SkipReason, apply_gradients, make_optimizer
from async_rl.trainer.value_model import ValueModel


@dataclass(frozen=True, slots=True, eq=False)
class MicroBatchTargets:
    """Of one micro-batch, float32 [T] each, 0 where not trained."""

    old_values: Tensor
    returns: Tensor


@dataclass(frozen=True, slots=True)
class CriticStats:
    """What the critic's updates on one step did, equal on every rank.

    loss, grad_norm: of the first update, mean over trained tokens. clipped_share: of the last one's tokens.
    """

    num_updates: int
    skip_reason: SkipReason | None
    learning_rate: float
    loss: float
    grad_norm: float
    clipped_share: float


@dataclass(frozen=True, slots=True)
class _Update:
    loss: float
    grad_norm: float
    num_clipped: float
    skip_reason: SkipReason | None


class Critic:
    """Every rank makes one, and calls the same methods with as many micro-batches."""

    def __init__(self, model: ValueModel, config: RunConfig) -> None:
        trainer, critic = config.trainer, config.critic
        self.model = model
        self.optimizer = make_optimizer(
            model, learning_rate=critic.learning_rate, betas=trainer.betas, weight_decay=trainer.weight_decay
        )
        self._schedule = Schedule.from_config(trainer, critic.learning_rate)
        self._clip = critic.value_clip
        self._grad_clip = trainer.grad_clip
        self._num_updates = critic.updates_per_step

    @torch.no_grad()
    def values(
        self, micro_batches: Sequence[MicroBatch], *, on_micro_batch: Callable[[int], object] = lambda index: None
    ) -> list[Tensor]:
        """Return the values before trained tokens per micro-batch ([T], 0 elsewhere)."""
        results = []
        for index, micro_batch in enumerate(micro_batches):
            results.append(self.model.values(micro_batch))
            on_micro_batch(index)
        return results

    def learn(
        self,
        micro_batches: Sequence[MicroBatch],
        targets: Sequence[MicroBatchTargets],
        *,
        num_tokens: int,
        step: int,
        on_micro_batch: Callable[[int], object] = lambda index: None,
    ) -> CriticStats:
        """Take critic.updates_per_step optimizer steps towards the returns; num_tokens trained tokens over all ranks.

        step: of the policy, from 1. An update whose loss or gradient is not finite changes nothing, and is the last.
        """
        learning_rate = self._schedule.learning_rate(step)
        updates: list[_Update] = []
        while len(updates) < self._num_updates and (not updates or updates[-1].skip_reason is None):
            updates.append(self._update(micro_batches, targets, num_tokens, learning_rate, on_micro_batch))
        return CriticStats(
            num_updates=sum(update.skip_reason is None for update in updates),
            skip_reason=updates[-1].skip_reason,
            learning_rate=learning_rate,
            loss=updates[0].loss,
            grad_norm=updates[0].grad_norm,
            clipped_share=updates[-1].num_clipped / num_tokens,
        )

    def _update(
        self,
        micro_batches: Sequence[MicroBatch],
        targets: Sequence[MicroBatchTargets],
        num_tokens: int,
        learning_rate: float,
        on_micro_batch: Callable[[int], object],
    ) -> _Update:
        model = self.model
        sums = torch.zeros(2, dtype=torch.float64, device=model.device)  # loss, clipped tokens
        for index, (micro_batch, target) in enumerate(zip(micro_batches, targets, strict=True)):
            own = micro_batch.to(model.device)
            values = model.values(own)
            losses, clipped = clipped_value_loss(
                values, target.old_values.to(model.device), target.returns.to(model.device), own.loss_mask, clip=self._clip
            )
            loss = losses.sum() / num_tokens
            # A sum over ranks, which FSDP averages; an empty micro-batch runs backward too, or peers would hang.
            torch.autograd.backward(loss * model.num_ranks + values[:0].sum())
            sums += torch.stack([loss.detach().double(), clipped.sum().double()])
            on_micro_batch(index)
        norm = full_tensor(get_total_norm([p.grad for p in model.parameters() if p.grad is not None]))
        if model.group is not None:
            dist.all_reduce(sums, group=model.group)
        value_loss, num_clipped = sums.tolist()
        reason = apply_gradients(
            model, self.optimizer, loss=value_loss, norm=norm, grad_clip=self._grad_clip, learning_rate=learning_rate
        )
        return _Update(value_loss, float(norm), num_clipped, reason)
