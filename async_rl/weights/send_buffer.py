"""The flat send buffer: what a trainer copies its weights into, so that it can go on while they are sent.

Tensors lie one after the other, 16-byte aligned, in buckets of about `bucket_bytes` (one broadcast each). Floats are cast to
the wire dtype by the copy; other dtypes stay as they are; tied tensors are there once.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass

import torch
from torch import nn

from async_rl.errors import ManifestMismatch
from async_rl.weights.manifest import WIRE_DTYPES, Manifest, Probe, TensorEntry, Tolerance, tensor_digest

ALIGNMENT = 16
_NAME_OF = {dtype: name for name, dtype in WIRE_DTYPES.items()}


@dataclass(frozen=True, slots=True)
class Slot:
    """Where one tensor lies."""

    name: str
    shape: tuple[int, ...]
    dtype: str
    bucket: int
    offset: int
    is_buffer: bool

    def view(self, buckets: Sequence[torch.Tensor]) -> torch.Tensor:
        """The tensor itself, within its bucket."""
        dtype = WIRE_DTYPES[self.dtype]
        size = torch.Size(self.shape).numel() * dtype.itemsize
        return buckets[self.bucket][self.offset : self.offset + size].view(dtype).view(self.shape)


@dataclass(slots=True, eq=False)
class SendBuffer:
    """A snapshot of a model's weights, in CPU memory. `seconds`: what the copy took, and the trainer waited for it."""

    slots: tuple[Slot, ...]
    buckets: tuple[torch.Tensor, ...]  # uint8 [bytes]
    ties: tuple[tuple[str, str], ...]  # (alias, owner)
    seconds: float
    release: Callable[[], None] = lambda: None
    """Called once by the publisher, when nobody will be sent this snapshot any more."""

    @property
    def num_bytes(self) -> int:
        return sum(len(bucket) for bucket in self.buckets)

    @staticmethod
    def copy_from(
        named_tensors: Iterable[tuple[str, torch.Tensor]],
        wire_dtype: str,
        *,
        bucket_bytes: int = 64 * 2**20,
        ties: Iterable[tuple[str, str]] = (),
        buffer_names: Collection[str] = (),
        into: SendBuffer | None = None,
    ) -> SendBuffer:
        """Copy the tensors, in their order. `named_tensors` is read once and one at a time, so it may gather shards on the way.

        `into`: a released snapshot of the same model whose memory is used again.
        Raises: ManifestMismatch if a name comes twice, a dtype cannot be sent, or `into` is laid out for another model.
        """
        started = time.perf_counter()
        if into is not None:
            _overwrite(into, named_tensors)
            slots, buckets = into.slots, into.buckets
        else:
            slots, buckets = _lay_out(named_tensors, wire_dtype, bucket_bytes, frozenset(buffer_names))
        return SendBuffer(slots, buckets, tuple(ties), time.perf_counter() - started)

    def entries(self) -> tuple[TensorEntry, ...]:
        """The manifest's entries, each with the digest of its bytes."""
        return tuple(
            TensorEntry(s.name, s.shape, s.dtype, s.bucket, s.offset, tensor_digest(s.view(self.buckets)), s.is_buffer)
            for s in self.slots
        )

    def manifest(self, *, epoch: int, version: int, probe: Probe, tolerance: Tolerance) -> Manifest:
        """The manifest of a push of this snapshot."""
        sizes = tuple(len(bucket) for bucket in self.buckets)
        return Manifest(epoch, version, self.entries(), sizes, self.ties, probe, tolerance)


