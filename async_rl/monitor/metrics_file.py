"""metrics.jsonl as numbers: a line per optimizer step, read while it grows. Missing keys are None, never a guess."""

from __future__ import annotations

import json
from array import array
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from pathlib import Path
from typing import Any

from async_rl.logs import Event
from async_rl.run_dir.files import read_json_lines


@dataclass(frozen=True, slots=True)
class PushMetrics:
    """One weight push, as its proof measured it."""

    version: int
    seconds: float | None
    parity_max_abs: float | None
    parity_tokens: int


class Numbers(Mapping[str, float]):
    """The numbers of one line, 8 bytes each: a supervisor holds those of a whole run. Lines with the same keys share them."""

    __slots__ = ("_places", "_values")

    def __init__(self, values: Mapping[str, float]) -> None:
        self._places = _places(tuple(values))
        self._values = array("d", values.values())

    def __getitem__(self, key: str) -> float:
        return self._values[self._places[key]]

    def __iter__(self) -> Iterator[str]:
        return iter(self._places)

    def __len__(self) -> int:
        return len(self._values)


@lru_cache(maxsize=1024)
def _places(keys: tuple[str, ...]) -> Mapping[str, int]:
    return {key: place for place, key in enumerate(keys)}


@dataclass(frozen=True, slots=True)
class StepMetrics:
    """One line of metrics.jsonl."""

    record: int
    """Number of the step record in the intake log: unique, also for a step that was skipped."""
    step: int
    """Optimizer steps applied, this one included."""
    seconds: float
    """Of training until the end of this step, over all starts of the trainer."""
    skipped: bool
    values: Mapping[str, float] = field(default_factory=dict)
    """Every plain number of the line, by its key."""
    pushes: tuple[PushMetrics, ...] = ()
    """Pushes that ended since the line before."""

    def get(self, key: str) -> float | None:
        return self.values.get(key)


def step_metrics(record: Mapping[str, Any]) -> StepMetrics | None:
    """Decode a line; None if it is not about a step."""
    values = {
        key: float(value) for key, value in record.items() if isinstance(value, int | float) and not isinstance(value, bool)
    }
    if "step" not in values:
        return None
    pushes = record.get("pushes")
    return StepMetrics(
        record=int(values.get("record", values["step"])),
        step=int(values["step"]),
        seconds=values.get("seconds", 0.0),
        skipped=record.get("skip_reason") is not None,
        values=Numbers(values),
        pushes=tuple(map(_push, pushes)) if isinstance(pushes, list) else (),
    )


def _push(push: Mapping[str, Any]) -> PushMetrics:
    seconds, parity = push.get("seconds"), push.get("parity_max_abs")
    if isinstance(seconds, dict):
        seconds = seconds.get("total")
    return PushMetrics(
        version=int(push["version"]),
        seconds=None if seconds is None else float(seconds),
        parity_max_abs=None if parity is None else float(parity),
        parity_tokens=int(push.get("parity_tokens") or 0),
    )


def read_pushes(events_jsonl: Path) -> list[PushMetrics]:
    """Every push that ended, the last ones of a run too, as the trainer's events say."""
    return [_push(event) for event in read_json_lines(events_jsonl) if event.get("event") == Event.PUSH_MEASURED.value]


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
    """Every applied step of a run so far, in order."""

    def __init__(self, path: Path) -> None:
        self._follower = Follower(path)
        self._by_record: dict[int, StepMetrics] = {}
        self._lines: tuple[StepMetrics, ...] = ()

    def refresh(self) -> bool:
        """Read what is new; True if there was anything."""
        added = [metrics for record in self._follower.new_records() if (metrics := step_metrics(record)) is not None]
        for metrics in added:
            self._by_record[metrics.record] = metrics
        if added:
            self._lines = tuple(self._by_record[record] for record in sorted(self._by_record))
        return bool(added)

    @property
    def lines(self) -> Sequence[StepMetrics]:
        """All lines, skipped steps included."""
        return self._lines

    @property
    def steps(self) -> Sequence[StepMetrics]:
        """Applied steps."""
        return [line for line in self._lines if not line.skipped]

    @property
    def train_seconds(self) -> float:
        return max((line.seconds for line in self._lines), default=0.0)

    def last(self) -> StepMetrics | None:
        return next((line for line in reversed(self._lines) if not line.skipped), None)

    def pushes(self) -> Sequence[PushMetrics]:
        """Every push that ended, in order."""
        return [push for line in self._lines for push in line.pushes]

    def series(self, key: str) -> list[float]:
        """The values of `key` in order of applied steps; steps without it are left out."""
        return [value for step in self.steps if (value := step.get(key)) is not None]
