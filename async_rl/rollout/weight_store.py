"""The engine's own copy of the weights as a place where pushes arrive: checked by name, copied all or nothing, digested."""

from __future__ import annotations

import threading
from collections.abc import Mapping

import torch
from transformers import PreTrainedModel

from async_rl.errors import EngineError
from async_rl.rollout.model_names import ModelNames
from async_rl.weights.manifest import WIRE_DTYPES, Manifest, tensor_digest


class WeightStore:
    """State-dict tensors of a live model. Copies go into the tensors that the forward pass reads; there is no second copy."""

    def __init__(self, model: PreTrainedModel) -> None:
        self.names = ModelNames.of(model)
        self._tensors: dict[str, torch.Tensor] = dict(model.state_dict())
        self._lock = threading.Lock()  # digests are read from another thread than copies are made in

    @torch.no_grad()
    def copy(self, manifest: Manifest, tensors: Mapping[str, torch.Tensor]) -> None:
        """Replace every tensor, cast to the engine's dtype; call `names.require` first.

        An error leaves a mixture of old and new: the caller must not serve it.
        """
        with self._lock:
            for entry in manifest.entries:
                self._tensors[entry.name].copy_(tensors[entry.name])
            for alias, owner in self.names.untied(manifest).items():
                self._tensors[alias].copy_(tensors[owner])

    def digests(self, manifest: Manifest) -> Mapping[str, str]:
        """Digest of each of the manifest's tensors as the engine holds it, cast to the wire dtype."""
        with self._lock:
            digests = {}
            for entry in manifest.entries:
                if entry.name not in self._tensors:
                    raise EngineError(f"digests: the engine's model has no tensor {entry.name}")
                held = self._tensors[entry.name]
                wire = WIRE_DTYPES[entry.dtype] if held.is_floating_point() else held.dtype
                digests[entry.name] = tensor_digest(held.detach().to(wire))
            return digests
