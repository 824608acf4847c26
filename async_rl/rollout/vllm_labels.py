"""Labels of the weights that a vLLM holds, and what they say about the tokens that it sampled."""

from __future__ import annotations

import secrets
from dataclasses import dataclass
from enum import Enum, auto
from typing import Literal

import numpy as np

from async_rl.errors import EngineError
from async_rl.rollout.engine import Completion
from async_rl.rollout.vllm_host import Sampled
from protocol.messages import FinishReason


class Trust(Enum):
    """What weights have shown."""

    UNPROVEN = auto()
    PROVEN = auto()
    REFUSED = auto()


@dataclass(slots=True, eq=False)
class LabelledWeights:
    """What one label stands for: one swap, even if another one brought the same version."""

    label: str
    version: int | None  # None: the model directory's
    trust: Trust = Trust.UNPROVEN


class Labels:
    """Every label that one engine gave out. Those of an earlier engine on the same server are not among them."""

    def __init__(self) -> None:
        self._nonce = secrets.token_hex(4)
        self._known: dict[str, LabelledWeights] = {}

    def new(self, version: int | None) -> LabelledWeights:
        name = "start" if version is None else f"v{version}"
        weights = LabelledWeights(f"{name}-{self._nonce}-{len(self._known) + 1}", version)
        self._known[weights.label] = weights
        return weights

    def weights_of(self, sampled: Sampled) -> list[LabelledWeights]:
        """What sampled a completion. Raises: EngineError if it was none of ours, or not every token says."""
        if sum(span.end - span.start for span in sampled.spans) != len(sampled.token_ids):
            raise EngineError(f"vLLM sampled {len(sampled.token_ids)} tokens, but does not say with which weights each")
        for span in sampled.spans:
            if span.label not in self._known:
                raise EngineError(
                    f"vLLM sampled with weights labelled {span.label!r}, which were not pushed through this engine: somebody "
                    "else writes its weights, or its server was restarted"
                )
        return [self._known[span.label] for span in sampled.spans]

    def completion(
        self, sampled: Sampled, asked: LabelledWeights, kv: Literal["recompute", "keep"], *, queued_s: float, generate_s: float
    ) -> Completion:
        """The completion of a request that was begun under `asked`; all its weights are proven."""
        count = len(sampled.token_ids)
        if len(sampled.logprobs) != count:
            raise EngineError(f"vLLM sampled {count} tokens with {len(sampled.logprobs)} logprobs")
        versions = np.zeros(count, dtype=np.int64)
        for span, weights in zip(sampled.spans, self.weights_of(sampled), strict=True):
            versions[span.start : span.end] = _served(weights)
        kv_versions = versions
        if kv == "keep" and count:
            oldest = _served(asked) if sampled.num_cached else int(versions[0])
            kv_versions = np.full(count, min(oldest, int(versions[0])), dtype=np.int64)
        return Completion(
            token_ids=np.asarray(sampled.token_ids, dtype=np.int32),
            logprobs=np.asarray(sampled.logprobs, dtype=np.float32),
            versions=versions,
            kv_versions=kv_versions,
            finish_reason=FinishReason.STOP if sampled.is_stop else FinishReason.LENGTH,
            queued_s=queued_s,
            generate_s=generate_s,
        )


def _served(weights: LabelledWeights) -> int:
    assert weights.version is not None  # proven weights were served as a version
    return weights.version
