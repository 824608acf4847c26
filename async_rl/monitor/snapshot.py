"""A run as it stands, running, finished or dead: from its directory, and from Redis only what waits there now."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from async_rl.config.sources import read_toml
from async_rl.monitor.metrics_file import MetricsHistory, StepMetrics
from async_rl.registry.versions import EngineRecord, VersionRegistry
from async_rl.run_dir.evaluations import Evaluation, read_evaluations
from async_rl.run_dir.files import read_json_lines
from async_rl.run_dir.layout import RunIdentity, RunLayout, open_run
from protocol.streams import Counters, Stream, StreamDepth, Streams, WorkerLease

ENDINGS: Mapping[str, str] = {
    "run.started": "running",
    "run.resumed": "running",
    "run.ended": "completed",
    "run.interrupted": "interrupted",
    "run.failed": "failed",
}


@dataclass(frozen=True, slots=True)
class LiveSnapshot:
    """What only the server knows."""

    counters: Counters
    depths: Mapping[Stream, StreamDepth]
    workers: Sequence[WorkerLease]
    engines: Mapping[str, EngineRecord]
    announced_version: int | None


@dataclass(frozen=True, slots=True)
class RoleHealth:
    """What the supervisor had to do about one role (or the server) since the run was last started."""

    failures: int
    reason: str
    """Of the last failure."""
    failed_at_s: float
    """Unix time of the last failure."""
    given_up: bool = False


@dataclass(frozen=True, slots=True)
class RunSnapshot:
    """Everything that `async-rl status` shows."""

    layout: RunLayout
    identity: RunIdentity
    state: str
    """running, completed, interrupted, failed, or died (it was running, and nobody supervises it any more)."""
    reason: str
    supervisor_pid: int | None
    max_steps: int | None
    steps: int
    train_seconds: float
    last: StepMetrics | None
    checkpoints: Sequence[int]
    live: LiveSnapshot | None
    live_error: str = ""
    config: Mapping[str, Any] = field(default_factory=dict)
    health: Mapping[str, RoleHealth] = field(default_factory=dict)
    """By role; only those that failed."""
    evaluations: Sequence[Evaluation] = ()


async def live_snapshot(streams: Streams, registry: VersionRegistry) -> LiveSnapshot:
    """Ask the server. Raises: QueueUnavailable."""
    counters, depths, workers, state = await asyncio.gather(
        streams.counters(), streams.depths(), streams.workers(), registry.state()
    )
    return LiveSnapshot(counters, depths, workers, state.engines, state.announced_version)


def run_snapshot(
    run_dir: Path, *, supervisor_pid: int | None, live: LiveSnapshot | None = None, live_error: str = ""
) -> RunSnapshot:
    """Read a run directory. Raises: RunDirError if it holds no run."""
    layout, identity = open_run(run_dir)
    history = MetricsHistory(layout.metrics_jsonl)
    history.refresh()
    state, reason = _state(layout, supervised=supervisor_pid is not None)
    config = read_toml(layout.config_toml) if layout.config_toml.exists() else {}
    return RunSnapshot(
        layout=layout,
        identity=identity,
        state=state,
        reason=reason,
        supervisor_pid=supervisor_pid,
        max_steps=config.get("trainer", {}).get("max_steps"),
        steps=len(history.steps),
        train_seconds=history.train_seconds,
        last=history.last(),
        checkpoints=checkpoint_steps(layout),
        live=live,
        live_error=live_error,
        config=config,
        health=role_health(layout),
        evaluations=read_evaluations(layout.evaluations_jsonl),
    )


def checkpoint_steps(layout: RunLayout) -> Sequence[int]:
    """Steps with a checkpoint directory, ascending."""
    digits = (_trailing_number(path.name) for path in layout.checkpoints_dir.glob("*") if path.is_dir())
    return sorted(step for step in digits if step is not None)


def role_health(layout: RunLayout) -> Mapping[str, RoleHealth]:
    """Every role that failed since the run was last started, by its name."""
    health: dict[str, RoleHealth] = {}
    for record in read_json_lines(layout.events_jsonl):
        event, name = record.get("event"), str(record.get("name", ""))
        if record.get("role") != "supervisor":
            continue
        if event in ("run.started", "run.resumed"):
            health.clear()
        elif event == "role.failed" and name:
            before = health[name].failures if name in health else 0
            health[name] = RoleHealth(before + 1, str(record.get("reason", "")), float(record.get("time_s", 0.0)))
        elif event == "role.given_up" and name in health:
            health[name] = replace(health[name], given_up=True)
    return health


def _trailing_number(name: str) -> int | None:
    digits = name[len(name.rstrip("0123456789")) :]
    return int(digits) if digits else None


def _state(layout: RunLayout, *, supervised: bool) -> tuple[str, str]:
    """From the supervisor's last word; other roles log a run's end too, each when it sees it."""
    state, reason = "created", ""
    for record in read_json_lines(layout.events_jsonl):
        if record.get("role") == "supervisor" and record.get("event") in ENDINGS:
            state, reason = ENDINGS[record["event"]], str(record.get("error", ""))
    if state == "running" and not supervised:
        return "died", "its supervisor is gone without a word; continue with --resume"
    return state, reason
