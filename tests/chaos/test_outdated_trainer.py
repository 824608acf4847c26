"""A trainer that stood still while another one took over wakes up: it reads, writes, announces and pushes nothing any more."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from async_rl.checks.audit import audit
from async_rl.errors import FENCED
from async_rl.launch.embedded_redis import EmbeddedRedis
from async_rl.run_dir.files import read_json_lines
from async_rl.testing.run_process import write_small_run

DEADLINE_S = 120
STEPS = 60


class Run:
    """The roles of a run, each started by hand; nobody restarts them."""

    def __init__(self, directory: Path, url: str) -> None:
        settings = {"trainer.max_steps": STEPS, "checkpoint.every_steps": 2, "redis.url": url}
        self._config, self.layout = write_small_run(directory, settings)
        self.started: list[subprocess.Popen[bytes]] = []

    def start(self, role: str, worker_id: str) -> subprocess.Popen[bytes]:
        command = [sys.executable, "-m", f"workers.{role}", str(self._config), "--worker-id", worker_id]
        process = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        self.started.append(process)
        return process

    def steps_of(self, epoch: int) -> int:
        return sum(line["epoch"] == epoch for line in read_json_lines(self.layout.metrics_jsonl))

    def of(self, worker_id: str, *, since_s: float) -> list[dict[str, Any]]:
        """What a worker logged after a time."""
        lines = read_json_lines(self.layout.events_jsonl)
        return [line for line in lines if line.get("worker_id") == worker_id and line["time_s"] >= since_s]

    def segments(self, epoch: int) -> dict[str, bytes]:
        return {path.name: path.read_bytes() for path in self.layout.intake_dir.glob(f"{epoch:06d}-*.log")}

    def checkpoints_of(self, epoch: int) -> set[str]:
        """Names of the checkpoints that a trainer of this epoch wrote: their position in the log is in its segments."""
        paths = self.layout.checkpoints_dir.glob("step_*/meta.json")
        metas = {path.parent.name: json.loads(path.read_text())["meta"] for path in paths}
        return {name for name, meta in metas.items() if meta["log_segment"].startswith(f"{epoch:06d}-")}


@pytest.fixture
def run(tmp_path: Path) -> Iterator[Run]:
    with EmbeddedRedis(tmp_path / "redis") as server:
        running = Run(tmp_path, server.url)
        yield running
        for process in running.started:
            process.kill()
            process.wait()


def wait_for(condition: Callable[[], bool], what: str) -> None:
    deadline = time.monotonic() + DEADLINE_S
    while not condition():
        assert time.monotonic() < deadline, f"no {what}"
        time.sleep(0.02)


@pytest.mark.chaos
@pytest.mark.timeout(400)
def test_an_outdated_trainer_that_wakes_up_does_nothing_but_end(run: Run) -> None:
    others = [run.start(role, f"{role}-0") for role in ("coordinator", "rollout")]
    old = run.start("trainer", "old")
    wait_for(lambda: run.steps_of(1) >= 5, "step of the first trainer")
    old.send_signal(signal.SIGSTOP)
    new = run.start("trainer", "new")
    wait_for(lambda: run.steps_of(2) >= 4, "step of the second trainer")

    log, checkpoints, steps = run.segments(1), run.checkpoints_of(1), run.steps_of(1)
    woken_s = time.time()
    old.send_signal(signal.SIGCONT)
    assert old.wait(DEADLINE_S) == FENCED
    assert run.checkpoints_of(1) <= checkpoints
    assert run.steps_of(1) == steps
    done = {line["event"] for line in run.of("old", since_s=woken_s)}
    assert not done & {"version.announced", "push.measured", "checkpoint.written", "epoch.raised"}, done

    assert new.wait(DEADLINE_S) == 0
    assert [process.wait(DEADLINE_S) for process in others] == [0, 0]
    # What it may have appended before it looked lies beyond the seal: no reader of the log sees it.
    for name, before in log.items():
        if name in (now := run.segments(1)):
            assert now[name].startswith(before)
    result = audit(run.layout.root)
    assert result.is_exact, result
    assert result.ends["trained"] == STEPS * 4
    served = [line for line in read_json_lines(run.layout.events_jsonl) if line["event"] == "engine.serving"]
    assert [line["version"] for line in served] == sorted(line["version"] for line in served)
    assert {line["epoch"] for line in served if line["time_s"] >= woken_s} <= {2}
