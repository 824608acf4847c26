"""A whole run as a process of its own, for tests that do something to it from outside."""

from __future__ import annotations

import subprocess
import sys
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import psutil

from async_rl.config import dump_toml, load_config
from async_rl.launch.demo_model import demo_model, demo_tokenizer, save_model
from async_rl.run_dir.files import read_json_lines
from async_rl.run_dir.layout import RunLayout

DEADLINE_S = 100


def write_small_run(directory: Path, settings: Mapping[str, object]) -> tuple[Path, RunLayout]:
    """A tiny model and the config of a run that trains it on short sort_digits for ever: the file, and where it will run."""
    tokenizer = demo_tokenizer()
    save_model(directory / "model", demo_model(tokenizer, seed=0), tokenizer)
    chosen = {
        "run_dir": directory / "run",
        "model.path": directory / "model",
        "environment.args.length": 3,
        "rollout.group_size": 4,
        "rollout.max_new_tokens": 5,
        "trainer.groups_per_step": 4,
        "trainer.max_steps": 100_000,
        "redis.lease_s": 3.0,
        **settings,
    }
    config = load_config(None, [f"--{key}={value}" for key, value in chosen.items()], {}).config
    config_toml = directory / "config.toml"
    config_toml.write_text(dump_toml(config))
    return config_toml, RunLayout(config.run_dir)


class RunProcess:
    """`async-rl run` as a process on a task of seconds, training without an end, and what its files say. settings: on top."""

    def __init__(self, directory: Path, settings: Mapping[str, object]) -> None:
        config_toml, self.layout = write_small_run(directory, settings)
        self.started: list[subprocess.Popen[bytes]] = []
        self.supervisor = self.start("workers.cli", "run", config_toml)

    def start(self, module: str, *arguments: object) -> subprocess.Popen[bytes]:
        command = [sys.executable, "-m", module, *map(str, arguments)]
        process = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        self.started.append(process)
        return process

    def end(self) -> None:
        """Kill what still runs."""
        for process in self.started:
            process.kill()
            process.wait()

    def own(self, role: str, *options: str) -> psutil.Process:
        """The process that the supervisor started for a role, with these among its arguments."""
        children = psutil.Process(self.supervisor.pid).children()
        return next(child for child in children if {f"workers.{role}", *options} <= set(child.cmdline()))

    def steps(self) -> int:
        return sum(1 for _ in read_json_lines(self.layout.metrics_jsonl))

    def events(self, name: str) -> list[Mapping[str, Any]]:
        return [event for event in read_json_lines(self.layout.events_jsonl) if event["event"] == name]

    def groups_of(self, worker: str) -> int:
        return max((line["groups"] for line in read_json_lines(self.layout.worker_metrics_jsonl(worker))), default=0)

    def wait_for(self, condition: Callable[[], bool], what: str) -> None:
        deadline = time.monotonic() + DEADLINE_S
        while not condition():
            assert self.supervisor.poll() is None, f"the run ended before there was {what}"
            assert time.monotonic() < deadline, f"no {what}"
            time.sleep(0.05)
