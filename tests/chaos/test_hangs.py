"""A rank that stands still while the others wait for it in a collective: it is named, and all ranks start again."""

from __future__ import annotations

import re
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest

from async_rl.checks.audit import audit
from async_rl.testing.run_process import DEADLINE_S, RunProcess


@pytest.fixture
def run(tmp_path: Path) -> Iterator[RunProcess]:
    settings = {"trainer.world_size": 2, "redis.progress_timeout_s": 8.0, "launch.backoff_s": 0.1}
    running = RunProcess(tmp_path, settings)
    yield running
    running.end()


@pytest.mark.chaos
@pytest.mark.timeout(400)
def test_a_rank_that_hangs_is_named_and_all_ranks_start_again(run: RunProcess) -> None:
    run.wait_for(lambda: run.steps() >= 3, "step")
    run.own("trainer", "--index", "1").send_signal(signal.SIGSTOP)
    run.wait_for(lambda: bool(run.events("work.stalled")), "stall that is noticed")
    stalled = run.events("work.stalled")[0]
    assert stalled["worker_id"].startswith("trainer-0-")
    assert "redis.progress_timeout_s=8" in stalled["reason"]
    assert re.search(r"\n  rank 1: .+, silent for \d+ s: stopped or dead", stalled["reason"])

    run.wait_for(lambda: bool(run.events("role.restarted")), "restart")
    failed = next(event for event in run.events("role.failed") if event["role"] == "supervisor")
    assert (failed["name"], failed["failed"], failed["reason"]) == ("trainer", "trainer-0", "exit code 9")
    before = run.steps()
    run.wait_for(lambda: run.steps() >= before + 3, "steps after it")
    run.supervisor.send_signal(signal.SIGTERM)
    assert run.supervisor.wait(DEADLINE_S) == 128 + signal.SIGTERM
    assert audit(run.layout.root).is_exact


@pytest.mark.chaos
@pytest.mark.timeout(200)
def test_several_ranks_that_are_told_to_stop_finish_their_step_together(run: RunProcess) -> None:
    run.wait_for(lambda: run.steps() >= 3, "steps")
    run.supervisor.send_signal(signal.SIGTERM)
    assert run.supervisor.wait(DEADLINE_S) == 128 + signal.SIGTERM
    assert run.events("role.failed") == []
    assert (run.layout.checkpoints_dir / f"step_{run.steps():08d}").is_dir()
