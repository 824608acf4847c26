"""The figures of a run, against values counted by hand."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from async_rl.monitor.figures import rollout_idle_share, run_figures, staleness_figures
from async_rl.monitor.metrics_file import MetricsHistory
from async_rl.run_dir.intake_log import IntakeLog, LogIndex, Position
from async_rl.run_dir.layout import RunLayout, create_run
from async_rl.run_dir.records import GroupUse, SkipRecord, StepRecord
from protocol.messages import EndReason


def use(task_id: str, *trajectories: tuple[str, int | None]) -> GroupUse:
    """A group of (verdict, lag) trajectories, as the trainer's step record has them."""
    rows = [
        [verdict, lag, lag, 4, 0 if verdict in ("drop", "invalid") else 4, {"drop": "stale", "invalid": "nan"}.get(verdict)]
        for verdict, lag in trajectories
    ]
    return GroupUse(task_id, EndReason.TRAINED, {"current_version": 9, "max_lag": 2, "trajectories": rows})


def step(number: int, *groups: GroupUse, trains: bool = True) -> StepRecord:
    return StepRecord(step=number, version=number, batch=number, trains=trains, groups=groups, seed=0)


RECORDS = (
    step(0, use("a", ("train", 0), ("train", 1)), use("b", ("mask", 2), ("drop", 5))),
    step(1, use("c", ("drop", 4), ("drop", 4)), trains=False),
    step(2, use("d", ("train", 1), ("train", 1))),
)


def test_verdicts_are_counted_over_every_record_and_lags_over_what_was_trained() -> None:
    index = LogIndex()
    for record in RECORDS:
        index.add(record, Position("x", 0))
    figures = staleness_figures(index)
    assert (figures.judged, figures.dropped, figures.masked) == (8, 3, 1)
    assert figures.lag_histogram == {0: 1, 1: 3, 2: 1}


def test_the_trajectories_of_a_skipped_step_were_dropped() -> None:
    index = LogIndex()
    for record in (*RECORDS, SkipRecord(2, "loss is not finite")):
        index.add(record, Position("x", 0))
    figures = staleness_figures(index)
    assert (figures.judged, figures.dropped, figures.masked) == (8, 5, 1)
    assert figures.lag_histogram == {0: 1, 1: 1, 2: 1}


@pytest.fixture
def layout(tmp_path: Path) -> RunLayout:
    return create_run(tmp_path / "run")[0]


def write_lines(path: Path, *records: dict[str, Any]) -> None:
    path.write_text("".join(json.dumps(record) + "\n" for record in records))


def test_every_figure_of_a_small_run(layout: RunLayout) -> None:
    with_log = IntakeLog.open(layout.intake_dir, epoch=1)
    with_log.append(RECORDS)
    with_log.close()

    def push(version: int, total: float, parity: float) -> dict[str, Any]:
        figures = {"version": version, "seconds": {"total": total}, "parity_max_abs": parity, "parity_tokens": 10}
        return {"event": "push.measured", **figures}

    write_lines(
        layout.metrics_jsonl,
        {"record": 0, "step": 1, "seconds": 2.0, "tokens": 100, "wait_s": 1.0, "pushes": []},
        {"record": 2, "step": 2, "seconds": 4.0, "tokens": 60, "wait_s": 0.0, "pushes": []},
    )
    write_lines(layout.events_jsonl, push(0, 0.5, 1e-6), {"event": "run.ended"}, push(1, 0.1, 3e-6), push(2, 0.2, 2e-6))
    write_lines(layout.worker_metrics_jsonl("rollout-0"), {"seconds": 2.0, "idle_s": 1.0}, {"seconds": 8.0, "idle_s": 2.0})
    history = MetricsHistory(layout.metrics_jsonl)
    history.refresh()
    figures = run_figures(history, layout)
    assert (figures.steps, figures.train_seconds) == (2, 4.0)
    assert (figures.lag_mean, figures.lag_max) == (1.0, 2)
    assert (figures.dropped_share, figures.masked_share) == (3 / 8, 1 / 8)
    assert (figures.push_p50_s, figures.num_pushes) == (0.2, 3)
    assert (figures.trainer_idle_share, figures.rollout_idle_share) == (0.25, 0.25)
    assert (figures.parity_max_abs, figures.parity_tokens) == (3e-6, 30)
    assert figures.tokens_trained_per_s == 40.0


def test_a_run_without_a_step_has_no_figures_rather_than_zeros(layout: RunLayout) -> None:
    figures = run_figures(MetricsHistory(layout.metrics_jsonl), layout)
    assert (figures.steps, figures.parity_tokens, figures.num_pushes) == (0, 0, 0)
    for name in (
        "lag_mean",
        "lag_max",
        "dropped_share",
        "push_p50_s",
        "trainer_idle_share",
        "parity_max_abs",
        "tokens_trained_per_s",
    ):
        assert getattr(figures, name) is None, name


def test_idle_time_adds_up_over_workers_and_over_their_starts(layout: RunLayout) -> None:
    assert rollout_idle_share(layout) is None
    write_lines(
        layout.worker_metrics_jsonl("rollout-0"),
        {"seconds": 5.0, "idle_s": 1.0},
        {"seconds": 10.0, "idle_s": 3.0},
        {"seconds": 2.0, "idle_s": 2.0},  # started again
    )
    write_lines(layout.worker_metrics_jsonl("rollout-1"), {"seconds": 8.0, "idle_s": 0.0})
    write_lines(layout.worker_metrics_jsonl("reward-0"), {"seconds": 100.0, "idle_s": 100.0})
    assert rollout_idle_share(layout) == (3.0 + 2.0 + 0.0) / (10.0 + 2.0 + 8.0)
