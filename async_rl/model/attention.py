"""Attention over packed sequences: block-diagonal and causal, without padding the rest of the model.

A micro-batch is one row of T tokens, cut into *runs*. Only here do they come apart: runs of similar length share a bucket, are
gathered to a right-padded [n, L] block and go through one batched causal `scaled_dot_product_attention`. Right padding needs
no mask, because no query looks ahead. A padded slot repeats the last token of its own run, so that nothing, not even a
NaN, passes from one sequence to another.

A run may continue another, its *parent*: the completions of a group share one prompt. Its queries then see all of the parent
and their own run up to themselves (a tree of depth two). The parent's keys and values are repeated for its runs here, and only
here: every other layer computes the prompt once.

The implementation is registered with transformers under the name `PACKED`; transformers then builds no mask and hands the
keyword `packed_segments` from the model's forward call down to every attention layer.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor, nn
from torch.autograd.function import FunctionCtx
from torch.nn.functional import scaled_dot_product_attention
from transformers import AttentionInterface

from async_rl.errors import ConfigError, ShapeError

PACKED = "async_rl_packed"
"""Name of this implementation for transformers' `attn_implementation`."""

BUCKET_FRACTION = 0.8
BUCKET_SLACK = 8
"""A sequence joins a bucket of length L if it has at least BUCKET_FRACTION × L − BUCKET_SLACK tokens: at most about a third of
a block is padding, and short sequences share one call."""


@dataclass(frozen=True, slots=True)
class Bucket:
    """`num_sequences` runs padded to `length` slots each.

    prefix_rows: int64 [g, P], the tokens of the g parents that these runs continue (all of P tokens); None: they begin
    sequences. children: runs of each of those parents, in order; they sum to num_sequences.
    """

    num_sequences: int
    length: int
    prefix_rows: Tensor | None = None
    children: tuple[int, ...] = ()

    @property
    def num_slots(self) -> int:
        return self.num_sequences * self.length

    @property
    def prefix_length(self) -> int:
        return 0 if self.prefix_rows is None else self.prefix_rows.shape[1]


@dataclass(frozen=True, slots=True, eq=False)
class PackedSegments:
    """Index maps between T packed tokens and N ≥ T bucket slots, computed once per micro-batch.

    slot_to_token int64 [N]: token that fills a slot (padding repeats the run's last token). token_to_slot int64 [T]: slot of
    each token, a right inverse of slot_to_token. previous int64 [T]: the token before each in its sequence, whose hidden
    state predicts it; −1 where there is none.
    """

    buckets: tuple[Bucket, ...]
    slot_to_token: Tensor
    token_to_slot: Tensor
    previous: Tensor
    masks: dict[tuple[int, int, int], Tensor] = field(default_factory=dict)

    def mask(self, prefix: int, length: int, window: int) -> Tensor:
        """Return bool [length, prefix + length], True where query i of a run, at position prefix + i of its sequence, sees
        position j: prefix + i − window < j ≤ prefix + i."""
        key = (prefix, length, window)
        if key not in self.masks:
            positions = torch.arange(prefix + length, device=self.slot_to_token.device)
            distance = positions[prefix:, None] - positions[None, :]
            self.masks[key] = (distance >= 0) & (distance < window)
        return self.masks[key]


