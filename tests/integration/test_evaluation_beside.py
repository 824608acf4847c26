"""A whole run with held-out evaluation beside it: every role a process, a real server, real checkpoints."""

from __future__ import annotations

import io
from pathlib import Path

import pytest
from rich.console import Console

from async_rl import run
from async_rl.checks.audit import audit
from async_rl.config import load_config
from async_rl.monitor.figures import evaluation_figures
from async_rl.monitor.snapshot import run_snapshot
from async_rl.monitor.status import print_status
from async_rl.run_dir.evaluations import read_evaluations
from async_rl.run_dir.files import read_json_lines
from async_rl.run_dir.intake_log import read_log, task_ends
from async_rl.testing.run_process import write_small_run

MAX_STEPS = 6


@pytest.fixture(scope="module")
def run_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A finished run. Its first and its last version are evaluated for certain; what lies between if there is time."""
    root = tmp_path_factory.mktemp("evaluated")
    settings = {
        "trainer.max_steps": MAX_STEPS,
        "checkpoint.every_steps": 1000,
        "evaluation.every_steps": 2,
        "evaluation.prompts": 6,
        "evaluation.samples": 3,
        "evaluation.k": "[1, 3]",
    }
    config_toml, _ = write_small_run(root, settings)
    config = load_config(config_toml, [], {}).config
    assert run(config, console=False).exit_code == 0
    return config.run_dir


def test_first_and_last_version_have_their_figures(run_dir: Path) -> None:
    evaluations = read_evaluations(run_dir / "evaluations.jsonl")
    steps = [evaluation.step for evaluation in evaluations]
    assert steps[0] == 0
    assert steps[-1] == MAX_STEPS
    assert set(steps) <= {0, 2, 3, 4, 5, 6}
    for evaluation in evaluations:
        total = evaluation.total
        assert (total.prompts, total.samples, total.num_invalid) == (6, 18, 0)
        assert set(total.pass_at) == {1, 3}
        assert total.pass_at[1].low <= total.pass_at[1].value <= total.pass_at[1].high
    assert not list((run_dir / "evaluation").iterdir())


def test_a_due_evaluation_has_its_checkpoint_whatever_the_interval_of_checkpoints(run_dir: Path) -> None:
    events = read_json_lines(run_dir / "events.jsonl")
    written = [event["version"] for event in events if event["event"] == "checkpoint.written"]
    assert written[0] == 2
    assert written[-1] == MAX_STEPS


def test_nothing_of_it_was_issued_logged_or_trained(run_dir: Path) -> None:
    ends = task_ends(read_log(run_dir / "intake"))
    assert len(ends) >= 4 * MAX_STEPS
    assert not [task_id for task_id in ends if "held_out" in task_id]
    assert audit(run_dir).is_exact


def test_events_status_and_summary_say_what_was_found(run_dir: Path) -> None:
    events = [event for event in read_json_lines(run_dir / "events.jsonl") if event["event"] == "evaluation.done"]
    last = read_evaluations(run_dir / "evaluations.jsonl")[-1]
    assert events[-1]["step"] == MAX_STEPS
    assert events[-1]["pass_at_1"] == pytest.approx(last.total.pass_at[1].value, abs=1e-4)
    figures = evaluation_figures([last])
    assert figures["held_out_step"] == MAX_STEPS
    assert figures["held_out_pass_at_1"] == last.total.pass_at[1].value
    console = Console(file=io.StringIO(), width=160)
    print_status(run_snapshot(run_dir, supervisor_pid=None), console)
    assert isinstance(console.file, io.StringIO)
    assert f"step {MAX_STEPS}: pass@1 {last.total.pass_at[1].value:.3f} [" in console.file.getvalue()
