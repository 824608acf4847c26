"""The flat send buffer: what a trainer copies its weights into, so that it can go on while they are sent.

Tensors lie one after the other, 16-byte aligned, in buckets of about `bucket_bytes` (one broadcast each). Floats are cast to
the wire dtype by the copy; other dtypes stay as they are; tied tensors are there once.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
import xxhash
from torch import nn

from async_rl.errors import ManifestMismatch
from async_rl.weights.copies import Copies
from async_rl.weights.manifest import WIRE_DTYPES, Canary, Manifest, Probe, TensorEntry, Tolerance

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

    @property
    def num_bytes(self) -> int:
        return math.prod(self.shape) * WIRE_DTYPES[self.dtype].itemsize

    def view(self, buckets: Sequence[torch.Tensor]) -> torch.Tensor:
        """The tensor itself, within its bucket."""
        flat = buckets[self.bucket][self.offset : self.offset + self.num_bytes]
        return flat.view(WIRE_DTYPES[self.dtype]).view(self.shape)


@dataclass(frozen=True, slots=True)
class TensorSpec:
    """A tensor before it is copied: `shape` is the whole tensor's, however it is sharded."""

    name: str
    shape: tuple[int, ...]
    dtype: torch.dtype
    is_buffer: bool = False


@dataclass(slots=True, eq=False)
class SendBuffer:
    """A snapshot of a model's weights, in CPU memory. The trainer stood still for gather_s and cast_s.

    gather_s: collecting shards from other ranks. cast_s: copying into the buffer, cast to the wire dtype, as far as it was
    not done beside gathering.
    """

    slots: tuple[Slot, ...]
    buckets: tuple[torch.Tensor, ...]  # uint8 [bytes]
    ties: tuple[tuple[str, str], ...]  # (alias, owner)
    gather_s: float = 0.0
    cast_s: float = 0.0
    location: str = ""
    """Path of the memory, if other processes can map it."""
    release: Callable[[], None] = lambda: None
    """Called once by the publisher, when nobody will be sent this snapshot any more."""

    @property
    def num_bytes(self) -> int:
        return sum(len(bucket) for bucket in self.buckets)

    @property
    def seconds(self) -> float:
        """What the snapshot took."""
        return self.gather_s + self.cast_s

    def fill(self, named_tensors: Iterable[tuple[str, torch.Tensor]]) -> None:
        """Copy whole tensors in. `named_tensors` is read once and one at a time, so it may gather shards on the way.

        Raises: ManifestMismatch unless every tensor of the layout comes once, and no other.
        """
        slots = {slot.name: slot for slot in self.slots}
        gather_s, started = 0.0, time.perf_counter()
        with Copies() as copies:
            since = started
            for name, tensor in named_tensors:
                gather_s += time.perf_counter() - since
                slot = slots.pop(name, None)
                if slot is None or slot.shape != tuple(tensor.shape):
                    expected = "no tensor of that name" if slot is None else f"{name} of shape {slot.shape}"
                    raise ManifestMismatch(
                        f"{name} {tuple(tensor.shape)}: the buffer was laid out for {expected} (or it came twice)"
                    )
                copies.add(slot.view(self.buckets), tensor.detach())
                since = time.perf_counter()
        self.gather_s, self.cast_s = gather_s, time.perf_counter() - started - gather_s
        if slots:
            raise ManifestMismatch(f"{len(slots)} tensors of the buffer's layout did not come, {next(iter(slots))} first")

    def fill_shards(self, shards: Iterable[tuple[str, torch.Tensor, int]]) -> None:
        """Copy parts in: (name, shard, index of its first element in the flattened whole). Others copy the rest."""
        slots = {slot.name: slot for slot in self.slots}
        started = time.perf_counter()
        with Copies() as copies:
            for name, shard, first in shards:
                flat = slots[name].view(self.buckets).view(-1)
                copies.add(flat[first : first + shard.numel()], shard.detach().reshape(-1))
        self.gather_s, self.cast_s = 0.0, time.perf_counter() - started

    @staticmethod
    def copy_from(
        named_tensors: Iterable[tuple[str, torch.Tensor]],
        wire_dtype: str,
        *,
        bucket_bytes: int = 64 * 2**20,
        ties: Iterable[tuple[str, str]] = (),
        buffer_names: Collection[str] = (),
    ) -> SendBuffer:
        """A new buffer with these tensors, in their order.

        Raises: ManifestMismatch if a name comes twice, or a dtype cannot be sent.
        """
        named = list(named_tensors)
        slots, sizes = lay_out(specs_of(named, buffer_names), wire_dtype, bucket_bytes)
        buffer = SendBuffer(slots, PrivateMemory().allocate(sizes)[0], tuple(ties))
        buffer.fill(named)
        return buffer

    def entries(self) -> tuple[TensorEntry, ...]:
        """The manifest's entries, each with the digest of its bytes (as manifest.tensor_digest has it)."""
        # Bytes, not tensors: every call into torch lets the interpreter's lock go, and a step beside it takes it.
        buckets = [bucket.numpy().data for bucket in self.buckets]
        digests = [xxhash.xxh3_64_hexdigest(buckets[s.bucket][s.offset : s.offset + s.num_bytes]) for s in self.slots]
        return tuple(
            TensorEntry(s.name, s.shape, s.dtype, s.bucket, s.offset, digest, s.is_buffer)
            for s, digest in zip(self.slots, digests, strict=True)
        )

    def manifest(
        self, *, epoch: int, version: int, probe: Probe, tolerance: Tolerance, canary: Canary | None = None
    ) -> Manifest:
        """The manifest of a push of this snapshot."""
        sizes = tuple(len(bucket) for bucket in self.buckets)
        return Manifest(epoch, version, self.entries(), sizes, self.ties, probe, tolerance, canary)