def packed_segments(cu_seqlens: Tensor, device: torch.device | str = "cpu", *, parents: Tensor | None = None) -> PackedSegments:
    """Return the index maps of runs that start at cu_seqlens[:-1] and end at cu_seqlens[1:] (int [R + 1]).

    parents: int [R], the run that each continues, −1 for one that begins a sequence (all of them, if not given).
    Raises: ShapeError unless cu_seqlens starts at 0 and does not decrease, and parents have tokens and no parent themselves.
    """
    bounds = cu_seqlens.detach().cpu().numpy().astype(np.int64)
    lengths = np.diff(bounds)
    if bounds.ndim != 1 or bounds.size == 0 or bounds[0] != 0 or (lengths < 0).any():
        raise ShapeError(f"cu_seqlens={bounds.tolist()} must be one-dimensional, start at 0 and not decrease")
    parent_of = np.full(len(lengths), -1) if parents is None else parents.detach().cpu().numpy().astype(np.int64)
    _require_tree(parent_of, lengths)
    buckets: list[Bucket] = []
    slots: list[npt.NDArray[np.int64]] = []
    token_to_slot = np.empty(int(bounds[-1]), dtype=np.int64)
    num_slots = 0
    for members in _bucket_members(lengths, parent_of):
        starts, sizes, longest = bounds[members], lengths[members], int(lengths[members].max())
        position = np.arange(longest)[None, :]
        tokens = starts[:, None] + np.minimum(position, sizes[:, None] - 1)
        slot = num_slots + np.arange(tokens.size).reshape(tokens.shape)
        real = position < sizes[:, None]
        token_to_slot[tokens[real]] = slot[real]
        slots.append(tokens.ravel())
        buckets.append(_bucket(members, longest, bounds, parent_of, device))
        num_slots += tokens.size
    slot_to_token = np.concatenate(slots) if slots else np.empty(0, dtype=np.int64)
    return PackedSegments(
        buckets=tuple(buckets),
        slot_to_token=torch.from_numpy(slot_to_token).to(device),
        token_to_slot=torch.from_numpy(token_to_slot).to(device),
        previous=torch.from_numpy(_previous(bounds, parent_of)).to(device),
    )


def _require_tree(parent_of: npt.NDArray[np.int64], lengths: npt.NDArray[np.int64]) -> None:
    children = parent_of >= 0
    if parent_of.shape != lengths.shape or (parent_of >= len(lengths)).any():
        raise ShapeError(f"parents={parent_of.tolist()} must name one of {len(lengths)} runs each, or be -1")
    if (parent_of[parent_of[children]] >= 0).any() or (lengths[parent_of[children]] == 0).any():
        raise ShapeError(f"parents={parent_of.tolist()}: a parent must have tokens and begin its sequence")


def _bucket_members(lengths: npt.NDArray[np.int64], parent_of: npt.NDArray[np.int64]) -> list[npt.NDArray[np.int64]]:
    """Runs of each bucket: of similar length, and behind prefixes of one length; siblings beside each other."""
    by_prefix: defaultdict[int, list[int]] = defaultdict(list)
    for run in np.argsort(-lengths, kind="stable"):
        if lengths[run] > 0:
            by_prefix[int(lengths[parent_of[run]]) if parent_of[run] >= 0 else 0].append(int(run))
    buckets = [members for runs in by_prefix.values() for members in _split_by_length(np.array(runs, dtype=np.int64), lengths)]
    return [members[np.argsort(parent_of[members], kind="stable")] for members in buckets]


def _bucket(
    members: npt.NDArray[np.int64],
    longest: int,
    bounds: npt.NDArray[np.int64],
    parent_of: npt.NDArray[np.int64],
    device: torch.device | str,
) -> Bucket:
    if parent_of[members[0]] < 0:
        return Bucket(num_sequences=len(members), length=longest)
    parents, children = np.unique(parent_of[members], return_counts=True)
    prefix = bounds[parents[0] + 1] - bounds[parents[0]]
    rows = torch.from_numpy(bounds[parents][:, None] + np.arange(prefix)[None, :]).to(device)
    return Bucket(len(members), longest, prefix_rows=rows, children=tuple(children.tolist()))


