"""What is done to a run: each kind of injury hits one process."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

import psutil
from progress import Progress

TAKEOVER_S = 15.0


class Processes:
    """The processes of one run: what the supervisor started, and its server."""

    def __init__(self, supervisor: int, run_dir: Path) -> None:
        self._supervisor = psutil.Process(supervisor)
        self.run_dir = run_dir

    def of_role(self, role: str) -> psutil.Process | None:
        """The role's process, if it is up."""
        for child in self._supervisor.children(recursive=True):
            try:
                if f"workers.{role}" in child.cmdline() and child.status() != psutil.STATUS_ZOMBIE:
                    return child
            except psutil.NoSuchProcess:
                continue
        return None

    def server(self) -> psutil.Process | None:
        try:
            process = psutil.Process(int((self.run_dir / "redis" / "redis.pid").read_text()))
        except (OSError, ValueError, psutil.NoSuchProcess):
            return None
        return process if process.status() != psutil.STATUS_ZOMBIE else None


@dataclass(frozen=True, slots=True)
class Injury:
    """weight: how often it is chosen. do: returns what was hit, or None if there is nothing to hit now."""

    weight: float
    do: Callable[[Processes, Progress], str | None]

    def __call__(self, processes: Processes, progress: Progress) -> str | None:
        return self.do(processes, progress)


def _kill(role: str) -> Callable[[Processes, Progress], str | None]:
    def kill(processes: Processes, progress: Progress) -> str | None:
        del progress
        process = processes.server() if role == "redis" else processes.of_role(role)
        if process is None:
            return None
        age_s = time.time() - process.create_time()
        process.kill()
        return f"kill -9 {process.pid} after {age_s:.1f} s"

    return kill


def _hang(role: str) -> Callable[[Processes, Progress], str | None]:
    """The process lives and does nothing: the supervisor has to find out by its lease."""

    def hang(processes: Processes, progress: Progress) -> str | None:
        del progress
        process = processes.of_role(role)
        if process is None:
            return None
        process.suspend()
        return f"SIGSTOP {process.pid}"

    return hang


def _outdated_trainer(processes: Processes, progress: Progress) -> str | None:
    """The trainer stands still while another one takes over and trains; then that one dies, and the old one wakes up."""
    old = processes.of_role("trainer")
    if old is None:
        return None
    progress.refresh()
    epoch = progress.epoch
    old.suspend()
    output = (processes.run_dir / "logs" / "trainer-by-hand.out").open("ab")
    command = [sys.executable, "-m", "workers.trainer", str(processes.run_dir / "config.toml")]
    new = subprocess.Popen(command, stdout=output, stderr=output, stdin=subprocess.DEVNULL)
    output.close()
    try:
        deadline = time.monotonic() + TAKEOVER_S
        while progress.epoch <= epoch and time.monotonic() < deadline and new.poll() is None:
            time.sleep(0.05)
            progress.refresh()
        took_over = progress.epoch > epoch
    finally:
        new.kill()
        new.wait()
    try:
        os.kill(old.pid, signal.SIGCONT)
    except ProcessLookupError:
        return "SIGSTOP, another trainer took over, the supervisor had given the old one up"
    return "SIGSTOP, another trainer took over, SIGCONT" if took_over else "SIGSTOP, another trainer started, SIGCONT"


KINDS: Mapping[str, Injury] = {
    "coordinator": Injury(1.0, _kill("coordinator")),
    "rollout": Injury(1.0, _kill("rollout")),
    "reward": Injury(0.7, _kill("reward")),
    "trainer": Injury(1.2, _kill("trainer")),
    "redis": Injury(1.0, _kill("redis")),
    "rollout-hang": Injury(0.15, _hang("rollout")),
    "trainer-outdated": Injury(0.3, _outdated_trainer),
}
