"""The figures of a run, from its files alone. Each is defined here once; a figure without data is None, never 0."""

from __future__ import annotations

import json
import statistics
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from async_rl.monitor.metrics_file import MetricsHistory, PushMetrics, StepMetrics
from async_rl.run_dir.files import read_json_lines
from async_rl.run_dir.layout import RunLayout, write_atomic


@dataclass(frozen=True, slots=True)
class RunFigures:
    """What a run did."""

    steps: int
    train_seconds: float
    lag_mean: float | None
    """Over trajectories, at the step that judged them."""
    lag_max: int | None
    dropped_share: float | None
    """Trajectories that were dropped, of all that steps judged."""
    masked_share: float | None
    """Trajectories that lost some of their tokens to the staleness mask, of all that steps judged."""
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


def run_figures(history: MetricsHistory, layout: RunLayout) -> RunFigures:
    """Compute every figure from what the run wrote."""
    steps = history.steps
    histogram: Counter[int] = Counter()
    for step in steps:
        histogram.update(step.lag_histogram)
    pushes = _pushes(steps)
    seconds = history.train_seconds
    tokens = sum(history.series("tokens"))
    return RunFigures(
        steps=len(steps),
        train_seconds=seconds,
        lag_mean=_lag_mean(histogram, history),
        lag_max=_lag_max(histogram, history),
        dropped_share=_share_of_trajectories("trajectories_dropped", steps),
        masked_share=_share_of_trajectories("trajectories_masked", steps),
        push_p50_s=_median([push.seconds for push in pushes if push.seconds is not None]),
        trainer_idle_share=_time_weighted("trainer_idle_share", steps),
        rollout_idle_share=rollout_idle_share(layout),
        parity_max_abs=max((push.parity_max_abs for push in pushes if push.parity_max_abs is not None), default=None),
        parity_tokens=sum(push.parity_tokens for push in pushes),
        tokens_trained_per_s=tokens / seconds if seconds > 0 else None,
        lag_histogram=dict(sorted(histogram.items())),
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


def _pushes(steps: Sequence[StepMetrics]) -> Sequence[PushMetrics]:
    """One per version: the newest line about it."""
    return list({step.push.version: step.push for step in steps if step.push is not None}.values())


def _lag_mean(histogram: Mapping[int, int], history: MetricsHistory) -> float | None:
    count = sum(histogram.values())
    if count:
        return sum(lag * number for lag, number in histogram.items()) / count
    return statistics.fmean(means) if (means := history.series("lag_mean")) else None


def _lag_max(histogram: Mapping[int, int], history: MetricsHistory) -> int | None:
    if histogram:
        return max(lag for lag, number in histogram.items() if number)
    return int(max(maxima)) if (maxima := history.series("lag_max")) else None


def _share_of_trajectories(key: str, steps: Sequence[StepMetrics]) -> float | None:
    """Steps without the key or without a histogram say nothing about it."""
    counted = [(value, sum(step.lag_histogram.values())) for step in steps if (value := step.get(key)) is not None]
    total = sum(number for _, number in counted)
    return sum(value for value, _ in counted) / total if total else None


def _time_weighted(key: str, steps: Sequence[StepMetrics]) -> float | None:
    """Mean of a share over the run, each step weighted by the time since the one before it."""
    weighted = total = previous = 0.0
    for step in steps:
        duration = step.seconds - previous if step.seconds >= previous else step.seconds
        previous = step.seconds
        value = step.get(key)
        if value is not None and duration > 0:
            weighted += value * duration
            total += duration
    return weighted / total if total else None


def _median(values: Sequence[float]) -> float | None:
    return statistics.median(values) if values else None
