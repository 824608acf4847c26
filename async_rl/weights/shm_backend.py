"""Weight pushes through shared memory: the send buffer itself lies where engines of the same host can map it.

Every rank of the trainer has written its own shards when a version is announced, so nothing is left to send: engines copy
straight out of the segment. A segment is filled again only when no push of its version runs any more; an engine that was
evicted and reads on may see it change under its eyes, and fails its proof.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

import torch

from async_rl.errors import WeightPushError
from async_rl.registry.versions import PushPlan
from async_rl.weights.manifest import Manifest, bucket_views
from async_rl.weights.send_buffer import SendBuffer
from async_rl.weights.shm_segment import SegmentReader


class ShmSender:
    """Says where the segment is."""

    @property
    def address(self) -> str:
        return ""

    def prepare(self, manifest: Manifest, buffer: SendBuffer) -> Manifest:
        """Raises: WeightPushError if the buffer lies in private memory."""
        if not buffer.location:
            raise WeightPushError(f"version {manifest.version} is not in shared memory; its pool needs a SegmentMemory")
        return replace(manifest, path=buffer.location)

    def send(self, plan: PushPlan, buffer: SendBuffer) -> None:
        """It is there already."""

    def forget(self, kept: frozenset[int]) -> None:
        """Nothing is kept here."""

    def reset(self) -> None:
        """Nothing to drop."""

    def close(self) -> None:
        """The pool's memory goes with the pool."""


class ShmReceiver:
    """Maps the segment that a manifest names; an engine's swap is the only copy."""

    def __init__(self) -> None:
        self._segments = SegmentReader()

    def receive(self, plan: PushPlan, engine_id: str, manifest: Manifest) -> Mapping[str, torch.Tensor]:
        """Raises: ManifestMismatch if there is no such segment on this host."""
        return bucket_views(manifest, self._segments.buckets(manifest.path, manifest.bucket_bytes))

    def reset(self) -> None:
        """Nothing to drop."""

    def close(self) -> None:
        self._segments.close()
