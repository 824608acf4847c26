"""The engine's own copy of the weights as a place where pushes arrive: checked by name, copied all or nothing, digested."""

from __future__ import annotations

import difflib
import threading
from collections.abc import Mapping

import torch
from transformers import PreTrainedModel

from async_rl.errors import EngineError, ManifestMismatch
from async_rl.weights.manifest import WIRE_DTYPES, Manifest, tensor_digest


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
        sent = {entry.name: entry.shape for entry in manifest.entries}
        self._check_names(sent, dict(manifest.ties))
        for entry in manifest.entries:
            held = tuple(self._tensors[entry.name].shape)
            if held != tuple(entry.shape):
                raise ManifestMismatch(
                    f"{entry.name}: version {manifest.version} sends shape {entry.shape}, the engine has {held}"
                )
        owners: dict[str, str] = {}
        for name in sent:
            other = owners.setdefault(self._owner[name], name)
            if other != name:
                raise ManifestMismatch(
                    f"version {manifest.version} sends {other} and {name} apart, but they are one tensor in the engine's model; "
                    "use the same tie_word_embeddings on both sides"
                )

    def _check_names(self, sent: Mapping[str, tuple[int, ...]], ties: Mapping[str, str]) -> None:
        for alias, owner in ties.items():
            if owner not in sent or alias in sent:
                raise ManifestMismatch(
                    f"tie {alias} -> {owner}: the owner must be among the sent tensors, and the alias must not"
                )
        named = {*sent, *ties}
        unknown, missing = sorted(named - self._tensors.keys()), sorted(self._tensors.keys() - named)
        if unknown:
            near = difflib.get_close_matches(unknown[0], self._tensors.keys(), n=1)
            hint = f"; the nearest is {near[0]}" if near else ""
            raise ManifestMismatch(
                f"the manifest names {unknown[0]} ({len(unknown)} such), unknown to the engine's model{hint}"
            )
        if missing:
            near = difflib.get_close_matches(missing[0], named, n=1)
            hint = f"; the nearest is {near[0]}" if near else ""
            raise ManifestMismatch(f"the manifest lacks {missing[0]} ({len(missing)} such) of the engine's model{hint}")

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
                if self._owner[alias] != self._owner[owner]:
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
    first: dict[tuple[int, int, tuple[int, ...]], str] = {}
    return {
        name: first.setdefault((tensor.data_ptr(), tensor.storage_offset(), tuple(tensor.shape)), name)
        for name, tensor in tensors.items()
    }
