"""The attention function and the cache objects through which Hugging Face models read a ColumnCache.

Registered with transformers' AttentionInterface without a mask function, so that models pass our mask on untouched.
"""

from __future__ import annotations

from typing import Any

import torch
from torch.nn import functional
from transformers import AttentionInterface
from transformers.cache_utils import Cache

from async_rl.errors import EngineError
from async_rl.rollout.kv_cache import ColumnCache, KeyValue

ATTENTION_NAME = "async_rl_columns"


_PRODUCTS_FROM = 512
"""Window × features of a head from which three products beat the fused CPU kernel, for one query (measured)."""


class StepAttention:
    """Attention of one query per row, for all layers of a decoding step.

    The heads that share a key are taken as its queries, so grouped keys are never expanded.
    bias: additive [n, 1, 1, W], or None. scale: None for 1/sqrt(dim).
    """

    def __init__(self, bias: torch.Tensor | None, scale: float | None) -> None:
        self._bias, self._scale = bias, scale
        self._flat_bias: torch.Tensor | None = None

    def __call__(self, query: torch.Tensor, keys: torch.Tensor, values: torch.Tensor) -> torch.Tensor:
        """query [n, H, dim]; keys, values [n, Hkv, W, dim] → [n, H × value dim]."""
        n, heads, dim = query.shape
        kv_heads, width = keys.shape[1], keys.shape[2]
        grouped = query.view(n, kv_heads, heads // kv_heads, dim)
        if width * dim < _PRODUCTS_FROM or query.dtype is not torch.float32 or query.device.type != "cpu":
            out = functional.scaled_dot_product_attention(grouped, keys, values, attn_mask=self._bias, scale=self._scale)
            return out.reshape(n, heads * values.shape[3])
        scale = dim**-0.5 if self._scale is None else self._scale
        bias = self._bias_of_heads(n * kv_heads, kv_heads, query)
        beta = 0 if self._bias is None else 1
        scores = torch.baddbmm(bias, grouped.flatten(0, 1), keys.flatten(0, 1).transpose(1, 2), beta=beta, alpha=scale)
        return torch.bmm(torch.softmax(scores, -1), values.flatten(0, 1)).view(n, heads * values.shape[3])

    def _bias_of_heads(self, num: int, kv_heads: int, like: torch.Tensor) -> torch.Tensor:
        """The bias once per key head [num, 1, W], made at the first layer; without one, anything: it is not read."""
        if self._flat_bias is None:
            if self._bias is None:
                self._flat_bias = like.new_zeros((1, 1, 1))
            else:
                self._flat_bias = self._bias.expand(-1, kv_heads, 1, -1).reshape(num, 1, -1)
        return self._flat_bias


def column_attention(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    dropout: float = 0.0,
    scaling: float | None = None,
    sliding_window: int | None = None,
    softcap: float | None = None,
    **kwargs: Any,
) -> tuple[torch.Tensor, None]:
    """transformers' attention signature over right-aligned columns: distance in columns is distance in tokens.

    query [n, H, T, D]; key, value [n, Hkv, W, D], of which the last T columns belong to the queries; attention_mask
    additive [n, 1, T, W], or None for plain causal. Returns [n, T, H, D].
    """
    if kwargs.get("s_aux") is not None:
        raise EngineError(f"{type(module).__name__} uses attention sinks, which the torch engine does not compute")
    length, width = query.shape[2], key.shape[2]
    if sliding_window is not None and width > sliding_window:
        if length == 1:
            key, value = key[:, :, -sliding_window:], value[:, :, -sliding_window:]
            attention_mask = None if attention_mask is None else attention_mask[..., -sliding_window:]
        else:
            attention_mask = _windowed(attention_mask, length, width, sliding_window, query)
    if softcap is not None:
        return _softcapped(query, key, value, attention_mask, scaling, softcap), None
    if length == 1:
        return StepAttention(attention_mask, scaling)(query.squeeze(2), key, value).view(
            query.shape[0], 1, query.shape[1], -1
        ), None
    out = functional.scaled_dot_product_attention(
        query, key, value, attn_mask=attention_mask, is_causal=attention_mask is None, scale=scaling, enable_gqa=True
    )
    return out.transpose(1, 2), None


def causal_bias(length: int, width: int, like: torch.Tensor) -> torch.Tensor:
    """Additive [length, width] mask: query i, at column width − length + i, sees the columns up to its own."""
    blocked = torch.full((length, width), float("-inf"), dtype=like.dtype, device=like.device)
    return blocked.triu_(width - length + 1)


def _windowed(mask: torch.Tensor | None, length: int, width: int, sliding_window: int, like: torch.Tensor) -> torch.Tensor:
    """Add to the mask that a query sees the last `sliding_window` columns only, its own among them."""
    base = causal_bias(length, width, like) if mask is None else mask
    too_old = torch.ones((length, width), dtype=torch.bool, device=like.device).tril_(width - length - sliding_window)
    return base.masked_fill(too_old, float("-inf"))


def _softcapped(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    mask: torch.Tensor | None,
    scaling: float | None,
    softcap: float,
) -> torch.Tensor:
    _, heads, length, dim = query.shape
    groups = heads // key.shape[1]
    scale = dim**-0.5 if scaling is None else scaling
    scores = torch.matmul(query, key.repeat_interleave(groups, 1).transpose(2, 3)) * scale
    scores = torch.tanh(scores / softcap) * softcap
    if mask is None and length > 1:
        mask = causal_bias(length, key.shape[2], query)
    if mask is not None:
        scores = scores + mask
    weights = torch.softmax(scores, -1, dtype=torch.float32).to(query.dtype)
    return torch.matmul(weights, value.repeat_interleave(groups, 1)).transpose(1, 2)


class DecodeView(Cache):
    """What a model sees as its cache in a decoding step: it writes one column and reads the window."""

    def __init__(self, cache: ColumnCache) -> None:
        super().__init__(layers=[])
        self._length = cache.cur - cache.lo
        self._targets, self._windows = cache.step_views()

    def update(self, key_states: torch.Tensor, value_states: torch.Tensor, layer_idx: int, *_: Any, **__: Any) -> KeyValue:
        keys, values = 2 * layer_idx, 2 * layer_idx + 1
        self._targets[keys].copy_(key_states.squeeze(2))
        self._targets[values].copy_(value_states.squeeze(2))
        return self._windows[keys], self._windows[values]

    def get_seq_length(self, layer_idx: int = 0) -> int:
        return self._length


class CollectView(Cache):
    """What a model sees as its cache when prompts are prefilled: an empty one that keeps each layer's keys and values."""

    def __init__(self) -> None:
        super().__init__(layers=[])
        self.collected: dict[int, KeyValue] = {}

    def update(self, key_states: torch.Tensor, value_states: torch.Tensor, layer_idx: int, *_: Any, **__: Any) -> KeyValue:
        self.collected[layer_idx] = (key_states, value_states)
        return key_states, value_states

    def get_seq_length(self, layer_idx: int = 0) -> int:
        return 0


AttentionInterface.register(ATTENTION_NAME, column_attention)
