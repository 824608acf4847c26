"""How the engine runs a model: prefill prompts, decode one column, score whole sequences. One implementation for any model."""

from __future__ import annotations

import inspect
from collections.abc import Sequence
from typing import Any, Protocol, cast

import torch
from transformers import PreTrainedModel

from async_rl.errors import EngineError
from async_rl.rollout.attention import ATTENTION_NAME, CollectView, DecodeView
from async_rl.rollout.kv_cache import ColumnCache, KeyValue, LayerShape


class Forward(Protocol):
    """A model's computations. ids and positions are int64; logits come in the model's dtype."""

    @property
    def layers(self) -> Sequence[LayerShape]: ...

    def prefill(
        self, ids: torch.Tensor, positions: torch.Tensor, bias: torch.Tensor | None
    ) -> tuple[torch.Tensor, Sequence[KeyValue]]:
        """ids, positions [g, T], left-padded; bias [g, 1, T, T] or None for causal → last logits [g, V], KV per layer."""
        ...

    def decode(self, ids: torch.Tensor, positions: torch.Tensor, bias: torch.Tensor | None, cache: ColumnCache) -> torch.Tensor:
        """ids, positions [n] of the tokens at column cache.cur; bias [n, 1, 1, W] or None → logits [n, V]."""
        ...

    def logits(self, ids: torch.Tensor) -> torch.Tensor:
        """ids [g, T], right-padded (what follows a token cannot change it) → logits [g, T, V]."""
        ...


class ModuleForward:
    """Any Hugging Face causal LM that takes its attention from transformers' AttentionInterface, through its own modules."""

    def __init__(self, model: PreTrainedModel) -> None:
        self._model = model
        # Some models look for padding, and warn, whenever they get no mask; the engine never feeds padding that is seen.
        cast(Any, model.config).pad_token_id = None
        parameters = inspect.signature(model.forward).parameters
        # transformers renamed the argument during the 5.x series.
        self._cache_name = "cache" if "cache" in parameters else "past_key_values"
        self.layers: Sequence[LayerShape] = _probe_layers(self)

    def prefill(
        self, ids: torch.Tensor, positions: torch.Tensor, bias: torch.Tensor | None
    ) -> tuple[torch.Tensor, Sequence[KeyValue]]:
        view = CollectView()
        logits = self._call(ids, positions, bias, view, logits_to_keep=1)
        return logits[:, -1], [view.collected[layer] for layer in sorted(view.collected)]

    def decode(self, ids: torch.Tensor, positions: torch.Tensor, bias: torch.Tensor | None, cache: ColumnCache) -> torch.Tensor:
        return self._call(ids.unsqueeze(1), positions.unsqueeze(1), bias, DecodeView(cache), logits_to_keep=1)[:, -1]

    def logits(self, ids: torch.Tensor) -> torch.Tensor:
        positions = torch.arange(ids.shape[1], device=ids.device).expand_as(ids)
        return self._call(ids, positions, None, CollectView(), logits_to_keep=0)

    def _call(
        self, ids: torch.Tensor, positions: torch.Tensor, bias: torch.Tensor | None, view: Any, *, logits_to_keep: int
    ) -> torch.Tensor:
        cache: dict[str, Any] = {self._cache_name: view}
        output = self._model(
            input_ids=ids,
            position_ids=positions,
            attention_mask=bias,
            use_cache=True,
            logits_to_keep=logits_to_keep,
            **cache,
        )
        logits: torch.Tensor = output.logits
        return logits


@torch.inference_mode()
def _probe_layers(forward: ModuleForward) -> Sequence[LayerShape]:
    """One token through the model: which layers write KV, and in what shapes."""
    token = torch.zeros((1, 1), dtype=torch.long, device=forward._model.device)
    _, pairs = forward.prefill(token, token, None)
    return [LayerShape(k.shape[1], k.shape[3], v.shape[3]) for k, v in pairs]


def vocabulary_size(model: PreTrainedModel) -> int:
    """Rows of the input embedding: token ids below it can be fed."""
    embedding = cast(torch.nn.Embedding, model.get_input_embeddings())
    return int(embedding.weight.shape[0])


def require_supported(model: PreTrainedModel) -> None:
    """Refuse by its class what cannot work.

    Raises: EngineError unless the model takes its attention from transformers' AttentionInterface and positions by row.
    """
    name = type(model).__name__
    if not getattr(model, "_supports_attention_backend", False):
        raise EngineError(
            f"rollout.engine=torch cannot run {name}: it does not take its attention from transformers' AttentionInterface; "
            "use a model that does (llama, qwen2, qwen3, mistral, gemma, gpt2, ...)"
        )
    missing = {"input_ids", "position_ids", "attention_mask", "logits_to_keep"} - set(
        inspect.signature(model.forward).parameters
    )
    if missing:
        raise EngineError(f"rollout.engine=torch cannot run {name}: its forward takes no {', '.join(sorted(missing))}")
    if model.config._attn_implementation != ATTENTION_NAME:
        raise EngineError(f"{name} was loaded with attention {model.config._attn_implementation!r}, not {ATTENTION_NAME!r}")
