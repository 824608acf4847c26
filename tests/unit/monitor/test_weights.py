"""`async-rl weights`: pushes out of a run's events."""

from __future__ import annotations

import io
import json
from pathlib import Path

from rich.console import Console

from async_rl.monitor.weights import print_pushes, pushes_of
from async_rl.run_dir.layout import RunLayout

SECONDS = {
    "blocked": 0.25,
    "gather": 0.0625,
    "cast": 0.125,
    "send": 0.5,
    "plan": 0.25,
    "ready": 0.5,
    "engine_receive": 0.25,
    "engine_swap": 0.25,
    "engine_digest": 0.125,
    "engine_probe": 0.25,
    "total": 2.0,
}


def event(version: int, **more: object) -> dict[str, object]:
    return {
        "event": "push.measured",
        "backend": "gloo",
        "epoch": 1,
        "version": version,
        "live": True,
        "bytes": 10**9,
        "bytes_per_s": 2e9,
        "memcpy_bytes_per_s": 8e9,
        "engines": ["a", "b"],
        "failed": {},
        "seconds": SECONDS,
        **more,
    }


def layout_with(directory: Path, *events: dict[str, object]) -> RunLayout:
    lines = [{"event": "push.live", "version": 1}, *events]
    RunLayout(directory).events_jsonl.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return RunLayout(directory)


def shown(layout: RunLayout, *, limit: int = 20) -> str:
    console = Console(width=250, record=True, file=io.StringIO())
    print_pushes(pushes_of(layout), console, limit=limit)
    return console.export_text()


def test_a_push_shows_bytes_phases_rate_and_share_of_the_limit(tmp_path: Path) -> None:
    layout = layout_with(tmp_path, event(3))
    (push,) = pushes_of(layout)
    assert push.share_of_memcpy == 0.25
    assert push.phase("plan", "ready") == 0.75
    assert push.phase("engine_canary") is None
    header, line = shown(layout).splitlines()[:2]
    assert header.split()[:3] == ["version", "MB", "blocked"]
    columns = ["3", "(epoch", "1)", "1000.0", "0.25", "s", "62", "ms", "0.12", "s", "–", "0.75", "s", "0.50", "s"]
    assert line.split()[: len(columns)] == columns
    assert line.split()[-5:] == ["2.00", "25.0", "%", "a,", "b"]


def test_who_failed_is_named_with_the_reason_and_a_push_that_nobody_took_says_so(tmp_path: Path) -> None:
    failed = event(4, live=False, engines=[], failed={"a": "digest [differs] in w"}, bytes_per_s=None)
    text = shown(layout_with(tmp_path, event(3), failed))
    assert "nobody" in text
    assert "version 4: a failed: digest [differs] in w" in text
    assert "2 pushes by gloo, 1 live" in text


def test_only_the_newest_are_listed_and_the_median_is_of_all(tmp_path: Path) -> None:
    pushes = [event(version, seconds={"total": float(version)}) for version in range(1, 6)]
    lines = shown(layout_with(tmp_path, *pushes), limit=1).splitlines()
    assert lines[1].startswith("5 (epoch 1)") or lines[1].split()[0] == "5"
    assert "3.00 s" in lines[2]
    assert lines[2].split()[0] == "median"


def test_a_run_without_pushes_says_so(tmp_path: Path) -> None:
    assert shown(layout_with(tmp_path)).strip() == "no push has ended yet"
    assert pushes_of(RunLayout(tmp_path / "nothing")) == []