def _previous(bounds: npt.NDArray[np.int64], parent_of: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
    previous = np.arange(-1, bounds[-1] - 1)
    starts, filled = bounds[:-1], bounds[:-1] < bounds[1:]
    last_of_parent = np.where(parent_of >= 0, bounds[parent_of + 1] - 1, -1)
    previous[starts[filled]] = last_of_parent[filled]
    return previous


def _split_by_length(order: npt.NDArray[np.int64], lengths: npt.NDArray[np.int64]) -> Sequence[npt.NDArray[np.int64]]:
    """Cut runs, sorted by falling length, into buckets."""
    cuts = []
    longest = 0
    for rank, run in enumerate(order):
        if rank == 0 or lengths[run] < BUCKET_FRACTION * longest - BUCKET_SLACK:
            longest = int(lengths[run])
            cuts.append(rank)
    return [members for members in np.split(order, cuts[1:]) if members.size]


class _ToSlots(torch.autograd.Function):
    """Gather token rows into slots. No gradient reaches a padded slot, so the backward pass is a gather too (no atomics)."""

    @staticmethod
    def forward(ctx: FunctionCtx, rows: Tensor, slot_to_token: Tensor, token_to_slot: Tensor) -> Tensor:
        ctx.save_for_backward(token_to_slot)
        return rows.index_select(0, slot_to_token)

    @staticmethod
    def backward(ctx: FunctionCtx, *grads: Tensor) -> tuple[Tensor, None, None]:
        (token_to_slot,) = ctx.saved_tensors  # type: ignore[attr-defined]  # set by save_for_backward, absent from the stub
        return grads[0].index_select(0, token_to_slot), None, None


class _ToTokens(torch.autograd.Function):
    """Gather slots back into token rows; padded slots get a zero gradient."""

    @staticmethod
    def forward(ctx: FunctionCtx, slots: Tensor, token_to_slot: Tensor) -> Tensor:
        ctx.save_for_backward(token_to_slot)
        ctx.num_slots = slots.shape[0]  # type: ignore[attr-defined]  # plain attributes are the documented way
        return slots.index_select(0, token_to_slot)

    @staticmethod
    def backward(ctx: FunctionCtx, *grads: Tensor) -> tuple[Tensor, None]:
        (token_to_slot,) = ctx.saved_tensors  # type: ignore[attr-defined]
        slots = grads[0].new_zeros(ctx.num_slots, *grads[0].shape[1:])  # type: ignore[attr-defined]
        return slots.index_copy_(0, token_to_slot, grads[0]), None


class _ToChildren(torch.autograd.Function):
    """Repeat each of g parents for its children, [g, …] → [n, …]; children of one parent lie beside each other. The backward
    pass adds them up in a fixed order (no atomics)."""

    @staticmethod
    def forward(ctx: FunctionCtx, parents: Tensor, children: tuple[int, ...]) -> Tensor:
        ctx.children = children  # type: ignore[attr-defined]
        return parents.repeat_interleave(torch.tensor(children, device=parents.device), dim=0)

    @staticmethod
    def backward(ctx: FunctionCtx, *grads: Tensor) -> tuple[Tensor, None]:
        parts = torch.split(grads[0], list(ctx.children))  # type: ignore[attr-defined]
        return torch.stack([part.sum(dim=0) for part in parts]), None


def packed_attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    *,
    scaling: float | None = None,
    sliding_window: int | None = None,
    softcap: float | None = None,
    packed_segments: PackedSegments | None = None,
    s_aux: Tensor | None = None,
    **_: object,
) -> tuple[Tensor, None]:
    """Attention of packed sequences in transformers' calling convention.

    query [1, H, T, D], key and value [1, K, T, D] with H a multiple of K; returns [1, T, H, D]. Dropout is never applied: the
    trainer must compute the distribution that the engine samples from.
    Raises: ConfigError if the model does not hand on `packed_segments`, or needs what is not implemented here.
    """
    if packed_segments is None:
        raise ConfigError(f"{type(module).__name__} does not pass keyword arguments to attention; it cannot run packed")
    if s_aux is not None or not getattr(module, "is_causal", True):
        raise ConfigError(f"{type(module).__name__} uses attention sinks or is not causal; it cannot run packed")
    if query.shape[0] != 1 or query.shape[2] != packed_segments.token_to_slot.shape[0]:
        raise ShapeError(f"query {tuple(query.shape)} does not hold one row of {packed_segments.token_to_slot.shape[0]} tokens")
    q, k, v = (_to_slots(x, packed_segments) for x in (query, key, value))
    outputs = []
    offset = 0
    for bucket in packed_segments.buckets:
        block = slice(offset, offset + bucket.num_slots)
        mask, total = None, bucket.prefix_length + bucket.length
        if bucket.prefix_length or (sliding_window is not None and total > sliding_window):
            mask = packed_segments.mask(bucket.prefix_length, bucket.length, sliding_window or total)
        q_block, k_block, v_block = (_block(x[block], bucket) for x in (q, k, v))
        if bucket.prefix_rows is not None:
            k_block = torch.cat((_prefix(key, bucket), k_block), dim=2)
            v_block = torch.cat((_prefix(value, bucket), v_block), dim=2)
        out = _attend(q_block, k_block, v_block, mask=mask, scaling=scaling, softcap=softcap)
        outputs.append(out.transpose(1, 2).reshape(bucket.num_slots, out.shape[1], out.shape[3]))
        offset += bucket.num_slots
    slots = outputs[0] if len(outputs) == 1 else torch.cat(outputs)
    to_tokens: Callable[..., Tensor] = _ToTokens.apply
    return to_tokens(slots, packed_segments.token_to_slot)[None], None


