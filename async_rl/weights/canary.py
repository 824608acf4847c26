"""The canary: made-up weights that both sides derive from a seed, so that an engine shows once that it computes with every
tensor that it is given.

A probe under real weights moves little when one tensor is old, and a push that follows a small step hides a stale copy
altogether. Here every floating-point tensor is drawn anew, with the mean and the spread that it has in the model, so whatever
the forward pass does not read from where pushes are written (a packed copy, a head that was tied when the model was loaded)
is off by as much as it can be. Nothing of it travels but the seed, two numbers per tensor, and the trainer's logprobs.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace

import torch
import xxhash

from async_rl.errors import ProofFailed
from async_rl.weights.interfaces import PushTarget
from async_rl.weights.manifest import WIRE_DTYPES, Canary, Manifest
from async_rl.weights.proof import compare_probe

CANARY_VERSION = -1
"""What an engine is told the canary's version is: no version that could be served."""
FLOAT32_SLACK = 30.0
"""Wide weights amplify rounding: in float32 the canary's probe may differ by so many times what a push's probe may."""
WIDER = 2.0
"""The canary spreads wider than the model, so that attention is far from even and every projection in it counts."""
SMALLEST_SPREAD = 1e-2
SMALLEST_VECTOR_SPREAD = 1.0
"""Norms at their start are all one and biases all zero; a bias of a key hardly moves anything unless it is large."""


def canary_scale(tensor: torch.Tensor) -> tuple[float, float]:
    """Mean and spread of a tensor's canary."""
    if tensor.numel() == 0:
        return 0.0, SMALLEST_SPREAD
    values = tensor.detach().float()
    mean, spread = float(values.mean()), WIDER * float(values.std(correction=0))
    if tensor.dim() < 2:
        return mean, max(spread, abs(mean) / 2, SMALLEST_VECTOR_SPREAD)
    return mean, max(spread, SMALLEST_SPREAD)


def canary_tensor(name: str, shape: tuple[int, ...], scale: tuple[float, float], seed: int, dtype: torch.dtype) -> torch.Tensor:
    """Uniform numbers of the scale's mean and standard deviation, in `dtype`; the same bits on every machine."""
    generator = torch.Generator().manual_seed(xxhash.xxh3_64_intdigest(f"{seed}:{name}".encode()) >> 1)
    mean, spread = scale
    width = spread * 12**0.5  # of a uniform distribution with that standard deviation
    drawn = torch.rand(shape, generator=generator, dtype=torch.float32)
    return drawn.sub_(0.5).mul_(width).add_(mean).to(dtype)


class CanaryTensors(Mapping[str, torch.Tensor]):
    """A received push with its floating-point tensors replaced by their canaries, one at a time as they are asked for."""

    def __init__(self, manifest: Manifest, canary: Canary, received: Mapping[str, torch.Tensor]) -> None:
        self._entries = {entry.name: entry for entry in manifest.entries}
        self._canary = canary
        self._received = received

    def __getitem__(self, name: str) -> torch.Tensor:
        scale = self._canary.scales.get(name)
        if scale is None:
            return self._received[name]
        entry = self._entries[name]
        return canary_tensor(name, entry.shape, scale, self._canary.seed, WIRE_DTYPES[entry.dtype])

    def __iter__(self) -> Iterator[str]:
        return iter(self._entries)

    def __len__(self) -> int:
        return len(self._entries)


async def try_canary(manifest: Manifest, target: PushTarget, received: Mapping[str, torch.Tensor]) -> None:
    """Swap the canary in and compare the probe's logprobs. The engine holds the canary afterwards: swap what was received.

    Raises: ProofFailed if the engine computes anything else than the trainer does.
    """
    canary = manifest.canary
    if canary is None:
        return
    await target.swap(replace(manifest, version=CANARY_VERSION), CanaryTensors(manifest, canary, received))
    try:
        await compare_probe(canary.probe, canary.tolerance, target)
    except ProofFailed as error:
        raise ProofFailed(
            f"canary: {error}. The engine computes with a copy of a tensor that pushes do not reach (a packed weight, a head "
            f"that is tied on one side only), or computes otherwise than the trainer"
        ) from error
