"""Packing: sequences laid end to end, without padding, into micro-batches of bounded size; a group's prompt once.

**Alignment, decided here once.** Every [T] array of a micro-batch is indexed by the token it belongs to: position t of
loss_mask, behavior_logprobs, advantages, lags and temperatures speaks of token_ids[t], and so does position t of the policy's
logprobs, the logprob of token t given the tokens before it *in its sequence*. A forward pass predicts a token from the hidden
state of the one before it (`PackedSegments.previous`); whoever computes logprobs does that shift and nobody else does. The
first token of a sequence is never trained, so no loss term crosses a boundary.

**Shared prompts.** Samples of one task begin with the same tokens. The longest beginning that they have in common, up to the
first trained token, becomes a run of its own, and what follows in each sample a run that continues it: same positions, same
attention, same logprobs and gradients, but each prompt is computed once. In the loss only the continuing runs count.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from async_rl.errors import ShapeError
from async_rl.trainer.samples import TrainingSample


@dataclass(frozen=True, slots=True, eq=False)
class MicroBatch:
    """What one forward and backward pass takes: T tokens in R runs.

    token_ids int64 [T]; position_ids int64 [T], each token's place in its sequence; cu_seqlens int32 [R + 1], run r is
    [cu_seqlens[r], cu_seqlens[r + 1]); parents int32 [R], the run that it continues, or −1; sequence_ids int64 [T], the run of
    each token; loss_mask bool [T]; behavior_logprobs, advantages, temperatures float32 [T]; lags int32 [T], versions between a
    trained token and the policy. sample_indices, sample_runs: per sample, its index in the list that was packed and the run
    that its trained tokens are in. num_trained, num_trained_sequences: trained tokens, and runs with at least one.

    A filler (`filler_micro_batch`) has one untrained token and no sample_indices: it runs like any other, and adds 0.
    """

    token_ids: Tensor
    position_ids: Tensor
    cu_seqlens: Tensor
    parents: Tensor
    sequence_ids: Tensor
    loss_mask: Tensor
    behavior_logprobs: Tensor
    advantages: Tensor
    temperatures: Tensor
    lags: Tensor
    sample_indices: tuple[int, ...]
    sample_runs: tuple[int, ...]
    num_trained: int
    num_trained_sequences: int

    @property
    def num_tokens(self) -> int:
        """Tokens of real sequences (0 for a filler), shared ones once."""
        return len(self.token_ids) if self.sample_indices else 0

    @property
    def num_runs(self) -> int:
        return len(self.parents)

    def to(self, device: torch.device | str) -> MicroBatch:
        """Return the micro-batch with its tensors on `device`."""
        values = {f.name: getattr(self, f.name) for f in fields(self)}
        moved: dict[str, Any] = {k: v.to(device, non_blocking=True) for k, v in values.items() if isinstance(v, Tensor)}
        return replace(self, **moved)


@dataclass(frozen=True, slots=True)
class _Unit:
    """Samples that stay together: members of a task behind `prefix` shared tokens, or one sample alone (prefix 0)."""

    members: tuple[int, ...]
    prefix: int
    num_tokens: int


def pack(samples: Sequence[TrainingSample], max_tokens: int, *, share_prompts: bool = False) -> list[MicroBatch]:
    """Return micro-batches of at most `max_tokens` tokens that hold every sample once, whole and unpadded.

    First-fit decreasing, ties in the order of `samples`: a function of the samples and their order alone, so a replay
    packs alike. Within a micro-batch, samples keep the order of `samples` as far as they need not stay together. A sample
    longer than max_tokens gets a micro-batch of its own; a group that is, is cut, and its prompt computed once in each part.
    Raises: ValueError if max_tokens is below 1.
    """
    if max_tokens < 1:
        raise ValueError(f"max_tokens={max_tokens}: must be at least 1")
    return _pack_units(samples, _units(samples, max_tokens, share_prompts), max_tokens)


def balance(
    samples: Sequence[TrainingSample], max_tokens: int, world_size: int, *, share_prompts: bool = False
) -> list[list[MicroBatch]]:
    """Return one list of micro-batches per rank, all of equal length, that together hold every sample once.

    Longest first to the rank with the fewest tokens; each rank then packs its own. Groups that share a prompt stay together
    unless one is more than a rank's fair share. Ranks that need fewer micro-batches get
    fillers at the end: an empty micro-batch must still run backward, or peers hang in FSDP collectives. Without any sample
    the lists are empty. sample_indices refer to `samples`. Deterministic, so every rank can compute it for itself.
    Raises: ValueError if max_tokens or world_size is below 1.
    """
    if max_tokens < 1 or world_size < 1:
        raise ValueError(f"max_tokens={max_tokens}, world_size={world_size}: both must be at least 1")
    units = _units(samples, max_tokens, share_prompts)
    if world_size > 1:
        fair_share = -(-sum(unit.num_tokens for unit in units) // world_size)
        units = _units(samples, min(max_tokens, max(fair_share, 1)), share_prompts)
    ranks = [
        _pack_units(samples, [units[i] for i in indices], max_tokens)
        for indices in _spread([unit.num_tokens for unit in units], world_size)
    ]
    count = max(len(micro_batches) for micro_batches in ranks)
    return [micro_batches + [filler_micro_batch()] * (count - len(micro_batches)) for micro_batches in ranks]


def filler_micro_batch() -> MicroBatch:
    """Return a micro-batch of one token that is not trained: a rank without work runs it to keep its peers company."""
    return MicroBatch(
        token_ids=torch.zeros(1, dtype=torch.int64),
        position_ids=torch.zeros(1, dtype=torch.int64),
        cu_seqlens=torch.tensor([0, 1], dtype=torch.int32),
        parents=torch.tensor([-1], dtype=torch.int32),
        sequence_ids=torch.zeros(1, dtype=torch.int64),
        loss_mask=torch.zeros(1, dtype=torch.bool),
        behavior_logprobs=torch.zeros(1),
        advantages=torch.zeros(1),
        temperatures=torch.ones(1),
        lags=torch.zeros(1, dtype=torch.int32),
        sample_indices=(),
        sample_runs=(),
        num_trained=0,
        num_trained_sequences=0,
    )


def unpack(micro_batches: Sequence[MicroBatch], values: Sequence[Tensor]) -> dict[int, Tensor]:
    """Return per-token values, one [T, …] tensor per micro-batch, by sample index: [len(sample), …] each.

    Raises: ShapeError if a tensor has another length than its micro-batch.
    """
    by_sample: dict[int, Tensor] = {}
    for micro_batch, values_T in zip(micro_batches, values, strict=True):
        if len(values_T) != len(micro_batch.token_ids):
            raise ShapeError(f"{len(values_T)} values for a micro-batch of {len(micro_batch.token_ids)} tokens")
        bounds, parents = micro_batch.cu_seqlens.tolist(), micro_batch.parents.tolist()
        for run, index in zip(micro_batch.sample_runs, micro_batch.sample_indices, strict=True):
            own, parent = values_T[bounds[run] : bounds[run + 1]], parents[run]
            by_sample[index] = own if parent < 0 else torch.cat((values_T[bounds[parent] : bounds[parent + 1]], own))
    return by_sample


def lay_out(micro_batch: MicroBatch, values: Mapping[int, Tensor]) -> Tensor:
    """Return values of samples, by sample index, as the micro-batch lays them out: float32 [T] on their device.

    The inverse of `unpack` where sequences continue a shared prompt; the prompt itself, which no loss reads, gets 0.
    """
    device = next((value.device for value in values.values()), torch.device("cpu"))
    rows = torch.zeros(len(micro_batch.token_ids), device=device)
    bounds = micro_batch.cu_seqlens.tolist()
    for run, index in zip(micro_batch.sample_runs, micro_batch.sample_indices, strict=True):
        length = bounds[run + 1] - bounds[run]
        rows[bounds[run] : bounds[run + 1]] = values[index][-length:]
    return rows


def _units(samples: Sequence[TrainingSample], max_tokens: int, share_prompts: bool) -> list[_Unit]:
    if not share_prompts:
        return [_Unit((index,), 0, len(sample)) for index, sample in enumerate(samples)]
    tasks: dict[str, list[int]] = {}
    for index, sample in enumerate(samples):
        tasks.setdefault(sample.task_id, []).append(index)
    return [unit for members in tasks.values() for unit in _share(samples, members, max_tokens)]


def _share(samples: Sequence[TrainingSample], members: Sequence[int], max_tokens: int) -> list[_Unit]:
    """Members of one task behind their common prompt, in parts of at most max_tokens tokens."""
    prefix = _common_prefix([samples[index] for index in members])
    if prefix == 0 or len(members) == 1:
        return [_Unit((index,), 0, len(samples[index])) for index in members]
    parts: list[list[int]] = []
    room = 0
    for index in members:
        own = len(samples[index]) - prefix
        if own > room:
            parts.append([])
            room = max_tokens - prefix
        parts[-1].append(index)
        room -= own
    return [
        _Unit(tuple(part), prefix if len(part) > 1 else 0, prefix + sum(len(samples[index]) - prefix for index in part))
        for part in parts
    ]


def _common_prefix(samples: Sequence[TrainingSample]) -> int:
    """Tokens that all samples begin with, none of them trained, and at least one of each left behind them."""
    first = samples[0].token_ids
    limit = min(min(len(sample) - 1, int(sample.loss_mask.argmax()) or len(sample) - 1) for sample in samples)
    for sample in samples[1:]:
        differing = np.flatnonzero(sample.token_ids[:limit] != first[:limit])
        limit = int(differing[0]) if differing.size else limit
    return limit


def _pack_units(samples: Sequence[TrainingSample], units: Sequence[_Unit], max_tokens: int) -> list[MicroBatch]:
    bins = _first_fit_decreasing([unit.num_tokens for unit in units], max_tokens)
    return [_concatenate(samples, [units[index] for index in members]) for members in bins]


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


@dataclass(frozen=True, slots=True)
class _Run:
    """Tokens [start, end) of a sample, continuing the run `parent` (−1: none)."""

    sample: int
    start: int
    end: int
    parent: int


def _runs(samples: Sequence[TrainingSample], units: Sequence[_Unit]) -> tuple[list[_Run], list[tuple[int, int]]]:
    """The runs of a micro-batch, and (sample, its run) of each sample."""
    runs: list[_Run] = []
    places: list[tuple[int, int]] = []
    for unit in units:
        parent = -1
        if unit.prefix:
            parent = len(runs)
            runs.append(_Run(unit.members[0], 0, unit.prefix, -1))
        for index in unit.members:
            places.append((index, len(runs)))
            runs.append(_Run(index, unit.prefix, len(samples[index]), parent))
    return runs, places


def _concatenate(samples: Sequence[TrainingSample], units: Sequence[_Unit]) -> MicroBatch:
    runs, places = _runs(samples, units)

    def joined(name: str) -> Tensor:
        return torch.from_numpy(np.concatenate([getattr(samples[run.sample], name)[run.start : run.end] for run in runs]))

    lengths = np.array([run.end - run.start for run in runs], dtype=np.int32)
    loss_mask = joined("loss_mask")
    temperatures = np.array([samples[run.sample].temperature for run in runs], dtype=np.float32)
    return MicroBatch(
        token_ids=joined("token_ids").long(),
        position_ids=torch.from_numpy(np.concatenate([np.arange(run.start, run.end, dtype=np.int64) for run in runs])),
        cu_seqlens=torch.from_numpy(np.concatenate(([0], np.cumsum(lengths))).astype(np.int32)),
        parents=torch.tensor([run.parent for run in runs], dtype=torch.int32),
        sequence_ids=torch.from_numpy(np.repeat(np.arange(len(runs), dtype=np.int64), lengths)),
        loss_mask=loss_mask,
        behavior_logprobs=joined("behavior_logprobs"),
        advantages=joined("advantages"),
        temperatures=torch.from_numpy(np.repeat(temperatures, lengths)),
        lags=joined("lags"),
        sample_indices=tuple(index for index, _ in places),
        sample_runs=tuple(run for _, run in places),
        num_trained=int(loss_mask.sum()),
        num_trained_sequences=sum(bool(samples[index].loss_mask.any()) for index, _ in places),
    )
