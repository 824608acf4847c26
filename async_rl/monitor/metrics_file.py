"""metrics.jsonl as numbers: a line per optimizer step, read while it grows. Missing keys are None, never a guess."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any


@dataclass(frozen=True, slots=True)
class PushMetrics:
    """One weight push, as its proof measured it."""

    version: int
    seconds: float | None
    parity_max_abs: float | None
    parity_tokens: int


@dataclass(frozen=True, slots=True)
class StepMetrics:
    """One line of metrics.jsonl."""

    step: int
    seconds: float
    """Since the trainer started."""
    values: Mapping[str, float] = field(default_factory=dict)
    """Every plain number of the line, by its key."""
    lag_histogram: Mapping[int, int] = field(default_factory=dict)
    """Trajectories by lag."""
    push: PushMetrics | None = None

    def get(self, key: str) -> float | None:
        return self.values.get(key)


def step_metrics(record: Mapping[str, Any]) -> StepMetrics | None:
    """Decode a line; None if it is not about a step."""
    values = {
        key: float(value) for key, value in record.items() if isinstance(value, int | float) and not isinstance(value, bool)
    }
    if "step" not in values:
        return None
    histogram = record.get("lag_histogram")
    return StepMetrics(
        step=int(values["step"]),
        seconds=values.get("seconds", 0.0),
        values=values,
        lag_histogram={int(lag): int(count) for lag, count in histogram.items()} if isinstance(histogram, dict) else {},
        push=_push(record, values),
    )


def _push(record: Mapping[str, Any], values: Mapping[str, float]) -> PushMetrics | None:
    push = record.get("push")
    if not isinstance(push, dict) or push.get("version") is None:
        return None
    phases = push.get("seconds")
    seconds = values.get("push_s")
    if seconds is None and isinstance(phases, dict):
        seconds = phases.get("total", sum(phases.values()) if phases else None)
    elif seconds is None and isinstance(phases, int | float):
        seconds = float(phases)
    parity = push.get("parity_max_abs")
    return PushMetrics(
        int(push["version"]), seconds, None if parity is None else float(parity), int(push.get("parity_tokens") or 0)
    )


class Follower:
    """Reads the whole lines that were added to a JSON-lines file since the last call."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._offset = 0

    def new_records(self) -> Iterator[dict[str, Any]]:
        try:
            with self._path.open("rb") as file:
                file.seek(self._offset)
                data = file.read()
        except FileNotFoundError:
            return
        whole = data.rfind(b"\n") + 1
        self._offset += whole
        for line in data[:whole].splitlines():
            try:
                record = json.loads(line)
            except ValueError:
                continue  # cut short by a crash
            if isinstance(record, dict):
                yield record


class MetricsHistory:
    """Every step of a run so far, in order; a step that was trained again after a restart counts once, as it was last."""

    def __init__(self, path: Path) -> None:
        self._follower = Follower(path)
        self._by_step: dict[int, StepMetrics] = {}
        self._sessions_s: list[float] = []
        self._steps: tuple[StepMetrics, ...] = ()

    def refresh(self) -> bool:
        """Read what is new; True if there was anything."""
        changed = False
        for record in self._follower.new_records():
            metrics = step_metrics(record)
            if metrics is None:
                continue
            if not self._sessions_s or metrics.seconds < self._sessions_s[-1]:
                self._sessions_s.append(0.0)  # a restarted trainer counts from 0 again
            self._sessions_s[-1] = metrics.seconds
            self._by_step[metrics.step] = metrics
            changed = True
        if changed:
            self._steps = tuple(self._by_step[step] for step in sorted(self._by_step))
        return changed

    @property
    def steps(self) -> Sequence[StepMetrics]:
        return self._steps

    @property
    def train_seconds(self) -> float:
        """Seconds of training, over all starts of the trainer."""
        return sum(self._sessions_s)

    def last(self) -> StepMetrics | None:
        return self._steps[-1] if self._steps else None

    def series(self, key: str) -> list[float]:
        """The values of `key` in order of steps; steps without it are left out."""
        return [value for step in self._steps if (value := step.get(key)) is not None]
