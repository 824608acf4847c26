"""evaluations.jsonl: a line per held-out evaluation, with the policy version that all of its samples carry."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from async_rl.run_dir.files import read_json_lines


@dataclass(frozen=True, slots=True)
class Estimate:
    """A share between 0 and 1 with its 95 % interval, over `prompts` prompts."""

    value: float
    low: float
    high: float
    prompts: int


@dataclass(frozen=True, slots=True)
class EvaluationFigures:
    """What a set of prompts gave. Completions that could not be scored are in no figure but num_invalid."""

    prompts: int
    samples: int
    """Completions with a valid reward."""
    num_invalid: int
    pass_at: Mapping[int, Estimate]
    """By k; without those k for which no prompt has enough valid completions."""
    reward_mean: float | None
    """Mean over prompts of their mean reward; None if nothing could be scored."""
    tokens_mean: float | None
    """Sampled tokens per completion."""
    truncated_share: float | None
    """Completions that ended at a length limit."""


@dataclass(frozen=True, slots=True)
class Evaluation:
    """One evaluation."""

    step: int
    """Optimizer steps that the policy has had: its version."""
    time_s: float
    seconds: float
    temperature: float
    total: EvaluationFigures
    by_source: Mapping[str, EvaluationFigures] = field(default_factory=dict)

    def to_record(self) -> dict[str, Any]:
        """As JSON."""
        record = asdict(self)
        return {"policy_version": self.step, **record}


def read_evaluations(path: Path) -> list[Evaluation]:
    """Every evaluation by version, the last line of each; none if the file is missing."""
    found: dict[int, Evaluation] = {}
    for record in read_json_lines(path):
        evaluation = _evaluation(record)
        found[evaluation.step] = evaluation
    return [found[step] for step in sorted(found)]


def _evaluation(record: Mapping[str, Any]) -> Evaluation:
    return Evaluation(
        step=int(record["step"]),
        time_s=float(record["time_s"]),
        seconds=float(record["seconds"]),
        temperature=float(record["temperature"]),
        total=_figures(record["total"]),
        by_source={str(name): _figures(figures) for name, figures in record["by_source"].items()},
    )


def _figures(fields: Mapping[str, Any]) -> EvaluationFigures:
    pass_at = {int(k): Estimate(**estimate) for k, estimate in fields["pass_at"].items()}
    return EvaluationFigures(**{**fields, "pass_at": pass_at})
