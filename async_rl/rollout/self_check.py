"""Does the engine compute what the model computes? Asked once, when a model is loaded."""

from __future__ import annotations

from typing import Any, cast

import torch
from transformers import PreTrainedModel

from async_rl.errors import EngineError
from async_rl.rollout.attention import ATTENTION_NAME
from async_rl.rollout.decode_batch import left_padded, prefill_inputs
from async_rl.rollout.forward import Forward, vocabulary_size
from async_rl.rollout.kv_cache import ColumnCache
from async_rl.rollout.token_table import TokenTable
from protocol.messages import SamplingParams

_NUM_DECODED = 2
_LONGEST_CHECK = 256
_TOLERANCE = {torch.float32: 1e-4, torch.bfloat16: 6e-2}
"""Largest difference of logits accepted, relative to the largest logit."""


@torch.inference_mode()
def check_against_model(model: PreTrainedModel, forward: Forward) -> None:
    """Compare prefill and decoding of two prompts of different lengths with the model's own eager attention, unpadded.

    Raises: EngineError if they differ: the model does something with positions, masks or caches that the engine does not.
    """
    vocab_size = vocabulary_size(model)
    sequences = [torch.arange(3, 3 + 7 * length, 7) % vocab_size for length in _lengths(model)]
    found = _decoded(forward, sequences, model.dtype, model.device)
    expected = _reference(model, sequences)
    difference = float((found - expected).abs().max() / expected.abs().max())
    if not difference <= _TOLERANCE[model.dtype]:
        raise EngineError(
            f"rollout.engine=torch cannot run {type(model).__name__}: its logits differ from the model's own by "
            f"{difference:.1e} (relative; at most {_TOLERANCE[model.dtype]:.0e}); it treats positions, masks or its cache "
            "in a way of its own"
        )


def _lengths(model: PreTrainedModel) -> tuple[int, int]:
    """Two lengths, the first beyond the model's sliding window if it has a short one."""
    window = getattr(model.config, "sliding_window", None)
    longest = window + 3 + _NUM_DECODED if isinstance(window, int) and window + 8 <= _LONGEST_CHECK else 7
    context = getattr(model.config, "max_position_embeddings", None) or longest
    return min(longest, context), min(4, context)


def _decoded(forward: Forward, sequences: list[torch.Tensor], dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """Logits [rows, 1 + _NUM_DECODED, V] after each prompt and after each further token, as the engine decodes them."""
    prompts = [sequence[:-_NUM_DECODED].numpy() for sequence in sequences]
    rows, end = len(prompts), max(prompt.size for prompt in prompts)
    table, cache = TokenTable(dtype, device), ColumnCache(forward.layers, dtype, device)
    table.move(0, 0, 0, rows, end + _NUM_DECODED)
    cache.move(end, rows, end + _NUM_DECODED)
    logits, layers = forward.prefill(*prefill_inputs(*left_padded(prompts), dtype, device))
    params = SamplingParams(temperature=1.0, max_new_tokens=_NUM_DECODED + 1, seed=0)
    table.add(0, end, [(prompt, params) for prompt in prompts], max_context=end + _NUM_DECODED + 1, version=0)
    cache.fill(slice(0, rows), end, layers, None)
    cache.num_rows = rows
    cache.lo = table.first_start()
    found = [logits]
    for step in range(_NUM_DECODED):
        following = torch.stack([sequence[step - _NUM_DECODED] for sequence in sequences])
        table.ids[:rows, end + step] = following.numpy()
        found.append(forward.decode(*table.inputs(end + step), table.bias(cache.lo, end + step + 1), cache))
        cache.cur += 1
    return torch.stack(found, 1).float()


def _reference(model: PreTrainedModel, sequences: list[torch.Tensor]) -> torch.Tensor:
    keep = 1 + _NUM_DECODED
    switch = cast(Any, model).set_attn_implementation
    switch("eager")
    try:
        outputs = [cast(Any, model)(input_ids=ids.unsqueeze(0).to(model.device), use_cache=False) for ids in sequences]
    finally:
        switch(ATTENTION_NAME)
    return torch.stack([output.logits[0, -keep:] for output in outputs]).float()
