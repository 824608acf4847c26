"""The demo's policy: a llama of 0.16 M parameters that reads and writes characters, as an ordinary Hugging Face directory."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path

import torch
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedModel, PreTrainedTokenizerFast

from async_rl.model.load import no_progress_bars

PAD, EOS, UNKNOWN = "<pad>", "<eos>", "<unk>"
ALPHABET = "0123456789>=+-*, .\n"


def demo_tokenizer() -> PreTrainedTokenizerFast:
    """One token per character of ALPHABET and three special ones: a vocabulary of 22. It adds no special token by itself."""
    vocabulary = {token: index for index, token in enumerate([PAD, EOS, UNKNOWN, *ALPHABET])}
    core = Tokenizer(models.WordLevel(vocabulary, unk_token=UNKNOWN))
    core.pre_tokenizer = pre_tokenizers.Split(Regex(r"[\s\S]"), "isolated")
    core.decoder = decoders.Fuse()
    make: Callable[..., PreTrainedTokenizerFast] = PreTrainedTokenizerFast
    return make(tokenizer_object=core, pad_token=PAD, eos_token=EOS, unk_token=UNKNOWN)


def demo_model(tokenizer: PreTrainedTokenizerFast, *, seed: int, num_heads: int = 4) -> PreTrainedModel:
    """A fresh float32 llama: hidden 64, 3 layers. Equal seeds make equal weights; torch's own state is untouched."""
    config = LlamaConfig(
        vocab_size=len(tokenizer),
        hidden_size=64,
        intermediate_size=192,
        num_hidden_layers=3,
        num_attention_heads=num_heads,
        num_key_value_heads=num_heads,
        max_position_embeddings=256,
        tie_word_embeddings=False,
        bos_token_id=None,
        pad_token_id=tokenizer.pad_token_id,
        eos_token_id=tokenizer.eos_token_id,
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return LlamaForCausalLM(config)  # float32, torch's default


def save_model(directory: Path, model: PreTrainedModel, tokenizer: PreTrainedTokenizerFast) -> None:
    """Write the directory whole or not at all."""
    partial = directory.with_name(f"{directory.name}.partial")
    shutil.rmtree(partial, ignore_errors=True)
    with no_progress_bars():
        model.save_pretrained(partial)
    tokenizer.save_pretrained(partial)
    partial.rename(directory)
