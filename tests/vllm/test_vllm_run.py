"""Whole runs with vLLM as the rollout engine: every role a process, a real server, a real trainer."""

from __future__ import annotations

import json
import os
import signal
import threading
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import psutil
import pytest

from async_rl import RunConfig, run
from async_rl.checks.audit import audit
from async_rl.config import load_config
from async_rl.launch.demo_model import demo_model, demo_tokenizer, save_model
from async_rl.launch.local import RunEnd
from async_rl.run_dir.files import read_json_lines

pytestmark = pytest.mark.vllm


@pytest.fixture(scope="module")
def model_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("model") / "tiny"
    tokenizer = demo_tokenizer()
    save_model(path, demo_model(tokenizer, seed=0, num_heads=2), tokenizer)
    return path


@pytest.fixture
def make_config(model_dir: Path, tmp_path: Path) -> Callable[..., RunConfig]:
    def make(**settings: Any) -> RunConfig:
        chosen: dict[str, Any] = {
            "run_dir": tmp_path / "run",
            "model.path": model_dir,
            "environment.args.length": 3,
            "rollout.engine": "vllm",
            "rollout.vllm.kv_cache_bytes": 2**26,
            "rollout.group_size": 4,
            "rollout.max_new_tokens": 5,
            "trainer.groups_per_step": 4,
            "trainer.max_steps": 6,
            "staleness.max_lag": 2,
            "weights.deadline_s": 120.0,
            "launch.min_healthy_grace_s": 1800.0,  # three processes import vLLM for each start, on a machine with other work
            "launch.start_timeout_s": 1800.0,
            "trainer.idle_timeout_s": 1800.0,
            **{name.replace("__", "."): value for name, value in settings.items()},
        }
        return load_config(None, [f"--{key}={value}" for key, value in chosen.items()], {}).config

    return make


def lines(path: Path) -> list[dict[str, Any]]:
    return list(read_json_lines(path))


def engine_processes(config: RunConfig) -> dict[str, list[psutil.Process]]:
    """The rollout worker of a run, and what it started, by what it is."""
    found: dict[str, list[psutil.Process]] = {"rollout": [], "EngineCore": [], "Worker": []}
    for process in psutil.Process().children(recursive=True):
        try:
            command = " ".join(process.cmdline())
        except psutil.NoSuchProcess:
            continue
        if "workers.rollout" in command and str(config.run_dir) in command:
            found["rollout"].append(process)
        for name in ("EngineCore", "Worker"):
            if name in command:
                found[name].append(process)
    return found


def check_pushes(config: RunConfig) -> Mapping[str, Any]:
    steps = lines(config.run_dir / "metrics.jsonl")
    assert [step["step"] for step in steps] == list(range(1, config.trainer.max_steps + 1))
    pushes = [event for event in lines(config.run_dir / "events.jsonl") if event["event"] == "push.measured"]
    proven = [push for push in pushes if push["parity_max_abs"] is not None]
    assert proven, pushes
    assert max(push["parity_max_abs"] for push in proven) <= 1e-4
    report = audit(config.run_dir)
    assert report.is_exact, report
    return steps[-1]


@pytest.mark.timeout(1800)
@pytest.mark.parametrize("backend", ["gloo", "shm", "disk"])
def test_a_run_trains_with_vllm(make_config: Callable[..., RunConfig], backend: str) -> None:
    config = make_config(weights__backend=backend)
    result = run(config, console=False)
    assert (result.end, result.steps) == (RunEnd.COMPLETED, 6)
    check_pushes(config)


@pytest.mark.timeout(1800)
def test_a_run_trains_with_a_vllm_server(make_config: Callable[..., RunConfig]) -> None:
    config = make_config(rollout__engine="vllm-server")
    assert run(config, console=False).steps == 6
    check_pushes(config)


@pytest.mark.timeout(2700)
@pytest.mark.parametrize("victim", ["rollout", "EngineCore", "Worker"])
def test_a_run_recovers_from_the_death_of_an_engine_process(make_config: Callable[..., RunConfig], victim: str) -> None:
    config = make_config(trainer__max_steps=40, rollout__max_new_tokens=12, launch__backoff_s=0.1)
    killed: list[int] = []

    def kill_one() -> None:
        metrics = config.run_dir / "metrics.jsonl"
        end = time.monotonic() + 900
        while time.monotonic() < end and not killed:
            if metrics.exists() and metrics.read_text().count("\n") >= 3:
                for process in engine_processes(config)[victim][:1]:
                    os.kill(process.pid, signal.SIGKILL)
                    killed.append(process.pid)
            time.sleep(0.1)

    killer = threading.Thread(target=kill_one)
    killer.start()
    result = run(config, console=False)
    killer.join()
    assert killed
    assert result.steps == 40
    check_pushes(config)
    failures = [event for event in lines(config.run_dir / "events.jsonl") if event["event"] == "role.failed"]
    assert [failure["name"] for failure in failures] == ["rollout-0"], json.dumps(failures)
    assert not any(engine_processes(config).values())
