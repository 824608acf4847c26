"""A worker that nobody announced joins a run, takes part and leaves; the only own worker, told to leave, comes back."""

from __future__ import annotations

import signal
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from async_rl.checks.audit import audit
from async_rl.testing.run_process import DEADLINE_S, RunProcess

DRAIN_S = 20.0

pytestmark = pytest.mark.xdist_group("runs")


@pytest.fixture
def run(tmp_path: Path) -> Iterator[RunProcess]:
    running = RunProcess(tmp_path, {"launch.drain_s": DRAIN_S})
    yield running
    running.end()


@pytest.mark.timeout(240)
def test_a_guest_takes_part_and_leaves_in_its_grace_and_the_only_own_worker_is_replaced_at_once(run: RunProcess) -> None:
    run.wait_for(lambda: run.steps() >= 2, "step")
    guest = run.start("workers.rollout", run.layout.config_toml, "--index", 7, "--worker-id", "guest")
    run.wait_for(lambda: run.groups_of("rollout-7") > 0, "group of the guest")

    guest.send_signal(signal.SIGUSR1)
    told = time.monotonic()
    assert guest.wait(DEADLINE_S) == 0
    assert time.monotonic() - told < DRAIN_S
    (draining,) = run.events("worker.draining")
    assert draining["worker_id"] == "guest"

    run.own("rollout").send_signal(signal.SIGTERM)
    run.wait_for(lambda: len(run.events("role.restarted")) == 1, "restart of the drained worker")
    (drained,), (restarted,) = run.events("role.drained"), run.events("role.restarted")
    assert (drained["name"], restarted["name"]) == ("rollout-0", "rollout-0")
    assert restarted["time_s"] - drained["time_s"] < 2
    assert run.events("role.failed") == []
    before = run.steps()
    run.wait_for(lambda: run.steps() >= before + 12, "steps with the new worker")  # more than was sampled already

    run.supervisor.send_signal(signal.SIGTERM)
    assert run.supervisor.wait(DEADLINE_S) == 128 + signal.SIGTERM
    result = audit(run.layout.root)
    assert (result.is_exact, result.lost, result.twice) == (True, None, ())
