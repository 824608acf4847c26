"""The engine's own copy of the weights as a place where pushes arrive: checked by name, copied all or nothing, digested."""

from __future__ import annotations

import threading
from collections.abc import Mapping

import torch
from transformers import PreTrainedModel

from async_rl.errors import EngineError, ManifestMismatch
from async_rl.weights.manifest import WIRE_DTYPES, Manifest, check_names, tensor_digest


class WeightStore:
    """State-dict tensors of a live model. Copies go into the tensors that the forward pass reads; there is no second copy."""

    def __init__(self, model: PreTrainedModel) -> None:
        self._tensors: dict[str, torch.Tensor] = dict(model.state_dict())
        self._owner = _owners(self._tensors)
        self._lock = threading.Lock()  # digests are read from another thread than copies are made in

    def check(self, manifest: Manifest) -> None:
        """Raises: ManifestMismatch unless the manifest's names, shapes and ties are exactly the model's.

        A tie that the model does not share is accepted: the alias gets a copy of its owner.
        """
        check_names(manifest, {name: tuple(tensor.shape) for name, tensor in self._tensors.items()})
        sender: dict[str, str] = {}
        for entry in manifest.entries:
            other = sender.setdefault(self._owner[entry.name], entry.name)
            if other != entry.name:
                raise ManifestMismatch(
                    f"the manifest sends {other} and {entry.name} apart, but they are one tensor in the engine's model; "
                    "use the same tie_word_embeddings on both sides"
                )

    def require(self, manifest: Manifest, tensors: Mapping[str, torch.Tensor]) -> None:
        """Raises: ManifestMismatch unless the manifest fits the model, and `tensors` the manifest."""
        self.check(manifest)
        for entry in manifest.entries:
            if entry.name not in tensors:
                raise ManifestMismatch(f"{entry.name} is in the manifest of version {manifest.version}, but was not received")
            if tuple(tensors[entry.name].shape) != tuple(entry.shape):
                raise ManifestMismatch(f"{entry.name}: received shape {tuple(tensors[entry.name].shape)}, not {entry.shape}")

    @torch.no_grad()
    def copy(self, manifest: Manifest, tensors: Mapping[str, torch.Tensor]) -> None:
        """Replace every tensor, cast to the engine's dtype; call `require` first.

        An error leaves a mixture of old and new: the caller must not serve it.
        """
        with self._lock:
            for entry in manifest.entries:
                self._tensors[entry.name].copy_(tensors[entry.name])
            for alias, owner in manifest.ties:
                if alias in self._owner and self._owner[alias] != self._owner[owner]:
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


def _owners(tensors: Mapping[str, torch.Tensor]) -> dict[str, str]:
    """Name → first name that has the same tensor (tied names share one)."""
    first: dict[tuple[int, tuple[int, ...]], str] = {}
    return {name: first.setdefault((tensor.data_ptr(), tuple(tensor.shape)), name) for name, tensor in tensors.items()}
