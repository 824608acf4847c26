"""`async-rl status` at the widths that terminals have."""

from __future__ import annotations

import io
import socket
from dataclasses import replace
from pathlib import Path

import pytest
from rich.console import Console

from async_rl.monitor.snapshot import LiveSnapshot, RunSnapshot, run_snapshot
from async_rl.monitor.status import print_status
from async_rl.registry.versions import EngineRecord, EngineStatus
from async_rl.run_dir.layout import create_run
from protocol.streams import Counters, RunState, Stream, StreamDepth, WorkerLease

LATE = "it did not confirm version 51 within weights.deadline_s=30 s"


@pytest.fixture
def snapshot(tmp_path: Path) -> RunSnapshot:
    """A run whose second engine is late, and with a worker whose name does not say its role, on another machine."""
    create_run(tmp_path / "run")
    here = {"host": socket.gethostname(), "pid": "26899"}
    live = LiveSnapshot(
        Counters(RunState.RUNNING, epoch=1, cursor=912, issued=912, discarded=0, outstanding=16),
        {stream: StreamDepth(16 if stream is Stream.TASKS else 0, 3, 0.63) for stream in Stream},
        [
            WorkerLease("coordinator-0-79fae1", "coordinator", 14.2, here),
            WorkerLease("rollout-0-96bbe3", "rollout", 13.9, {**here, "in_flight": "5", "serving_version": "53"}),
            WorkerLease("blue", "trainer", 12.0, {"host": "gpu-17", "pid": "4"}),
        ],
        {
            "a": EngineRecord("engine-rollout-0-96bbe3", "rollout-0-96bbe3", EngineStatus.SERVING, serving_version=54),
            "b": EngineRecord("engine-rollout-1-12abe3", "rollout-1-12abe3", reason=LATE),
        },
        54,
    )
    return replace(run_snapshot(tmp_path / "run", supervisor_pid=None), live=live)


def shown(snapshot: RunSnapshot, width: int) -> str:
    output = io.StringIO()
    print_status(snapshot, Console(file=output, width=width))
    return output.getvalue()


@pytest.mark.parametrize("width", [80, 120])
def test_nothing_is_cut_and_no_line_is_too_long(snapshot: RunSnapshot, width: int) -> None:
    text = shown(snapshot, width)
    assert all(len(line.rstrip()) <= width for line in text.splitlines())
    assert "…" not in text
    for part in ("912 tasks issued, 16 outstanding", "coordinator-0-79fae1", "rollout-0-96bbe3", "version 54", "lost"):
        assert part in text
    assert " ".join(LATE.split()) in " ".join(text.split()) or width == 80  # folded over lines at 80
    for word in LATE.split():
        assert word in text


def test_a_worker_says_its_load_and_place_once(snapshot: RunSnapshot) -> None:
    lines = {line.split()[0]: line.split(maxsplit=3)[-1] for line in shown(snapshot, 120).splitlines() if line.strip()}
    assert lines["rollout-0-96bbe3"].split() == ["serving", "version", "54", "5", "in", "flight,", "pid", "26899"]
    assert lines["coordinator-0-79fae1"].split() == ["–", "–", "pid", "26899"]
    assert lines["blue"].split() == ["–", "–", "trainer,", "pid", "4", "on", "gpu-17"]