class BufferMemory(Protocol):
    """Where the buckets of send buffers lie."""

    def allocate(self, sizes: Sequence[int]) -> tuple[tuple[torch.Tensor, ...], str]:
        """Buckets of these sizes, and the path under which other processes find them (or empty)."""
        ...

    def close(self) -> None:
        """Nobody uses any of it any more."""
        ...


class PrivateMemory:
    """Of this process alone."""

    def allocate(self, sizes: Sequence[int]) -> tuple[tuple[torch.Tensor, ...], str]:
        return tuple(torch.zeros(size, dtype=torch.uint8) for size in sizes), ""

    def close(self) -> None:
        """Freed with the last reference."""


class SendBufferPool:
    """Snapshots of one model whose memory is used again: a push per step then costs a copy, and no page faults.

    Two are in use when pushes keep up (one is sent while the next is filled); a third when they do not.
    """

    def __init__(self, wire_dtype: str, bucket_bytes: int, memory: BufferMemory | None = None) -> None:
        self._wire_dtype = wire_dtype
        self._bucket_bytes = bucket_bytes
        self._memory = memory or PrivateMemory()
        self._free: list[SendBuffer] = []

    def take(self, specs: Sequence[TensorSpec], *, ties: Iterable[tuple[str, str]] = ()) -> SendBuffer:
        """A buffer to fill; its `release` gives it back to this pool. Raises: ConfigError if there is no memory for one."""
        if self._free:
            return self._free.pop()
        slots, sizes = lay_out(specs, self._wire_dtype, self._bucket_bytes)
        buckets, location = self._memory.allocate(sizes)
        buffer = SendBuffer(slots, buckets, tuple(ties), location=location)
        buffer.release = lambda: self._free.append(buffer)
        return buffer

    def copy_from(
        self,
        named_tensors: Sequence[tuple[str, torch.Tensor]],
        *,
        ties: Iterable[tuple[str, str]] = (),
        buffer_names: Collection[str] = (),
    ) -> SendBuffer:
        """Take a buffer and fill it."""
        buffer = self.take(specs_of(named_tensors, buffer_names), ties=ties)
        buffer.fill(named_tensors)
        return buffer

    def close(self) -> None:
        """Give the memory back. No buffer of the pool may be used afterwards."""
        self._free.clear()
        self._memory.close()


def specs_of(named_tensors: Iterable[tuple[str, torch.Tensor]], buffer_names: Collection[str] = ()) -> list[TensorSpec]:
    """What whole tensors look like."""
    names = frozenset(buffer_names)
    return [TensorSpec(name, tuple(tensor.shape), tensor.dtype, name in names) for name, tensor in named_tensors]


def lay_out(specs: Iterable[TensorSpec], wire_dtype: str, bucket_bytes: int) -> tuple[tuple[Slot, ...], tuple[int, ...]]:
    """Where each tensor lies, and the sizes of the buckets. A function of its arguments: every rank computes the same.

    Raises: ManifestMismatch if a name comes twice, or a dtype cannot be sent.
    """
    slots: list[Slot] = []
    sizes: list[int] = []
    names: set[str] = set()
    for spec in specs:
        if spec.name in names:
            raise ManifestMismatch(f"{spec.name} comes twice; give a tied tensor once, and its other name among the ties")
        names.add(spec.name)
        dtype = _wire_dtype(spec, wire_dtype)
        size = torch.Size(spec.shape).numel() * WIRE_DTYPES[dtype].itemsize
        if not sizes or (sizes[-1] > 0 and sizes[-1] + size > bucket_bytes):
            sizes.append(0)
        slots.append(Slot(spec.name, spec.shape, dtype, len(sizes) - 1, sizes[-1], spec.is_buffer))
        sizes[-1] += -(-size // ALIGNMENT) * ALIGNMENT
    return tuple(slots), tuple(sizes)


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


def _wire_dtype(spec: TensorSpec, wire_dtype: str) -> str:
    if spec.dtype.is_floating_point:
        return wire_dtype
    if spec.dtype not in _NAME_OF:
        raise ManifestMismatch(f"{spec.name}: dtype {spec.dtype} cannot be sent; known are {', '.join(WIRE_DTYPES)}")
    return _NAME_OF[spec.dtype]
