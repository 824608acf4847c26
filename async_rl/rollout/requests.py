"""What the decoding thread works on: one request is one prompt with its members."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from async_rl.errors import DataError, EngineError
from async_rl.rollout.engine import Completion
from protocol.messages import SamplingParams


@dataclass(slots=True, eq=False)
class Request:
    """One `generate` call: a prompt, and a completion per member. Owned by the decoding thread once submitted."""

    prompt: npt.NDArray[np.int64]
    sampling: Sequence[SamplingParams]
    submitted_s: float
    future: asyncio.Future[Sequence[Completion]] | None = None
    completions: list[Completion | None] = field(default_factory=list)
    num_admitted: int = 0
    num_left: int = 0
    cancelled: bool = False

    def __post_init__(self) -> None:
        self.num_left = len(self.sampling)
        self.completions = [None] * len(self.sampling)

    def complete(self, member: int, completion: Completion) -> None:
        self.completions[member] = completion
        self.num_left -= 1

    def result(self) -> Sequence[Completion]:
        return [completion for completion in self.completions if completion is not None]


def checked_request(
    prompt_ids: Sequence[int], sampling: Sequence[SamplingParams], *, max_context: int, vocab_size: int, now_s: float
) -> Request:
    """Return a request that the engine can serve.

    Raises: DataError if the prompt is empty, leaves no room for a token or holds an id outside the vocabulary;
    EngineError for sampling parameters that the engine refuses.
    """
    prompt = np.asarray(prompt_ids, dtype=np.int64)
    if not 1 <= prompt.size < max_context:
        raise DataError(
            f"prompt of {prompt.size} tokens: needs 1 to {max_context - 1}, so that a token fits in the context ({max_context})"
        )
    if prompt.min() < 0 or prompt.max() >= vocab_size:
        bad = prompt[(prompt < 0) | (prompt >= vocab_size)][0]
        raise DataError(f"prompt holds token id {bad}, outside the model's vocabulary of {vocab_size}")
    for params in sampling:
        _check_params(params)
    return Request(prompt, tuple(sampling), now_s)


def _check_params(params: SamplingParams) -> None:
    if params.top_p < 1.0 or params.top_k > 0:
        raise EngineError(
            f"top_p={params.top_p}, top_k={params.top_k}: truncated sampling is refused, because the trainer would need the "
            "stored support of every token; use top_p=1 and top_k=0"
        )
    if not params.temperature > 0:
        raise EngineError(f"temperature={params.temperature} must be above 0; for near-greedy sampling use a small value")
    if params.max_new_tokens < 1:
        raise EngineError(f"max_new_tokens={params.max_new_tokens} must be at least 1")
    if not 0 <= params.seed < 2**63:
        raise EngineError(f"seed={params.seed} must be in [0, 2**63)")
