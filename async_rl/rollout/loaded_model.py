"""A model, made ready to decode, score and take weights. Everything here runs on the decoding thread."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np
import numpy.typing as npt
import torch
from transformers import PreTrainedModel

from async_rl.config.rollout import RolloutConfig
from async_rl.errors import DataError
from async_rl.model.load import load_causal_lm
from async_rl.rollout.attention import ATTENTION_NAME
from async_rl.rollout.decode_batch import DecodeBatch
from async_rl.rollout.forward import Forward, ModuleForward, require_supported, vocabulary_size
from async_rl.rollout.fused_llama import FusedLlamaForward, is_fusable
from async_rl.rollout.model_names import context_of
from async_rl.rollout.sampling import tempered_logprobs
from async_rl.rollout.self_check import check_against_model
from async_rl.rollout.weight_store import WeightStore

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}
MAX_SCORE_TOKENS = 4096
"""Padded tokens per scoring pass: bounds the logits held at a time."""


class LoadedModel:
    """The parts of an engine that need the model."""

    def __init__(self, model: PreTrainedModel, config: RolloutConfig, now: Callable[[], float]) -> None:
        require_supported(model)
        self.vocab_size = vocabulary_size(model)
        self.max_context = context_of(model, config)
        self._device = torch.device(config.device)
        self._forward: Forward = FusedLlamaForward(model) if is_fusable(model, self.max_context) else ModuleForward(model)
        check_against_model(model, self._forward)
        self.weights = WeightStore(model)
        self.batch = DecodeBatch(
            self._forward,
            dtype=DTYPES[config.dtype],
            device=self._device,
            max_running=config.max_running,
            max_context=self.max_context,
            now=now,
        )

    def checked_sequence(self, sequence: Sequence[int]) -> npt.NDArray[np.int64]:
        """Raises: DataError if the sequence is empty, longer than the context or holds an id outside the vocabulary."""
        ids = np.asarray(sequence, dtype=np.int64)
        if not 1 <= ids.size <= self.max_context:
            raise DataError(f"sequence of {ids.size} tokens cannot be scored: the context holds 1 to {self.max_context}")
        if ids.min() < 0 or ids.max() >= self.vocab_size:
            raise DataError(f"sequence holds token ids outside the model's vocabulary of {self.vocab_size}")
        return ids

    @torch.inference_mode()
    def score(self, sequences: Sequence[npt.NDArray[np.int64]], temperature: float) -> list[npt.NDArray[np.float32]]:
        """Logprobs [len − 1] per sequence, in nats at `temperature`; leaves the decoding rows alone."""
        order = sorted(range(len(sequences)), key=lambda index: sequences[index].size)
        scores: list[npt.NDArray[np.float32]] = [np.empty(0, dtype=np.float32)] * len(sequences)
        while order:
            longest = sequences[order[-1]].size
            count = max(1, MAX_SCORE_TOKENS // longest)
            chunk, order = order[-count:], order[:-count]
            ids = torch.zeros((len(chunk), longest), dtype=torch.long)
            for row, index in enumerate(chunk):
                ids[row, : sequences[index].size] = torch.from_numpy(sequences[index])
            ids = ids.to(self._device)
            logprobs = tempered_logprobs(self._forward.logits(ids)[:, :-1], temperature)
            chosen = logprobs.gather(2, ids[:, 1:].unsqueeze(2)).squeeze(2).cpu().numpy()
            for row, index in enumerate(chunk):
                scores[index] = chosen[row, : sequences[index].size - 1].copy()
        return scores


def load_model(path: Path, config: RolloutConfig, now: Callable[[], float]) -> LoadedModel:
    """Load a Hugging Face directory for decoding. Raises: DataError, ConfigError, EngineError."""
    torch.set_num_threads(config.num_threads)  # of this thread: OpenMP keeps the number per thread
    model = load_causal_lm(path, dtype=DTYPES[config.dtype], device=config.device, attn=ATTENTION_NAME)
    return LoadedModel(model, config, now)
