"""A push without a transport: what a receiver would hand to an engine, made from a model at hand."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import nn

from async_rl.weights.manifest import Manifest, Probe, Tolerance, bucket_views
from async_rl.weights.send_buffer import SendBuffer, named_weights

_NO_PROBE = Probe(sequences=(), logprobs=(), temperature=1.0)


def push_of(
    model: nn.Module, version: int, *, epoch: int = 1, wire_dtype: str = "float32"
) -> tuple[Manifest, Mapping[str, torch.Tensor]]:
    """Return the manifest and the received tensors of a push of `model`'s weights as `version` (no probe in it)."""
    named, ties, buffers = named_weights(model)
    sent = SendBuffer.copy_from(named, wire_dtype, ties=ties, buffer_names=buffers)
    manifest = sent.manifest(epoch=epoch, version=version, probe=_NO_PROBE, tolerance=Tolerance(1e-4))
    return manifest, bucket_views(manifest, sent.buckets)
