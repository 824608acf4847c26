"""How far a run is, from the files that it writes."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any


class Tail:
    """New whole lines of a JSON-lines file, each once."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._offset = 0

    def read(self) -> Iterator[dict[str, Any]]:
        if not self._path.exists():
            return
        with self._path.open("rb") as file:
            file.seek(self._offset)
            for line in file:
                if not line.endswith(b"\n"):
                    return
                self._offset += len(line)
                try:
                    record = json.loads(line)
                except ValueError:
                    continue  # cut by a kill
                if isinstance(record, dict):
                    yield record


class Progress:
    """The newest optimizer step that was ever made, the newest version that an engine served, the newest trainer's epoch."""

    def __init__(self, run_dir: Path) -> None:
        self._metrics = Tail(run_dir / "metrics.jsonl")
        self._events = Tail(run_dir / "events.jsonl")
        self.trained = 0
        self.served = -1
        self.epoch = 0
        """Of the newest metrics line."""
        self.fenced = 0
        """Trainers that found a newer one, so far."""

    def refresh(self) -> None:
        for line in self._metrics.read():
            self.trained = max(self.trained, int(line.get("step", 0)))
            self.epoch = max(self.epoch, int(line.get("epoch", 0)))
        for line in self._events.read():
            if line.get("event") == "engine.serving":
                self.served = max(self.served, int(line["version"]))
            if line.get("event") == "role.failed" and line.get("role") == "trainer" and "fenced" in str(line.get("error")):
                self.fenced += 1
