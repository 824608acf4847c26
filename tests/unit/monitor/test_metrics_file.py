"""metrics.jsonl while it grows."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from async_rl.monitor.metrics_file import Follower, MetricsHistory, step_metrics


def write(path: Path, *records: dict[str, Any], tail: str = "") -> None:
    with path.open("a") as file:
        file.writelines(json.dumps(record) + "\n" for record in records)
        file.write(tail)


def test_a_follower_reads_each_whole_line_once(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    follower = Follower(path)
    assert list(follower.new_records()) == []
    write(path, {"step": 1}, tail='{"step"')
    assert list(follower.new_records()) == [{"step": 1}]
    assert list(follower.new_records()) == []
    write(path, tail=": 2}\n")
    assert list(follower.new_records()) == [{"step": 2}]


def test_lines_that_are_no_objects_are_passed_over(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    path.write_text('{"step": 1}\n{"st\n[1]\n\xff\n{"step": 2}\n', encoding="latin-1")
    assert [record["step"] for record in Follower(path).new_records()] == [1, 2]


def test_missing_keys_are_none_and_null_is_missing() -> None:
    metrics = step_metrics({"step": 3, "loss": None, "reward_mean": 0.5, "replayed": True})
    assert metrics is not None
    assert (metrics.step, metrics.record, metrics.seconds, metrics.skipped) == (3, 3, 0.0, False)
    assert (metrics.get("reward_mean"), metrics.get("loss"), metrics.get("replayed")) == (0.5, None, None)
    assert step_metrics({"event": "other"}) is None


def test_a_skipped_step_does_not_hide_the_applied_one_of_its_version(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    write(
        path,
        {"record": 0, "step": 1, "seconds": 1.0, "reward_mean": 0.25},
        {"record": 1, "step": 1, "seconds": 2.0, "reward_mean": 9.0, "skip_reason": "loss is not finite"},
        {"record": 2, "step": 2, "seconds": 3.0, "reward_mean": 0.75},
    )
    history = MetricsHistory(path)
    assert history.refresh()
    assert not history.refresh()
    assert [step.step for step in history.steps] == [1, 2]
    assert history.series("reward_mean") == [0.25, 0.75]
    assert len(history.lines) == 3
    assert history.train_seconds == 3.0


def test_a_step_that_is_written_again_counts_once(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    write(
        path,
        {"record": 0, "step": 1, "tokens": 5},
        {"record": 1, "step": 2, "tokens": 7},
        {"record": 1, "step": 2, "tokens": 7},
    )
    history = MetricsHistory(path)
    history.refresh()
    assert sum(history.series("tokens")) == 12


def test_pushes_are_read_with_their_total_time_and_parity(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    push = {"version": 4, "seconds": {"send": 0.1, "total": 0.25}, "parity_max_abs": 2e-6, "parity_tokens": 30}
    write(path, {"step": 1, "pushes": [push, {"version": 5, "seconds": 0.5}]}, {"step": 2, "pushes": []}, {"step": 3})
    history = MetricsHistory(path)
    history.refresh()
    assert [(p.version, p.seconds, p.parity_max_abs, p.parity_tokens) for p in history.pushes()] == [
        (4, 0.25, 2e-6, 30),
        (5, 0.5, None, 0),
    ]
