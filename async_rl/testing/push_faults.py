"""Engines that take a push wrongly, each in one way, around any real engine: what a proof is there to find."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from enum import StrEnum

import numpy as np
import numpy.typing as npt
import torch

from async_rl.weights.interfaces import PushTarget
from async_rl.weights.manifest import Manifest, tensor_digest


class PushFault(StrEnum):
    """What goes wrong."""

    SKIPPED_TENSOR = "a skipped tensor"
    STALE_COPY = "a stale copy of a tensor"
    SWAPPED_NAMES = "two names swapped"
    WRONG_DTYPE = "a wrong dtype on the way"
    NOT_APPLIED = "a push not applied"


class FaultyTarget:
    """A PushTarget that hands on every call, wrongly.

    tensor: the one that is skipped or stale, or is swapped with `other`. It holds what the engine held first, for ever.
    """

    def __init__(self, inner: PushTarget, fault: PushFault, tensor: str, other: str = "") -> None:
        self._inner = inner
        self._fault = fault
        self._tensor = tensor
        self._other = other
        self._old: torch.Tensor | None = None
        self._applied: Mapping[str, torch.Tensor] = {}

    async def hold(self, manifest: Manifest, tensors: Mapping[str, torch.Tensor]) -> None:
        """A first push, taken rightly: what is old afterwards."""
        self._old = tensors[self._tensor].clone()
        self._applied = dict(tensors)
        await self._inner.swap(manifest, tensors)

    @property
    def serving_version(self) -> int | None:
        return self._inner.serving_version

    def check(self, manifest: Manifest) -> None:
        self._inner.check(manifest)

    async def swap(self, manifest: Manifest, tensors: Mapping[str, torch.Tensor]) -> None:
        assert self._old is not None
        received = dict(tensors)
        match self._fault:
            case PushFault.SKIPPED_TENSOR | PushFault.STALE_COPY:
                taken = {**received, self._tensor: self._old}
            case PushFault.SWAPPED_NAMES:
                taken = {**received, self._tensor: received[self._other], self._other: received[self._tensor]}
            case PushFault.WRONG_DTYPE:
                taken = {name: _wrong(tensor) for name, tensor in received.items()}
            case PushFault.NOT_APPLIED:
                return
        self._applied = received
        await self._inner.swap(manifest, taken)

    def digests(self, manifest: Manifest) -> Mapping[str, str]:
        held = dict(self._inner.digests(manifest))
        if self._fault is PushFault.STALE_COPY:  # the tensor itself is right; what is computed with is another
            held[self._tensor] = tensor_digest(self._applied[self._tensor])
        return held

    async def score(self, sequences: Sequence[Sequence[int]], *, temperature: float) -> Sequence[npt.NDArray[np.float32]]:
        return await self._inner.score(sequences, temperature=temperature)

    async def serve(self, version: int) -> None:
        await self._inner.serve(version)

    async def withdraw(self, reason: str) -> None:
        await self._inner.withdraw(reason)


def _wrong(tensor: torch.Tensor) -> torch.Tensor:
    """Rounded to half the bits; what has half the bits already, to a quarter of them."""
    if not tensor.is_floating_point():
        return tensor
    narrow = torch.bfloat16 if tensor.dtype is torch.float32 else torch.float8_e4m3fn
    return tensor.to(narrow).to(tensor.dtype)
