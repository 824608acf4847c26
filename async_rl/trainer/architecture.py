"""What the policy must know of a Hugging Face model: whether it can be trained packed, and what its head does."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any, cast

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint
from transformers import PreTrainedModel

from async_rl.errors import ConfigError
from async_rl.model.attention import PACKED
from async_rl.model.logprobs import LogitTransform

PACKABLE_LAYERS = {"full_attention", "sliding_attention"}
BATCH_DEPENDENT_ROPE = {"dynamic", "longrope"}


def output_head(hf: PreTrainedModel) -> nn.Linear:
    """Return the layer that turns hidden states into logits."""
    return cast(nn.Linear, cast(Any, hf).get_output_embeddings())


def refuse_unpackable(hf: PreTrainedModel) -> None:
    """Raises: ConfigError, with the reason, if the model cannot be trained packed."""
    config, name = hf.config, type(hf).__name__
    if config._attn_implementation != PACKED:
        raise ConfigError(f"{name} was loaded with attention {config._attn_implementation!r}; load it with attn={PACKED!r}")
    if any(parameter.dtype != torch.float32 for parameter in hf.parameters()):
        raise ConfigError(
            f"{name} must be loaded in float32, the dtype of master weights; options.dtype sets the compute dtype"
        )
    other = set(getattr(config, "layer_types", None) or ()) - PACKABLE_LAYERS
    if other:
        raise ConfigError(f"{name} has layers of type {', '.join(sorted(other))}; only attention layers can be trained packed")
    rope = getattr(config, "rope_parameters", None) or {}
    if str(rope.get("rope_type")) in BATCH_DEPENDENT_ROPE:
        raise ConfigError(f"{name} has rope_type={rope['rope_type']!r}, whose positions depend on what else is in the batch")


def logit_transform(hf: PreTrainedModel) -> LogitTransform:
    """Read from the config what the model does to its logits; policy.verify_logprobs proves the guess."""
    config = hf.config
    scale = float(getattr(config, "logit_scale", None) or 1.0)  # cohere
    scale /= float(getattr(config, "logits_scaling", None) or 1.0)  # granite
    return LogitTransform(scale=scale, softcap=getattr(config, "final_logit_softcapping", None))  # gemma


def checkpoint_activations(layer: nn.Module) -> None:
    """Recompute the layer in the backward pass. Only `forward` is replaced: FSDP's hooks and state-dict names stay outside."""
    forward: Callable[..., Any] = layer.forward
    layer.forward = partial(checkpoint, forward, use_reentrant=False)
