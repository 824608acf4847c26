"""A server that comes back without its last writes, under a whole run: what it forgot is done again, once."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest

from async_rl.checks.audit import audit
from async_rl.launch.demo_model import demo_model, demo_tokenizer, save_model
from async_rl.run_dir.files import read_json_lines
from async_rl.run_dir.layout import RunLayout

STEPS = 60
DEADLINE_S = 150
LOST_BYTES = 60_000  # of the append-only file: the entries of a few steps
SETTINGS: dict[str, Any] = {
    "environment.args.length": 3,
    "rollout.group_size": 4,
    "rollout.max_new_tokens": 5,
    "trainer.groups_per_step": 4,
    "trainer.learning_rate": 1e-3,
    "trainer.max_steps": STEPS,
    "checkpoint.every_steps": 10,
    "redis.lease_s": 2.0,
    "launch.backoff_s": 2.0,
    "launch.max_backoff_s": 2.0,
    "launch.max_restarts": 100,
}


@pytest.fixture
def run_dir(tmp_path: Path) -> Iterator[Path]:
    """A run that goes on, of STEPS steps."""
    tokenizer = demo_tokenizer()
    save_model(tmp_path / "model", demo_model(tokenizer, seed=0), tokenizer)
    config = tmp_path / "config.toml"
    config.write_text(f'run_dir = "{tmp_path}/run"\n[model]\npath = "{tmp_path}/model"\n')
    flags = [f"--{key}={value}" for key, value in SETTINGS.items()]
    with (tmp_path / "run.out").open("w") as output:
        command = [sys.executable, "-m", "workers.cli", "run", str(config), *flags]
        process = subprocess.Popen(command, stdout=output, stderr=subprocess.STDOUT, stdin=subprocess.DEVNULL)
    try:
        yield tmp_path / "run"
        assert process.wait(DEADLINE_S) == 0, (tmp_path / "run.out").read_text()[-3000:]
    finally:
        process.kill()
        process.wait()


def steps_of(run_dir: Path) -> list[int]:
    return [int(line["step"]) for line in read_json_lines(run_dir / "metrics.jsonl")]


def lose_last_writes(run_dir: Path) -> int:
    """kill -9 the server and cut its append-only file, as a disk does that had not written it yet. Returns the bytes lost."""
    directory = run_dir / "redis"
    server = psutil.Process(int((directory / "redis.pid").read_text()))
    os.kill(server.pid, signal.SIGKILL)
    (written,) = (directory / "appendonlydir").glob("*.incr.aof")
    size = written.stat().st_size
    lost = min(LOST_BYTES, size // 2)
    os.truncate(written, size - lost)
    return lost


@pytest.mark.chaos
@pytest.mark.timeout(2 * DEADLINE_S)
def test_what_a_server_forgot_is_done_again_and_trained_once(run_dir: Path, request: pytest.FixtureRequest) -> None:
    deadline = time.monotonic() + DEADLINE_S
    for steps in (8, 24):
        while len(steps_of(run_dir)) < steps:
            assert time.monotonic() < deadline, "no progress"
            time.sleep(0.05)
        assert lose_last_writes(run_dir) > 10_000
    while len(steps_of(run_dir)) < STEPS or not audit(run_dir).issued:
        assert time.monotonic() < deadline, f"only {len(steps_of(run_dir))} steps"
        time.sleep(0.2)
    assert steps_of(run_dir) == list(range(1, STEPS + 1))
    ledger = audit(run_dir)
    assert ledger.is_exact
    assert ledger.ends["trained"] == STEPS * SETTINGS["trainer.groups_per_step"]
    events = [line["event"] for line in read_json_lines(RunLayout(run_dir).events_jsonl)]
    assert events.count("queue.back") >= 2  # the trainer saw both
