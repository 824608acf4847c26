"""Packing: sequences laid end to end, without padding, into micro-batches of bounded size.

**Alignment, decided here once.** Every [T] array of a micro-batch is indexed by the token it belongs to: position t of
loss_mask, behavior_logprobs, advantages and temperatures speaks of token_ids[t], and so does position t of the policy's
logprobs, the logprob of token t given the tokens before it *in its sequence*. A forward pass predicts token t from the
hidden state at t − 1; whoever computes logprobs does that shift and nobody else does. The first token of a sequence is never
trained, so for every trained t, t − 1 lies in the same sequence: no loss term crosses a boundary.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch
from torch import Tensor

from async_rl.errors import ShapeError
from async_rl.trainer.samples import TrainingSample


@dataclass(frozen=True, slots=True, eq=False)
class MicroBatch:
    """What one forward and backward pass takes: T tokens of S sequences.

    token_ids int64 [T]; position_ids int64 [T], restarting at 0 in each sequence; cu_seqlens int32 [S + 1], sequence s is
    [cu_seqlens[s], cu_seqlens[s + 1]); loss_mask bool [T]; behavior_logprobs, advantages, temperatures float32 [T].
    sample_indices: per sequence, its index in the list that was packed. max_seqlen: tokens of the longest sequence.

    A filler (`filler_micro_batch`) has one untrained token and no sample_indices: it runs like any other, and adds 0.
    """

    token_ids: Tensor
    position_ids: Tensor
    cu_seqlens: Tensor
    loss_mask: Tensor
    behavior_logprobs: Tensor
    advantages: Tensor
    temperatures: Tensor
    sample_indices: tuple[int, ...]
    max_seqlen: int
    num_trained: int

    @property
    def num_tokens(self) -> int:
        """Tokens of real sequences (0 for a filler)."""
        return len(self.token_ids) if self.sample_indices else 0

    def to(self, device: torch.device | str) -> MicroBatch:
        """Return the micro-batch with its tensors on `device`."""
        return replace(
            self,
            token_ids=self.token_ids.to(device, non_blocking=True),
            position_ids=self.position_ids.to(device, non_blocking=True),
            cu_seqlens=self.cu_seqlens.to(device, non_blocking=True),
            loss_mask=self.loss_mask.to(device, non_blocking=True),
            behavior_logprobs=self.behavior_logprobs.to(device, non_blocking=True),
            advantages=self.advantages.to(device, non_blocking=True),
            temperatures=self.temperatures.to(device, non_blocking=True),
        )


def pack(samples: Sequence[TrainingSample], max_tokens: int) -> list[MicroBatch]:
    """Return micro-batches of at most `max_tokens` tokens that hold every sample once, whole and unpadded.

    First-fit decreasing, ties in the order of `samples`: a function of the samples' lengths and order alone, so a replay
    packs alike. Within a micro-batch, sequences keep the order of `samples`. A sample longer than max_tokens gets a
    micro-batch of its own.
    Raises: ValueError if max_tokens is below 1.
    """
    if max_tokens < 1:
        raise ValueError(f"max_tokens={max_tokens}: must be at least 1")
    return [_concatenate(samples, indices) for indices in _first_fit_decreasing([len(s) for s in samples], max_tokens)]


def balance(samples: Sequence[TrainingSample], max_tokens: int, world_size: int) -> list[list[MicroBatch]]:
    """Return one list of micro-batches per rank, all of equal length, that together hold every sample once.

    Longest first to the rank with the fewest tokens; each rank then packs its own. Ranks that need fewer micro-batches get
    fillers at the end: an empty micro-batch must still run backward, or peers hang in FSDP collectives. Without any sample
    the lists are empty. sample_indices refer to `samples`. Deterministic, so every rank can compute it for itself.
    Raises: ValueError if max_tokens or world_size is below 1.
    """
    if world_size < 1:
        raise ValueError(f"world_size={world_size}: must be at least 1")
    ranks: list[list[MicroBatch]] = []
    for indices in _spread([len(s) for s in samples], world_size):
        micro_batches = pack([samples[i] for i in indices], max_tokens)
        ranks.append([replace(m, sample_indices=tuple(indices[i] for i in m.sample_indices)) for m in micro_batches])
    count = max(len(micro_batches) for micro_batches in ranks)
    return [micro_batches + [filler_micro_batch()] * (count - len(micro_batches)) for micro_batches in ranks]


def filler_micro_batch() -> MicroBatch:
    """Return a micro-batch of one token that is not trained: a rank without work runs it to keep its peers company."""
    return MicroBatch(
        token_ids=torch.zeros(1, dtype=torch.int64),
        position_ids=torch.zeros(1, dtype=torch.int64),
        cu_seqlens=torch.tensor([0, 1], dtype=torch.int32),
        loss_mask=torch.zeros(1, dtype=torch.bool),
        behavior_logprobs=torch.zeros(1),
        advantages=torch.zeros(1),
        temperatures=torch.ones(1),
        sample_indices=(),
        max_seqlen=1,
        num_trained=0,
    )


def unpack(micro_batches: Sequence[MicroBatch], values: Sequence[Tensor]) -> dict[int, Tensor]:
    """Return per-token values, one [T, …] tensor per micro-batch, by sample index: a [len(sample), …] view each.

    Raises: ShapeError if a tensor has another length than its micro-batch.
    """
    by_sample: dict[int, Tensor] = {}
    for micro_batch, values_T in zip(micro_batches, values, strict=True):
        if len(values_T) != len(micro_batch.token_ids):
            raise ShapeError(f"{len(values_T)} values for a micro-batch of {len(micro_batch.token_ids)} tokens")
        bounds = micro_batch.cu_seqlens.tolist()
        for sequence, index in enumerate(micro_batch.sample_indices):
            by_sample[index] = values_T[bounds[sequence] : bounds[sequence + 1]]
    return by_sample


def _first_fit_decreasing(lengths: Sequence[int], max_tokens: int) -> list[list[int]]:
    bins: list[list[int]] = []
    room: list[int] = []
    for index in _longest_first(lengths):
        length = lengths[index]
        target = next((b for b, free in enumerate(room) if free >= length), None)
        if target is None:
            bins.append([index])
            room.append(max_tokens - length)
        else:
            bins[target].append(index)
            room[target] -= length
    return [sorted(members) for members in bins]


def _spread(lengths: Sequence[int], world_size: int) -> list[list[int]]:
    """Indices per rank, ascending; longest first to the rank with the fewest tokens, the lowest of equals."""
    ranks: list[list[int]] = [[] for _ in range(world_size)]
    tokens = [0] * world_size
    for index in _longest_first(lengths):
        rank = tokens.index(min(tokens))
        ranks[rank].append(index)
        tokens[rank] += lengths[index]
    return [sorted(members) for members in ranks]


def _longest_first(lengths: Sequence[int]) -> list[int]:
    return sorted(range(len(lengths)), key=lambda index: -lengths[index])  # stable: ties stay in order


def _concatenate(samples: Sequence[TrainingSample], indices: Sequence[int]) -> MicroBatch:
    members = [samples[index] for index in indices]
    lengths = np.array([len(member) for member in members], dtype=np.int32)
    cu_seqlens = np.concatenate((np.zeros(1, dtype=np.int32), np.cumsum(lengths, dtype=np.int32)))
    loss_mask = np.concatenate([member.loss_mask for member in members])
    token_ids = np.concatenate([member.token_ids for member in members]).astype(np.int64)
    temperatures = np.array([member.temperature for member in members], dtype=np.float32)
    starts = np.repeat(cu_seqlens[:-1], lengths)
    return MicroBatch(
        token_ids=torch.from_numpy(token_ids),
        position_ids=torch.from_numpy(np.arange(len(token_ids), dtype=np.int64) - starts),
        cu_seqlens=torch.from_numpy(cu_seqlens),
        loss_mask=torch.from_numpy(loss_mask),
        behavior_logprobs=torch.from_numpy(np.concatenate([member.behavior_logprobs for member in members])),
        advantages=torch.from_numpy(np.concatenate([member.advantages for member in members])),
        temperatures=torch.from_numpy(np.repeat(temperatures, lengths)),
        sample_indices=tuple(indices),
        max_seqlen=int(lengths.max()),
        num_trained=int(np.count_nonzero(loss_mask)),
    )
