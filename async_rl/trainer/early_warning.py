"""Early warning: figures of a step beyond a threshold, several steps in a row, said once with what to do about it.

The thresholds are documented in docs/algorithms.md. KL: at 0.025 nats per token the gradient of a loss with sequence weights
truncated at 2 is biased by 0.08 of its size, at 0.09 by 0.5 (enumerated, `make test-estimators`).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

STEPS_IN_A_ROW = 3
"""A single step may be beyond a threshold by chance."""


@dataclass(frozen=True, slots=True)
class Threshold:
    """A figure of the metrics line, the bound that it should keep, and what to do when it does not."""

    figure: str
    bound: float
    advice: str
    is_upper: bool = True

    def is_broken(self, line: Mapping[str, Any]) -> bool:
        value = line.get(self.figure)
        if not isinstance(value, int | float):
            return False
        return value > self.bound if self.is_upper else value < self.bound


THRESHOLDS: Sequence[Threshold] = (
    Threshold(
        "kl_behavior_k3",
        0.03,
        "training is far from the policy that sampled: lower staleness.max_lag or trainer.learning_rate, or push more often",
    ),
    Threshold("ess_token", 0.5, "half of the tokens carry no weight: lower staleness.max_lag or trainer.learning_rate", False),
    Threshold(
        "ess_sequence", 0.1, "a few sequences carry the weight: with sequence weights the gradient is mostly noise", False
    ),
    Threshold("clipped_share", 0.3, "the clip removes much of the gradient: lower staleness.max_lag or trainer.learning_rate"),
    Threshold("truncated_share", 0.2, "importance weights are mostly at their cap, and biased: lower staleness.max_lag"),
    Threshold("importance_masked_share", 0.2, "importance masking removes much of the batch: lower staleness.max_lag"),
    Threshold("clamped_tokens", 0, "log-ratios beyond 20 nats: engine and trainer hardly agree on these tokens"),
    Threshold(
        "entropy", 0.02, "the policy hardly explores: raise clip_high, add a KL term, or stop if the task is solved", False
    ),
)
"""The sample sizes and the KL speak of policy against behavior, whatever the loss does with it."""


@dataclass(frozen=True, slots=True)
class OffPolicyWarning:
    """What to say: the figure, its value, the bound that it broke, since how many steps, and what to do."""

    figure: str
    value: float
    bound: float
    steps: int
    advice: str


class EarlyWarning:
    """Counts steps in a row per threshold; warns when one reaches STEPS_IN_A_ROW, and again only after it recovered."""

    def __init__(self, thresholds: Sequence[Threshold] = THRESHOLDS) -> None:
        self._thresholds = thresholds
        self._in_a_row = dict.fromkeys((threshold.figure for threshold in thresholds), 0)

    def look(self, line: Mapping[str, Any]) -> list[OffPolicyWarning]:
        """New warnings after the step that `line` is of. A step that changed nothing is passed over."""
        if line.get("skip_reason") is not None:
            return []
        warnings = []
        for threshold in self._thresholds:
            count = self._in_a_row[threshold.figure] + 1 if threshold.is_broken(line) else 0
            self._in_a_row[threshold.figure] = count
            if count == STEPS_IN_A_ROW:
                value = float(line[threshold.figure])
                warnings.append(OffPolicyWarning(threshold.figure, value, threshold.bound, count, threshold.advice))
        return warnings
