"""`async-rl weights`: every push of a run, phase by phase, from its events. Works on runs that are over, or go on."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from rich.console import Console
from rich.table import Table
from rich.text import Text

from async_rl.logs import Event
from async_rl.monitor.text import seconds, share
from async_rl.run_dir.files import read_json_lines
from async_rl.run_dir.layout import RunLayout

WIDE = 150
"""Columns of text that the table needs: a line that a terminal wraps says more than one that is cut."""


@dataclass(frozen=True, slots=True)
class PushLine:
    """One plan of a push that ended: bytes, where its seconds went, who serves it, who does not and why."""

    version: int
    epoch: int
    backend: str
    live: bool
    num_bytes: int
    bytes_per_s: float | None
    memcpy_bytes_per_s: float | None
    engines: Sequence[str]
    failed: Mapping[str, str] = field(default_factory=dict)
    seconds: Mapping[str, float] = field(default_factory=dict)

    @property
    def share_of_memcpy(self) -> float | None:
        if self.bytes_per_s is None or not self.memcpy_bytes_per_s:
            return None
        return self.bytes_per_s / self.memcpy_bytes_per_s

    def phase(self, *names: str) -> float | None:
        """Seconds of these phases together; None if none of them was measured."""
        known = [self.seconds[name] for name in names if name in self.seconds]
        return sum(known) if known else None


PHASES: Mapping[str, tuple[str, ...]] = {
    "blocked": ("blocked",),
    "gather": ("gather",),
    "cast": ("cast",),
    "digest": ("digest",),
    "plan": ("plan", "ready"),
    "send": ("send",),
    "receive": ("engine_receive",),
    "apply": ("engine_swap",),
    "proof": ("engine_digest", "engine_probe", "engine_canary"),
    "total": ("total",),
}
"""Columns, and what they add up."""


def pushes_of(layout: RunLayout) -> list[PushLine]:
    """Every push that ended, in order."""
    records = read_json_lines(layout.events_jsonl)
    return [_line(record) for record in records if record.get("event") == Event.PUSH_MEASURED]


def print_pushes(pushes: Sequence[PushLine], console: Console, *, limit: int) -> None:
    """The newest `limit` pushes and the medians of all, then every failure with its reason."""
    if not pushes:
        console.print("no push has ended yet")
        return
    table = Table(box=None, padding=(0, 1, 0, 0))
    for name in ("version", "MB", *PHASES, "GB/s", "of memcpy"):
        table.add_column(name, justify="right", no_wrap=True)
    table.add_column("serving", overflow="fold")
    for push in pushes[-limit:]:
        table.add_row(*_cells(push))
    if len(pushes) > 1:
        table.add_row(*_medians(pushes), style="bold")
    console.print(table)
    backends = ", ".join(dict.fromkeys(push.backend for push in pushes))
    live = sum(push.live for push in pushes)
    console.print(f"{len(pushes)} pushes by {backends}, {live} live; phases of the slowest engine where engines measure them")
    for push in pushes[-limit:]:
        for engine_id, reason in push.failed.items():
            console.print(Text(f"version {push.version}: {engine_id} failed: {reason}", style="yellow"))


def _line(record: Mapping[str, Any]) -> PushLine:
    return PushLine(
        version=int(record["version"]),
        epoch=int(record["epoch"]),
        backend=str(record.get("backend", "unknown")),
        live=bool(record["live"]),
        num_bytes=int(record["bytes"]),
        bytes_per_s=record.get("bytes_per_s"),
        memcpy_bytes_per_s=record.get("memcpy_bytes_per_s"),
        engines=[str(name) for name in record.get("engines", ())],
        failed={str(name): str(reason) for name, reason in record.get("failed", {}).items()},
        seconds={str(name): float(value) for name, value in record.get("seconds", {}).items()},
    )


def _cells(push: PushLine) -> list[str | Text]:
    phases = [seconds(push.phase(*names)) for names in PHASES.values()]
    rate = "–" if push.bytes_per_s is None else f"{push.bytes_per_s / 1e9:.2f}"
    served: str | Text = ", ".join(push.engines) if push.live else Text("nobody", style="bold red")
    return [
        f"{push.version} (epoch {push.epoch})",
        f"{push.num_bytes / 1e6:.1f}",
        *phases,
        rate,
        share(push.share_of_memcpy),
        served,
    ]


def _medians(pushes: Sequence[PushLine]) -> list[str]:
    def median(values: Sequence[float | None]) -> float | None:
        known = [value for value in values if value is not None]
        return statistics.median(known) if known else None

    phases = [seconds(median([push.phase(*names) for push in pushes])) for names in PHASES.values()]
    rate = median([push.bytes_per_s for push in pushes])
    of_memcpy = share(median([push.share_of_memcpy for push in pushes]))
    return ["median", f"{(median([float(p.num_bytes) for p in pushes]) or 0) / 1e6:.1f}", *phases,
            "–" if rate is None else f"{rate / 1e9:.2f}", of_memcpy, ""]  # fmt: skip