class SendBufferPool:
    """Snapshots of one model whose memory is used again: a push per step then costs a copy, and no page faults."""

    def __init__(self, wire_dtype: str, bucket_bytes: int) -> None:
        self._wire_dtype = wire_dtype
        self._bucket_bytes = bucket_bytes
        self._free: list[SendBuffer] = []

    def copy_from(
        self,
        named_tensors: Iterable[tuple[str, torch.Tensor]],
        *,
        ties: Iterable[tuple[str, str]] = (),
        buffer_names: Collection[str] = (),
    ) -> SendBuffer:
        """As SendBuffer.copy_from; the snapshot's `release` gives its memory back to this pool."""
        buffer = SendBuffer.copy_from(
            named_tensors,
            self._wire_dtype,
            bucket_bytes=self._bucket_bytes,
            ties=ties,
            buffer_names=buffer_names,
            into=self._free.pop() if self._free else None,
        )
        buffer.release = lambda: self._free.append(buffer)
        return buffer


def named_weights(model: nn.Module) -> tuple[list[tuple[str, torch.Tensor]], tuple[tuple[str, str], ...], frozenset[str]]:
    """A module's state as (name, tensor) without repetition, its ties as (alias, owner), and which names are buffers.

    Persistent state only: what state_dict() has. The first name of a tied tensor is its owner.
    """
    persistent = model.state_dict(keep_vars=True)
    buffers = {name for name, _ in model.named_buffers(remove_duplicate=False)}
    owner_of: dict[int, str] = {}
    named, ties = [], []
    for name, tensor in persistent.items():
        owner = owner_of.setdefault(id(tensor), name)
        if owner == name:
            named.append((name, tensor.detach()))
        else:
            ties.append((name, owner))
    return named, tuple(ties), frozenset(buffers & persistent.keys())


def _lay_out(
    named_tensors: Iterable[tuple[str, torch.Tensor]], wire_dtype: str, bucket_bytes: int, buffer_names: frozenset[str]
) -> tuple[tuple[Slot, ...], tuple[torch.Tensor, ...]]:
    """Copy into new buckets; only one bucket's worth of tensors is held beside them."""
    slots: list[Slot] = []
    buckets: list[torch.Tensor] = []
    waiting: list[tuple[Slot, torch.Tensor]] = []
    names: set[str] = set()
    end = 0

    def close_bucket() -> None:
        bucket = torch.zeros(end, dtype=torch.uint8)
        buckets.append(bucket)
        for slot, tensor in waiting:
            slot.view(buckets).copy_(tensor)
        slots.extend(slot for slot, _ in waiting)
        waiting.clear()

    for name, tensor in named_tensors:
        if name in names:
            raise ManifestMismatch(f"{name} comes twice; give a tied tensor once, and its other name among the ties")
        names.add(name)
        dtype = _wire_dtype(name, tensor, wire_dtype)
        size = tensor.numel() * WIRE_DTYPES[dtype].itemsize
        if waiting and end + size > bucket_bytes:
            close_bucket()
            end = 0
        waiting.append((Slot(name, tuple(tensor.shape), dtype, len(buckets), end, name in buffer_names), tensor.detach()))
        end += -(-size // ALIGNMENT) * ALIGNMENT
    if waiting:
        close_bucket()
    return tuple(slots), tuple(buckets)


def _overwrite(buffer: SendBuffer, named_tensors: Iterable[tuple[str, torch.Tensor]]) -> None:
    slots = {slot.name: slot for slot in buffer.slots}
    for name, tensor in named_tensors:
        slot = slots.pop(name, None)
        if slot is None or slot.shape != tuple(tensor.shape):
            expected = "no tensor of that name" if slot is None else f"{name} of shape {slot.shape}"
            raise ManifestMismatch(f"{name} {tuple(tensor.shape)}: the buffer was laid out for {expected} (or it came twice)")
        slot.view(buffer.buckets).copy_(tensor.detach())
    if slots:
        raise ManifestMismatch(f"{len(slots)} tensors of the buffer's layout did not come, {next(iter(slots))} first")


def _wire_dtype(name: str, tensor: torch.Tensor, wire_dtype: str) -> str:
    if tensor.is_floating_point():
        return wire_dtype
    if tensor.dtype not in _NAME_OF:
        raise ManifestMismatch(f"{name}: dtype {tensor.dtype} cannot be sent; known are {', '.join(WIRE_DTYPES)}")
    return _NAME_OF[tensor.dtype]
