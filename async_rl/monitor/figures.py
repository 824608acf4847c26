"""The figures of a run, from its files alone. Each is defined here once; a figure without data is None, never 0."""

from __future__ import annotations

import json
import statistics
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from async_rl.algorithms.staleness import Verdict
from async_rl.monitor.metrics_file import MetricsHistory, read_pushes
from async_rl.run_dir.evaluations import Evaluation
from async_rl.run_dir.files import read_json_lines
from async_rl.run_dir.intake_log import LogIndex, read_log
from async_rl.run_dir.layout import RunLayout, write_atomic


@dataclass(frozen=True, slots=True)
class RunFigures:
    """What a run did."""

    steps: int
    train_seconds: float
    lag_mean: float | None
    """Over trained trajectories, at the step that trained them."""
    lag_max: int | None
    dropped_share: float | None
    """Trajectories that were dropped, of all that step records judge."""
    masked_share: float | None
    """Trajectories of which only the younger tokens were trained, of all that step records judge."""
    push_p50_s: float | None
    """From the announcement to the last engine's confirmation, median over pushes."""
    trainer_idle_share: float | None
    """Seconds in which the trainer waited for groups, of all its seconds."""
    rollout_idle_share: float | None
    """Seconds in which a rollout worker had nothing to sample, of all their seconds."""
    parity_max_abs: float | None
    """Largest |engine − trainer| logprob over every push's probe, at the same version."""
    parity_tokens: int
    tokens_trained_per_s: float | None
    lag_histogram: Mapping[int, int]
    num_pushes: int


@dataclass(frozen=True, slots=True)
class StalenessFigures:
    """What the step records of the intake log say about trajectories: exact, also for groups that no step trained."""

    judged: int
    dropped: int
    masked: int
    lag_histogram: Mapping[int, int]
    """Trained trajectories by lag."""


def staleness_figures(index: LogIndex) -> StalenessFigures:
    """Count the verdicts of every step record. The trajectories of a skipped step were dropped, whatever their verdict."""
    tally = Counter(index.tally)
    for record in index.steps:
        tally.update(record.tally(skipped=record.step in index.skipped))
    verdicts: Counter[Verdict] = Counter()
    lags: Counter[int] = Counter()
    for (verdict, lag, trained), count in tally.items():
        verdicts[Verdict(verdict)] += count
        if trained and lag >= 0:
            lags[lag] += count
    return StalenessFigures(sum(verdicts.values()), verdicts[Verdict.DROP], verdicts[Verdict.MASK], dict(sorted(lags.items())))


def run_figures(history: MetricsHistory, layout: RunLayout) -> RunFigures:
    """Compute every figure from what the run wrote. Raises: IntakeLogError if the log is damaged."""
    staleness = staleness_figures(read_log(layout.intake_dir))
    lags, trained = staleness.lag_histogram, sum(staleness.lag_histogram.values())
    pushes = read_pushes(layout.events_jsonl)
    seconds = history.train_seconds
    return RunFigures(
        steps=len(history.steps),
        train_seconds=seconds,
        lag_mean=sum(lag * count for lag, count in lags.items()) / trained if trained else None,
        lag_max=max(lags, default=None),
        dropped_share=staleness.dropped / staleness.judged if staleness.judged else None,
        masked_share=staleness.masked / staleness.judged if staleness.judged else None,
        push_p50_s=_median([push.seconds for push in pushes if push.seconds is not None]),
        trainer_idle_share=sum(history.series("wait_s")) / seconds if seconds > 0 else None,
        rollout_idle_share=rollout_idle_share(layout),
        parity_max_abs=max((push.parity_max_abs for push in pushes if push.parity_max_abs is not None), default=None),
        parity_tokens=sum(push.parity_tokens for push in pushes),
        tokens_trained_per_s=sum(history.series("tokens")) / seconds if seconds > 0 else None,
        lag_histogram=lags,
        num_pushes=len(pushes),
    )


def rollout_idle_share(layout: RunLayout) -> float | None:
    """Idle seconds of all rollout workers, of all their seconds; None before they wrote any."""
    idle = total = 0.0
    for path in sorted(layout.logs_dir.glob("rollout*.metrics.jsonl")):
        for last in _last_of_each_start(path):
            idle += float(last.get("idle_s") or 0.0)
            total += float(last["seconds"])
    return idle / total if total > 0 else None


def _last_of_each_start(path: Path) -> Sequence[Mapping[str, Any]]:
    """Worker metrics count from the worker's start; where `seconds` goes back, it was started again."""
    starts: list[Mapping[str, Any]] = []
    for record in read_json_lines(path):
        seconds = record.get("seconds")
        if not isinstance(seconds, int | float):
            continue
        if starts and seconds >= starts[-1]["seconds"]:
            starts[-1] = record
        else:
            starts.append(record)
    return starts


def write_figures(path: Path, figures: Mapping[str, float | int | str | None]) -> None:
    """Write figures as JSON that a program can read."""
    write_atomic(path, (json.dumps(figures, indent=2) + "\n").encode())


def evaluation_figures(evaluations: Sequence[Evaluation]) -> Mapping[str, float | int]:
    """Of the last held-out evaluation: `held_out_step`, and for each k `held_out_pass_at_{k}` with `_low` and `_high`; empty
    without one."""
    if not evaluations:
        return {}
    last = evaluations[-1]
    found: dict[str, float | int] = {"held_out_step": last.step, "held_out_evaluations": len(evaluations)}
    for k, estimate in last.total.pass_at.items():
        name = f"held_out_pass_at_{k}"
        found |= {name: estimate.value, f"{name}_low": estimate.low, f"{name}_high": estimate.high}
    return found


def _median(values: Sequence[float]) -> float | None:
    return statistics.median(values) if values else None