def _to_slots(heads: Tensor, segments: PackedSegments) -> Tensor:
    """[1, H, T, D] → [N, H, D]"""
    to_slots: Callable[..., Tensor] = _ToSlots.apply
    return to_slots(heads[0].transpose(0, 1), segments.slot_to_token, segments.token_to_slot)


def _block(slots: Tensor, bucket: Bucket) -> Tensor:
    """[n × L, H, D] → [n, H, L, D]"""
    return slots.view(bucket.num_sequences, bucket.length, *slots.shape[1:]).transpose(1, 2)


def _prefix(heads: Tensor, bucket: Bucket) -> Tensor:
    """Keys or values [1, K, T, D] of the parents, for each run that continues one: [n, K, P, D]."""
    assert bucket.prefix_rows is not None
    parents, length = bucket.prefix_rows.shape
    rows = heads[0].index_select(1, bucket.prefix_rows.flatten())
    blocks = rows.view(rows.shape[0], parents, length, rows.shape[2]).transpose(0, 1)
    to_children: Callable[..., Tensor] = _ToChildren.apply
    return to_children(blocks, bucket.children)


def _attend(q: Tensor, k: Tensor, v: Tensor, *, mask: Tensor | None, scaling: float | None, softcap: float | None) -> Tensor:
    """Causal attention of [n, H, L, D] queries; `mask` [L, keys], if given, replaces the causal one."""
    grouped = q.shape[1] != k.shape[1]
    if softcap is None:
        return scaled_dot_product_attention(q, k, v, attn_mask=mask, is_causal=mask is None, scale=scaling, enable_gqa=grouped)
    if grouped:
        k, v = (x.repeat_interleave(q.shape[1] // x.shape[1], dim=1) for x in (k, v))
    length, scale = q.shape[2], q.shape[3] ** -0.5 if scaling is None else scaling
    if mask is None:
        mask = torch.ones(length, length, dtype=torch.bool, device=q.device).tril()
    scores = softcap * torch.tanh(torch.matmul(q, k.transpose(2, 3)) * scale / softcap)
    scores = scores.masked_fill(~mask, float("-inf"))
    weights = torch.softmax(scores, dim=-1, dtype=torch.promote_types(scores.dtype, torch.float32))
    return torch.matmul(weights.to(v.dtype), v)


AttentionInterface.register(PACKED, packed_attention)
