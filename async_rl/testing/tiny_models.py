"""Tiny causal LMs and a character tokenizer as ordinary Hugging Face directories: real models, made in milliseconds."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from enum import StrEnum
from pathlib import Path
from typing import Any, cast

import torch
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers
from torch import nn
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedConfig, PreTrainedModel, PreTrainedTokenizerFast

from async_rl.model.load import no_progress_bars

PAD_TOKEN, EOS_TOKEN, UNK_TOKEN = "<pad>", "<eos>", "<unk>"
SPECIAL_TOKENS = (PAD_TOKEN, EOS_TOKEN, UNK_TOKEN)
PAD_ID, EOS_ID, UNK_ID = 0, 1, 2
ALPHABET = "0123456789>=+-*, .\n"
"""Characters of the default tokenizer; with the three special tokens a vocabulary of 22."""


class TinyModel(StrEnum):
    """Architectures that differ in what a trainer and an engine must get right."""

    LLAMA = "llama"  # untied head, multi-head attention
    LLAMA_TIED = "llama_tied"  # tied head, grouped-query attention
    QWEN2 = "qwen2"  # biases in q, k, v
    QWEN3 = "qwen3"  # norms on q and k
    MISTRAL = "mistral"  # sliding window of 8
    GEMMA2 = "gemma2"  # soft-capped scores and logits, sliding and full layers, scaled embeddings, tied
    GPT2 = "gpt2"  # learned positions, LayerNorm, fused qkv with biases, tied, dropout in its config


_LLAMA_LIKE: Mapping[str, Any] = {
    "hidden_size": 64,
    "intermediate_size": 192,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 256,
    "tie_word_embeddings": False,
    "bos_token_id": None,
    "pad_token_id": PAD_ID,
    "eos_token_id": EOS_ID,
}
_GPT2: Mapping[str, Any] = {
    "n_embd": 64,
    "n_layer": 3,
    "n_head": 4,
    "n_positions": 256,
    "bos_token_id": None,
    "pad_token_id": PAD_ID,
    "eos_token_id": EOS_ID,
}
_GEMMA2: Mapping[str, Any] = {"tie_word_embeddings": True, "sliding_window": 8, "query_pre_attn_scalar": 16}
_SETTINGS: Mapping[TinyModel, tuple[str, Mapping[str, Any]]] = {
    TinyModel.LLAMA: ("llama", {**_LLAMA_LIKE, "num_key_value_heads": 4}),
    TinyModel.LLAMA_TIED: ("llama", {**_LLAMA_LIKE, "tie_word_embeddings": True}),
    TinyModel.QWEN2: ("qwen2", {key: value for key, value in _LLAMA_LIKE.items() if key != "head_dim"}),
    TinyModel.QWEN3: ("qwen3", _LLAMA_LIKE),
    TinyModel.MISTRAL: ("mistral", {**_LLAMA_LIKE, "sliding_window": 8}),
    TinyModel.GEMMA2: ("gemma2", {**_LLAMA_LIKE, **_GEMMA2}),
    TinyModel.GPT2: ("gpt2", _GPT2),
}


def char_tokenizer(alphabet: str = ALPHABET, *, chat_template: str | None = None) -> PreTrainedTokenizerFast:
    """Return a fast tokenizer with one token per character: `<pad>` 0, `<eos>` 1, `<unk>` 2, then `alphabet` in order.

    It adds no BOS. Decoding joins the characters without spaces.
    """
    vocabulary = {token: index for index, token in enumerate([*SPECIAL_TOKENS, *alphabet])}
    core = Tokenizer(models.WordLevel(vocabulary, unk_token=UNK_TOKEN))
    core.pre_tokenizer = pre_tokenizers.Split(Regex(r"[\s\S]"), "isolated")
    core.decoder = decoders.Fuse()
    make: Callable[..., PreTrainedTokenizerFast] = PreTrainedTokenizerFast
    tokenizer = make(
        tokenizer_object=core,
        pad_token=PAD_TOKEN,
        eos_token=EOS_TOKEN,
        unk_token=UNK_TOKEN,
        clean_up_tokenization_spaces=False,
    )
    tokenizer.chat_template = chat_template
    return tokenizer


def tiny_config(kind: TinyModel | str = TinyModel.LLAMA, **overrides: Any) -> PreTrainedConfig:
    """Return the architecture's config (vocabulary 22, hidden 64, 3 layers, 4 heads, context 256), changed by `overrides`."""
    model_type, settings = _SETTINGS[TinyModel(kind)]
    vocab_size = len(SPECIAL_TOKENS) + len(ALPHABET)
    return AutoConfig.for_model(model_type, **{"vocab_size": vocab_size, **settings, **overrides})


def make_tiny_model(
    kind: TinyModel | str = TinyModel.LLAMA, *, seed: int = 0, sharpness: float = 1.0, **overrides: Any
) -> PreTrainedModel:
    """Return a freshly initialised float32 model in eval mode; the caller's random state is untouched.

    sharpness multiplies every matrix: at 1 the next-token distribution is nearly uniform, at 3 clearly not.
    """
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        make: Callable[..., nn.Module] = AutoModelForCausalLM.from_config
        model = make(tiny_config(kind, **overrides), dtype=torch.float32)
        with torch.no_grad():
            for parameter in model.parameters():
                if parameter.dim() >= 2:
                    parameter.mul_(sharpness)
    return cast(PreTrainedModel, model.eval())


def save_tiny_model(
    directory: Path, kind: TinyModel | str = TinyModel.LLAMA, *, seed: int = 0, sharpness: float = 1.0, **overrides: Any
) -> Path:
    """Write model, config and character tokenizer as a Hugging Face directory, and return it."""
    model = make_tiny_model(kind, seed=seed, sharpness=sharpness, **overrides)
    with no_progress_bars():
        model.save_pretrained(directory)
    char_tokenizer().save_pretrained(directory)
    return directory
