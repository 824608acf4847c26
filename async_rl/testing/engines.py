"""A rollout engine that says what it is told: for tests of what is around an engine."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import numpy as np
import numpy.typing as npt
import torch

from async_rl.errors import NotServing
from async_rl.rollout.engine import Completion
from async_rl.weights.manifest import Manifest
from protocol.lease import Work
from protocol.messages import FinishReason, SamplingParams

Script = Callable[[Sequence[int], SamplingParams], tuple[Sequence[int], FinishReason]]
"""(prompt ids, sampling) → (sampled ids, finish reason)."""


class ScriptedEngine:
    """Implements RolloutEngine; every sampled token has logprob −(index + 1)/8 and the version served at the call."""

    def __init__(self, script: Script, *, engine_id: str = "engine-0", max_context: int = 64, version: int | None = 0) -> None:
        self._script = script
        self._engine_id = engine_id
        self._max_context = max_context
        self._version = version
        self.work = Work()
        self.prompts: list[list[int]] = []
        self.seeds: list[int] = []

    @property
    def engine_id(self) -> str:
        return self._engine_id

    @property
    def max_context(self) -> int:
        return self._max_context

    @property
    def serving_version(self) -> int | None:
        return self._version

    async def start(self) -> None:
        return

    async def close(self) -> None:
        return

    async def generate(self, prompt_ids: Sequence[int], sampling: Sequence[SamplingParams]) -> Sequence[Completion]:
        if self._version is None:
            raise NotServing("no version is served yet")
        self.prompts.append(list(prompt_ids))
        return [self._complete(prompt_ids, one) for one in sampling]

    def _complete(self, prompt_ids: Sequence[int], sampling: SamplingParams) -> Completion:
        self.seeds.append(sampling.seed)
        token_ids, finish_reason = self._script(prompt_ids, sampling)
        if len(token_ids) > sampling.max_new_tokens:
            token_ids, finish_reason = token_ids[: sampling.max_new_tokens], FinishReason.LENGTH
        count = len(token_ids)
        versions = np.full(count, self._version or 0, dtype=np.int64)
        return Completion(
            token_ids=np.array(token_ids, dtype=np.int32),
            logprobs=np.arange(1, count + 1, dtype=np.float32) / np.float32(-8),
            versions=versions,
            kv_versions=versions,
            finish_reason=finish_reason,
            queued_s=0.0,
            generate_s=0.0,
        )

    async def score(self, sequences: Sequence[Sequence[int]], *, temperature: float) -> Sequence[npt.NDArray[np.float32]]:
        return [np.zeros(max(0, len(sequence) - 1), dtype=np.float32) for sequence in sequences]

    def check(self, manifest: Manifest) -> None:
        return

    async def swap(self, manifest: Manifest, tensors: Mapping[str, torch.Tensor]) -> None:
        return

    def digests(self, manifest: Manifest) -> Mapping[str, str]:
        return {entry.name: entry.digest for entry in manifest.entries}

    async def serve(self, version: int) -> None:
        self._version = version

    async def withdraw(self, reason: str) -> None:
        self._version = None
