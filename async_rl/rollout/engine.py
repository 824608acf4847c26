"""What every rollout engine does: generate, score, take weights. Implemented by torch_engine and vllm_engine."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum, auto
from typing import Protocol

import numpy as np
import numpy.typing as npt

from async_rl.weights.interfaces import Scorer, WeightSink
from protocol.lease import Work
from protocol.messages import FinishReason, SamplingParams


@dataclass(frozen=True, slots=True, eq=False)
class Completion:
    """One sampled turn. All arrays have one entry per sampled token [N]; a sampled stop token is the last one.

    logprobs: float32, nats, of the sampled token under the tempered distribution, from the engine.
    versions, kv_versions: int64, the version that sampled the token and the oldest version in the KV that it attended to.
    """

    token_ids: npt.NDArray[np.int32]
    logprobs: npt.NDArray[np.float32]
    versions: npt.NDArray[np.int64]
    kv_versions: npt.NDArray[np.int64]
    finish_reason: FinishReason
    queued_s: float
    generate_s: float


class Phase(Enum):
    """What the held weights are good for."""

    UNPROVEN = auto()  # no version was served yet: requests are refused
    SERVING = auto()
    SWAPPED = auto()  # new weights await their proof: requests wait
    WITHDRAWN = auto()  # the held weights are not to be used: running requests wait, new ones are refused


class Sampler(Protocol):
    """The part of an engine that a group needs."""

    @property
    def engine_id(self) -> str: ...

    @property
    def max_context(self) -> int:
        """Prompt and sampled tokens of one sequence, at most."""
        ...

    @property
    def serving_version(self) -> int | None: ...

    async def generate(self, prompt_ids: Sequence[int], sampling: Sequence[SamplingParams]) -> Sequence[Completion]:
        """Sample one completion per entry of `sampling`, all from the same prompt.

        Raises: DataError if the prompt leaves no room for a token; NotServing; EngineError if the engine died.
        """
        ...

    async def close(self) -> None: ...


class RolloutEngine(Sampler, Scorer, WeightSink, Protocol):
    """An engine that samples while its weights change underneath.

    `serving_version` (from WeightSink) is None until a complete version was swapped in and `serve` was called; `generate`
    raises NotServing before the first one, and waits while a swap is in progress.
    """

    @property
    def work(self) -> Work:
        """What its own thread or process does now; progress is marked at every decoded token batch, or at every output."""
        ...

    async def start(self) -> None: ...
