"""The llama family (llama, mistral, qwen2, qwen3) without the overhead of its modules: a third of the calls per token.

Query, key and value projections are one matrix, gate and up another, each stored transposed (small batches multiply twice as
fast). The model's own parameters become views of these matrices, so weights that are copied into the model are the ones
that are used: there is no packed copy that could go stale.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, cast

import torch
from torch import nn
from torch.nn import functional
from transformers import PreTrainedModel

from async_rl.rollout.attention import StepAttention
from async_rl.rollout.kv_cache import ColumnCache, KeyValue, LayerShape

_CLASSES = frozenset({"LlamaForCausalLM", "MistralForCausalLM", "Qwen2ForCausalLM", "Qwen3ForCausalLM"})
_ROPE_BY_POSITION = frozenset({"default", "linear", "llama3", "yarn"})
"""Rotary embeddings that depend on a token's position alone (not on the longest sequence seen)."""

_PAD = 16
"""Columns beside the residual stream: 64 bytes, so that rows stay aligned."""

Attend = Callable[[int, torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]


@dataclass(frozen=True, slots=True, eq=False)
class _Layer:
    """Weights of one layer; matrices are [in, out] and contiguous."""

    norm_1: torch.Tensor
    qkv: torch.Tensor
    qkv_bias: torch.Tensor | None
    query_norm: torch.Tensor | None
    key_norm: torch.Tensor | None
    out: torch.Tensor
    norm_2: torch.Tensor
    gate_up: torch.Tensor
    down: torch.Tensor


def is_fusable(model: PreTrainedModel, max_context: int) -> bool:
    """True for the models that this file computes: silu-gated MLP, rotary positions, full attention, no odd biases.

    A sliding window counts as full attention when max_context fits in it.
    """
    config = cast(Any, model.config)
    if type(model).__name__ not in _CLASSES or config.hidden_act != "silu":
        return False
    rope = getattr(config, "rope_parameters", None) or {}
    layers = cast(Any, model).model.layers
    return (
        rope.get("rope_type", "default") in _ROPE_BY_POSITION
        and all(_window(layer, config) >= max_context for layer in layers)
        and all(_biases_fit(layer) for layer in layers)
        and _head_dim(model) % 2 == 0
    )


def _window(layer: Any, config: Any) -> float:
    """Tokens that a layer attends to; where its attention has no such field, the config's holds for all layers."""
    window = getattr(layer.self_attn, "sliding_window", getattr(config, "sliding_window", None))
    return math.inf if window is None else float(window)


def _biases_fit(layer: Any) -> bool:
    attention, mlp = layer.self_attn, layer.mlp
    qkv = [linear.bias is not None for linear in (attention.q_proj, attention.k_proj, attention.v_proj)]
    others = (attention.o_proj, mlp.gate_proj, mlp.up_proj, mlp.down_proj)
    return len(set(qkv)) == 1 and all(linear.bias is None for linear in others)


def _head_dim(model: PreTrainedModel) -> int:
    return int(cast(Any, model).model.layers[0].self_attn.head_dim)


class FusedLlamaForward:
    """A Forward (see forward.Forward) for one model, whose parameters it turns into views of its own matrices."""

    def __init__(self, model: PreTrainedModel) -> None:
        inner, config = cast(Any, model).model, cast(Any, model.config)
        self._head_dim = _head_dim(model)
        self._heads: int = config.num_attention_heads
        self._kv_heads: int = config.num_key_value_heads
        self._scale = float(inner.layers[0].self_attn.scaling)
        self._eps = float(config.rms_norm_eps)
        self._embedding: torch.Tensor = inner.embed_tokens.weight.detach()
        self._zero = self._embedding.new_zeros(())
        self._root_size = math.sqrt(self._embedding.shape[1])
        self._layers = [_take_layer(layer) for layer in inner.layers]
        self._norm: torch.Tensor = inner.norm.weight.detach()
        head = cast(Any, model).lm_head
        is_tied = head.weight is inner.embed_tokens.weight
        self._head = head.weight.detach().t() if is_tied else _transposed([head])
        self._rotary: Any = inner.rotary_emb
        self._rope = self._rope_table(0)
        self.layers: Sequence[LayerShape] = [LayerShape(self._kv_heads, self._head_dim, self._head_dim) for _ in self._layers]

    def prefill(
        self, ids: torch.Tensor, positions: torch.Tensor, bias: torch.Tensor | None
    ) -> tuple[torch.Tensor, Sequence[KeyValue]]:
        pairs: list[KeyValue] = []
        hidden = self._whole(ids, positions, bias, pairs)
        return hidden[:, -1].mm(self._head), pairs

    def decode(self, ids: torch.Tensor, positions: torch.Tensor, bias: torch.Tensor | None, cache: ColumnCache) -> torch.Tensor:
        targets, windows = cache.step_views()
        attention = StepAttention(bias, self._scale)

        def attend(layer: int, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
            keys, values = 2 * layer, 2 * layer + 1
            targets[keys].copy_(key)
            targets[values].copy_(value)
            return attention(query, windows[keys], windows[values])

        return self._run(ids, positions, cache.cur - cache.lo, attend).mm(self._head)

    def logits(self, ids: torch.Tensor) -> torch.Tensor:
        positions = torch.arange(ids.shape[1], device=ids.device).expand_as(ids)
        return torch.matmul(self._whole(ids, positions, None, []), self._head)

    def _whole(
        self, ids: torch.Tensor, positions: torch.Tensor, bias: torch.Tensor | None, pairs: list[KeyValue]
    ) -> torch.Tensor:
        """Hidden states [g, T, C] of whole sequences; appends each layer's keys and values [g, heads, T, dim] to `pairs`."""
        g, length = ids.shape

        def attend(_: int, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
            query, key, value = (x.view(g, length, *x.shape[1:]).transpose(1, 2) for x in (query, key, value))
            pairs.append((key, value))
            out = functional.scaled_dot_product_attention(
                query, key, value, attn_mask=bias, is_causal=bias is None, scale=self._scale, enable_gqa=True
            )
            return out.transpose(1, 2).reshape(g * length, -1)

        return self._run(ids.reshape(-1), positions.reshape(-1), length, attend).view(g, length, -1)

    def _run(self, ids: torch.Tensor, positions: torch.Tensor, max_position: int, attend: Attend) -> torch.Tensor:
        """Hidden states [n, C] of n tokens, after the final norm.

        attend: given the layer, rotated queries and keys, and values [n, heads, dim], returns [n, heads × dim].
        """
        if max_position >= self._rope.shape[0]:
            self._rope = self._rope_table(max_position)
        cos, sin = self._rope.index_select(0, positions).unbind(1)
        heads, kv_heads, dim = self._heads, self._kv_heads, self._head_dim
        padded, x = self._residual_stream(ids)
        for index, layer in enumerate(self._layers):
            normed = self._rms(padded, x, layer.norm_1)
            qkv = normed.mm(layer.qkv) if layer.qkv_bias is None else torch.addmm(layer.qkv_bias, normed, layer.qkv)
            rotated, value = qkv.view(-1, heads + 2 * kv_heads, dim).split_with_sizes((heads + kv_heads, kv_heads), 1)
            if layer.query_norm is not None and layer.key_norm is not None:
                query, key = rotated.split_with_sizes((heads, kv_heads), 1)
                rotated = torch.cat((_rms(query, layer.query_norm, self._eps), _rms(key, layer.key_norm, self._eps)), 1)
            rotated = torch.addcmul(rotated * cos, rotated.roll(dim // 2, -1), sin)
            query, key = rotated.split_with_sizes((heads, kv_heads), 1)
            x.addmm_(attend(index, query, key, value), layer.out)
            gate, up = self._rms(padded, x, layer.norm_2).mm(layer.gate_up).chunk(2, 1)
            x.addmm_(functional.silu(gate).mul_(up), layer.down)
        return self._rms(padded, x, self._norm)

    def _residual_stream(self, ids: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Embeddings x [n, C], as a view of a tensor whose 16 further columns add C × eps to the sum of its squares.

        So the norm of its rows is sqrt(C × (mean(x²) + eps)), the whole divisor of RMSNorm, in one call.
        """
        size = self._embedding.shape[1]
        padded = self._embedding.new_full((ids.shape[0], size + _PAD), math.sqrt(size * self._eps / _PAD))
        x = padded.narrow(1, 0, size)
        x.copy_(functional.embedding(ids, self._embedding))
        return padded, x

    def _rms(self, padded: torch.Tensor, x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        """RMSNorm of the residual stream [n, C]."""
        if x.dtype is not torch.float32:
            return _rms(x, weight, self._eps)
        norm = torch.linalg.vector_norm(padded, dim=1, keepdim=True)
        return torch.addcdiv(self._zero, x, norm, value=self._root_size).mul_(weight)

    def _rope_table(self, max_position: int) -> torch.Tensor:
        """[positions, 2, 1, dim]: cosines, and sines with the sign that rotating by halves gives them."""
        length = max(256, 2 * max_position)
        like = self._embedding.new_zeros(1)
        cos, sin = self._rotary(like, torch.arange(length, device=like.device).unsqueeze(0))
        signed = sin[0].clone()
        signed[:, : self._head_dim // 2].neg_()
        return torch.stack((cos[0], signed), 1).unsqueeze(2)


def _rms(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    """x / sqrt(mean(x²) + eps) × weight over the last dimension, normalised in float32 and rounded before the product."""
    wide = x.float()
    scale = torch.rsqrt(wide.square().mean(-1, keepdim=True) + eps)
    return (wide * scale).to(x.dtype).mul_(weight)


def _take_layer(layer: Any) -> _Layer:
    attention, mlp = layer.self_attn, layer.mlp
    qkv = (attention.q_proj, attention.k_proj, attention.v_proj)
    return _Layer(
        norm_1=layer.input_layernorm.weight.detach(),
        qkv=_transposed(qkv),
        qkv_bias=None if qkv[0].bias is None else _joined_bias(qkv),
        query_norm=attention.q_norm.weight.detach() if hasattr(attention, "q_norm") else None,
        key_norm=attention.k_norm.weight.detach() if hasattr(attention, "k_norm") else None,
        out=_transposed([attention.o_proj]),
        norm_2=layer.post_attention_layernorm.weight.detach(),
        gate_up=_transposed([mlp.gate_proj, mlp.up_proj]),
        down=_transposed([mlp.down_proj]),
    )


def _transposed(linears: Sequence[nn.Linear]) -> torch.Tensor:
    """One contiguous [in, sum of out] matrix; the linears' weights become views of it."""
    joined = torch.cat([linear.weight.detach() for linear in linears]).t().contiguous()
    for linear, part in zip(linears, torch.split(joined, [linear.out_features for linear in linears], 1), strict=True):
        linear.weight.data = part.t()
    return joined


def _joined_bias(linears: Sequence[nn.Linear]) -> torch.Tensor:
    joined = torch.cat([linear.bias.detach() for linear in linears])
    for linear, part in zip(linears, torch.split(joined, [linear.out_features for linear in linears]), strict=True):
        linear.bias.data = part
    return joined
