"""Held-out evaluation beside training."""

from __future__ import annotations

from typing import Any, Literal

from pydantic import Field

from async_rl.config.base import LONGEST_S, MOST, MOST_PROCESSES, SHORTEST_S, StrictModel


class EvaluationConfig(StrictModel):
    """Held-out evaluation beside training, by a process with an engine of its own. See docs/evaluation.md."""

    every_steps: int | None = Field(None, ge=1, le=MOST)
    """Optimizer steps between evaluations, each of which costs a checkpoint; the policy that the run begins with and the last
    one are evaluated too. Unset: none."""
    sources: list[dict[str, Any]] = Field(default_factory=list)
    """Held-out prompts: tables of `source` (a path as in data.source) and, where they differ from data's, `split` and
    `prompt_column`. Empty: the held-out prompts that the environment brings."""
    prompts: int = Field(256, ge=1, le=MOST)
    """Prompts of each source, at most: its first ones."""
    samples: int = Field(4, ge=1, le=MOST_PROCESSES)
    """Completions per prompt."""
    k: list[int] = Field(default_factory=lambda: [1])
    """pass@k for these k, each at most `samples`."""
    success: float = Field(1.0, ge=-1e9, le=1e9)
    """A completion passes with at least this reward."""
    by: str | None = None
    """Column whose values divide the prompts. Unset: their source."""
    temperature: float | None = Field(None, ge=1e-3, le=100)
    """Sampling temperature. Unset: rollout.temperature."""
    engine: Literal["torch", "vllm"] | None = None
    """Engine that samples. Unset: that of the rollout workers (`vllm` for `vllm-server`)."""
    device: str | None = None
    """torch device of the engine; a GPU must be its own. Unset: rollout.device."""
    num_threads: int = Field(1, ge=1, le=4096)
    """CPU threads of the engine."""
    max_concurrent: int = Field(32, ge=1, le=MOST_PROCESSES)
    """Prompts that are sampled at a time."""
    finish_s: float = Field(600.0, ge=SHORTEST_S, le=LONGEST_S)
    """After the last step: time to finish the last evaluation before the run ends without it."""

    def is_due(self, version: int, since: int) -> bool:
        """Whether a multiple of every_steps lies above `since` and not above `version`."""
        return self.every_steps is not None and version // self.every_steps > since // self.every_steps
