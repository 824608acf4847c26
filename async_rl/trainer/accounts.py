"""What a trainer keeps account of: where its time went, which pushes ended, and the lines of metrics.jsonl."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from async_rl.logs import Event, get_logger
from async_rl.run_dir.files import JsonLinesWriter, read_json_lines
from async_rl.weights.publisher import PushStats


@dataclass(slots=True)
class TrainerClock:
    """Where the trainer's time went, in seconds since this incarnation began training."""

    now: Callable[[], float]
    started: float = 0.0
    waiting: float = 0.0
    blocked_by_push: float = 0.0
    blocked_by_checkpoints: float = 0.0
    before: float = 0.0  # seconds of earlier incarnations

    def start(self) -> None:
        self.started = self.now()

    @property
    def elapsed(self) -> float:
        return self.now() - self.started

    @property
    def idle_share(self) -> float:
        return self.waiting / self.elapsed if self.elapsed > 0 else 0.0


@dataclass(slots=True)
class FinishedPushes:
    """Pushes that ended since the last metrics line."""

    finished: list[PushStats] = field(default_factory=list)

    def add(self, stats: PushStats) -> None:
        self.finished.append(stats)
        get_logger().info(Event.PUSH_MEASURED, **stats.to_record())

    def take(self) -> list[dict[str, Any]]:
        taken, self.finished = self.finished, []
        return [stats.to_record() for stats in taken]


class StepLines:
    """metrics.jsonl: a line per step record, once, however often a restart trains it again."""

    def __init__(self, path: Path) -> None:
        last = next(iter(deque(read_json_lines(path), maxlen=1)), None)
        self.seconds = float(last["seconds"]) if last and last.get("seconds") else 0.0
        """Of training, as the last line says."""
        self._newest_record = -1 if last is None else int(last["record"])
        self._writer = JsonLinesWriter(path)

    def write(self, line: dict[str, Any]) -> None:
        if line["record"] > self._newest_record:
            self._newest_record = line["record"]
            self._writer.write(line)

    def close(self) -> None:
        self._writer.close()
