"""What a model's state dict holds, by name: what a push to an engine of that model has to bring."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import nn
from transformers import PreTrainedModel

from async_rl.config.rollout import RolloutConfig
from async_rl.errors import EngineError, ManifestMismatch
from async_rl.weights.manifest import Manifest, check_names
from async_rl.weights.send_buffer import named_weights


@dataclass(frozen=True, slots=True)
class ModelNames:
    """shapes: of every state-dict name. owner: name → first name of the same tensor (tied names share one).
    buffers: names that are no parameters."""

    shapes: Mapping[str, tuple[int, ...]]
    owner: Mapping[str, str]
    buffers: frozenset[str]

    @staticmethod
    def of(model: nn.Module) -> ModelNames:
        """Also of a model on the meta device."""
        _, ties, buffers = named_weights(model)
        shapes = {name: tuple(tensor.shape) for name, tensor in model.state_dict().items()}
        return ModelNames(shapes, {**{name: name for name in shapes}, **dict(ties)}, buffers)

    def check(self, manifest: Manifest) -> None:
        """Raises: ManifestMismatch unless the manifest's names, shapes and ties are exactly the model's.

        A tie that the model does not share is accepted: the alias gets a copy of its owner.
        """
        check_names(manifest, self.shapes)
        sender: dict[str, str] = {}
        for entry in manifest.entries:
            other = sender.setdefault(self.owner[entry.name], entry.name)
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

    def untied(self, manifest: Manifest) -> Mapping[str, str]:
        """alias → owner, of the manifest's ties that this model does not share: it needs a copy under both names."""
        return {
            alias: owner for alias, owner in manifest.ties if alias in self.owner and self.owner[alias] != self.owner[owner]
        }


def context_of(model: PreTrainedModel, config: RolloutConfig) -> int:
    """Prompt and sampled tokens of one sequence, at most.

    Raises: EngineError if neither model nor config says, or they disagree.
    """
    limit: int | None = getattr(model.config, "max_position_embeddings", None)
    if limit is None:
        if config.max_context is None:
            raise EngineError(f"{type(model).__name__} names no max_position_embeddings; set rollout.max_context")
        return config.max_context
    if config.max_context is not None and config.max_context > limit:
        raise EngineError(f"rollout.max_context={config.max_context} exceeds the model's context of {limit}")
    return limit if config.max_context is None else config.max_context
