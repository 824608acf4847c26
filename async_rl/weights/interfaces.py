"""What the weight push needs of an engine and of a trainer. `weights/` knows no engine; engines implement these."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Protocol

import numpy as np
import numpy.typing as npt
import torch

from async_rl.weights.manifest import Manifest


class Scorer(Protocol):
    """Logprobs of given tokens."""

    async def score(self, sequences: Sequence[Sequence[int]], *, temperature: float) -> Sequence[npt.NDArray[np.float32]]:
        """Logprob of token t given tokens < t under the weights held now (served or not): [len − 1] per sequence."""
        ...


class WeightSink(Protocol):
    """Where pushed weights go. Calls come in the order check, swap, (digests, score), then serve or withdraw."""

    @property
    def serving_version(self) -> int | None:
        """The version that new tokens are sampled with; None while nothing proven is loaded."""
        ...

    def check(self, manifest: Manifest) -> None:
        """Raises: ManifestMismatch unless every name, shape and tie of the manifest is one of the engine's, and vice versa."""
        ...

    async def swap(self, manifest: Manifest, tensors: Mapping[str, torch.Tensor]) -> None:
        """At a token boundary, replace all weights by `tensors` (wire dtype, cast on copy); all or nothing.

        Generation stays paused afterwards, its requests kept, until `serve` or a later swap.
        """
        ...

    def digests(self, manifest: Manifest) -> Mapping[str, str]:
        """Digest of every tensor that the engine now holds, cast to the wire dtype (see manifest.tensor_digest)."""
        ...

    async def serve(self, version: int) -> None:
        """The held weights are proven: go on sampling, as `version`. Running requests go on under it."""
        ...

    async def withdraw(self, reason: str) -> None:
        """The held weights failed their proof: sample nothing until a later version is served."""
        ...


class PushTarget(WeightSink, Scorer, Protocol):
    """An engine, as far as a push is concerned."""
