"""Attention over packed sequences: block-diagonal and causal, without padding the rest of the model.

A micro-batch is one row of T tokens. Only here do its sequences come apart: sequences of similar length share a bucket, are
gathered to a right-padded [n, L] block and go through one batched causal `scaled_dot_product_attention`. Right padding needs
no mask, because no query looks ahead. A padded slot repeats the last token of its own sequence, so that nothing, not even a
NaN, passes from one sequence to another.

The implementation is registered with transformers under the name `PACKED`; transformers then builds no mask and hands the
keyword `packed_segments` from the model's forward call down to every attention layer.
"""

from __future__ import annotations

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
    """`num_sequences` sequences padded to `length` slots each."""

    num_sequences: int
    length: int

    @property
    def num_slots(self) -> int:
        return self.num_sequences * self.length


@dataclass(frozen=True, slots=True, eq=False)
class PackedSegments:
    """Index maps between T packed tokens and N ≥ T bucket slots, computed once per micro-batch.

    slot_to_token int64 [N]: token that fills a slot (padding repeats the sequence's last token).
    token_to_slot int64 [T]: slot of each token, a right inverse of slot_to_token.
    """

    buckets: tuple[Bucket, ...]
    slot_to_token: Tensor
    token_to_slot: Tensor
    window_masks: dict[tuple[int, int], Tensor] = field(default_factory=dict)

    def window_mask(self, length: int, window: int) -> Tensor:
        """Return bool [length, length], True where query i sees key j: i − window < j ≤ i."""
        key = (length, window)
        if key not in self.window_masks:
            position = torch.arange(length, device=self.slot_to_token.device)
            distance = position[:, None] - position[None, :]
            self.window_masks[key] = (distance >= 0) & (distance < window)
        return self.window_masks[key]


def packed_segments(cu_seqlens: Tensor, device: torch.device | str = "cpu") -> PackedSegments:
    """Return the index maps of sequences that start at cu_seqlens[:-1] and end at cu_seqlens[1:] (int [S + 1]).

    Raises: ShapeError unless cu_seqlens starts at 0 and does not decrease.
    """
    bounds = cu_seqlens.detach().cpu().numpy().astype(np.int64)
    lengths = np.diff(bounds)
    if bounds.ndim != 1 or bounds.size == 0 or bounds[0] != 0 or (lengths < 0).any():
        raise ShapeError(f"cu_seqlens={bounds.tolist()} must be one-dimensional, start at 0 and not decrease")
    order = np.argsort(-lengths, kind="stable")
    order = order[lengths[order] > 0]
    buckets: list[Bucket] = []
    slots: list[npt.NDArray[np.int64]] = []
    token_to_slot = np.empty(int(bounds[-1]), dtype=np.int64)
    num_slots = 0
    for members in _split_by_length(order, lengths):
        starts, sizes, longest = bounds[members], lengths[members], int(lengths[members[0]])
        position = np.arange(longest)[None, :]
        tokens = starts[:, None] + np.minimum(position, sizes[:, None] - 1)
        slot = num_slots + np.arange(tokens.size).reshape(tokens.shape)
        real = position < sizes[:, None]
        token_to_slot[tokens[real]] = slot[real]
        slots.append(tokens.ravel())
        buckets.append(Bucket(num_sequences=len(members), length=longest))
        num_slots += tokens.size
    slot_to_token = np.concatenate(slots) if slots else np.empty(0, dtype=np.int64)
    return PackedSegments(
        buckets=tuple(buckets),
        slot_to_token=torch.from_numpy(slot_to_token).to(device),
        token_to_slot=torch.from_numpy(token_to_slot).to(device),
    )


def _split_by_length(order: npt.NDArray[np.int64], lengths: npt.NDArray[np.int64]) -> Sequence[npt.NDArray[np.int64]]:
    """Cut sequences, sorted by falling length, into buckets."""
    cuts = []
    longest = 0
    for rank, sequence in enumerate(order):
        if rank == 0 or lengths[sequence] < BUCKET_FRACTION * longest - BUCKET_SLACK:
            longest = int(lengths[sequence])
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
        mask = None
        if sliding_window is not None and bucket.length > sliding_window:
            mask = packed_segments.window_mask(bucket.length, sliding_window)
        out = _attend(*(_block(x[block], bucket) for x in (q, k, v)), mask=mask, scaling=scaling, softcap=softcap)
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


def _attend(q: Tensor, k: Tensor, v: Tensor, *, mask: Tensor | None, scaling: float | None, softcap: float | None) -> Tensor:
    """Causal attention of [n, H, L, D] blocks; `mask`, if given, replaces the causal one."""
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
