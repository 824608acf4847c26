"""Weight pushes in which engines die, hang and come late; then many good ones, after which nothing may have grown or be left.

    python tests/chaos/pushes.py [--rounds 100] [--pushes 200] [--smoke] [--seed N] [--out runs/pushes]

A round has three engines that serve. In the next push one is killed with -9 at a phase of the push and another stopped with
SIGSTOP at a phase of its own, while a fourth one starts. The push must end within its deadline and a second, the third engine
must serve the new version, the late one must serve by the end of one further push, and what any engine served, ever, must be
exactly the version that it says. Then the stopped one goes on: it serves nothing until it holds a complete version. Writes
summary.json.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import random
import signal
import statistics
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import torch
from rich.console import Console
from rich.table import Table

from async_rl.config.trainer import WeightsConfig
from async_rl.registry.versions import EngineStatus
from async_rl.run_dir.segments_of_run import segments_of_run
from async_rl.testing.push_engines import PHASES
from async_rl.testing.push_run import START_S, PushRun, serving
from async_rl.testing.push_targets import TinyPolicy
from async_rl.weights.publisher import Publisher

DEADLINE_S = 6.0
MARGIN_S = 1.0
BACKENDS = ("gloo", "shm", "disk")
GROWTH_BYTES_PER_PUSH = 32 * 1024
"""Of resident memory. A leaked snapshot would be four times as much."""


@dataclass(slots=True)
class Findings:
    """What was seen."""

    waits_s: list[float] = field(default_factory=list)
    late_s: list[float] = field(default_factory=list)
    served: int = 0
    problems: list[str] = field(default_factory=list)
    growth: dict[str, dict[str, float]] = field(default_factory=dict)

    def require(self, holds: bool, problem: str) -> None:
        if not holds:
            self.problems.append(problem)


class Rounds:
    """Rounds on one backend: one trainer and one steady engine throughout."""

    def __init__(self, run: PushRun, choice: random.Random, findings: Findings) -> None:
        self._run = run
        self._choice = choice
        self._findings = findings
        self._version = 0

    async def start(self) -> None:
        self._run.engine("steady")
        await self._run.joined("steady")
        self._publisher: Publisher = await self._run.publisher(1)
        await self._push()

    async def round(self, number: int) -> str:
        """Returns what was done, for the log."""
        kill_at, stop_at = self._choice.choice(PHASES), self._choice.choice(PHASES)
        self._run.lease_outlives_process = self._choice.random() < 0.5
        killed, stopped, late = (f"{name}-{number}" for name in ("killed", "stopped", "late"))
        fatal = self._version + 2
        self._run.engine(killed, fault="SIGKILL", at_version=fatal, at_phase=kill_at)
        self._run.engine(stopped, fault="SIGSTOP", at_version=fatal, at_phase=stop_at)
        await self._run.joined(killed, stopped)
        await self._push()
        await self._run.serves(self._version, "steady", killed, stopped, timeout_s=START_S)

        self._run.engine(late)
        waited_s = await self._push()
        what = f"round {number} ({self._run.weights.backend}): kill at {kill_at}, stop at {stop_at}"
        self._findings.waits_s.append(waited_s)
        self._findings.require(waited_s <= DEADLINE_S + MARGIN_S, f"{what}: the push took {waited_s:.2f} s")
        state = await self._run.registry.state()
        self._findings.require(serving(state, "steady") == self._version, f"{what}: the steady engine does not serve it")

        await self._run.joined(late)
        late_s = await self._push()
        state = await self._run.registry.state()
        self._findings.late_s.append(late_s)
        self._findings.require(serving(state, late) == self._version, f"{what}: the late one missed the next push")
        await self._wake(stopped, what)
        self._end(killed, stopped, late)
        self._check_served(what)
        return f"{what}: {waited_s:.2f} s"

    async def _push(self) -> float:
        """Push a new version; the seconds until the coordinator ended it, or DEADLINE_S and twice the margin."""
        self._version += 1
        started = time.monotonic()
        await self._run.submit(self._publisher, self._version, TinyPolicy(self._version))
        await self._publisher.drain(timeout_s=DEADLINE_S + 2 * MARGIN_S)
        return time.monotonic() - started

    async def _wake(self, name: str, what: str) -> None:
        """The stopped engine goes on: fenced, until a push makes it whole."""
        process = self._run.engines[name]
        assert process.pid is not None
        state = await self._run.registry.state()
        record = state.engines.get(name)
        fenced = record is None or record.status is EngineStatus.FENCED
        self._findings.require(fenced, f"{what}: the stopped engine counts as healthy")
        os.kill(process.pid, signal.SIGCONT)
        try:
            await self._run.serves(self._version, name, timeout_s=START_S)
        except TimeoutError:
            self._findings.problems.append(f"{what}: the stopped engine never came back")

    def _end(self, *names: str) -> None:
        for name in names:
            process = self._run.engines.pop(name)
            process.kill()
            process.join(10)
            process.close()

    def _check_served(self, what: str) -> None:
        """Every engine wrote what it held whenever it began to serve."""
        for path in self._run.directory.glob("*.pt"):
            version = int(path.stem.rpartition("-")[2])
            held: dict[str, torch.Tensor] = torch.load(path, weights_only=True)
            sent = TinyPolicy(version).state_dict()
            same = all(torch.equal(held[name], sent[name]) for name in sent)
            self._findings.require(same, f"{what}: {path.stem} is not what was sent")
            self._findings.served += 1
            path.unlink()


async def torment(backend: str, rounds: Sequence[int], choice: random.Random, findings: Findings, console: Console) -> None:
    """Run these rounds on one backend."""
    with tempfile.TemporaryDirectory() as directory:
        run = PushRun(Path(directory), WeightsConfig(backend=backend, bucket_bytes=2**16, deadline_s=DEADLINE_S))
        await run.start()
        try:
            torments = Rounds(run, choice, findings)
            await torments.start()
            for number in rounds:
                console.print(await torments.round(number), highlight=False)
        finally:
            await run.stop()
        leftovers(run, findings)


async def repeat(backend: str, pushes: int, findings: Findings) -> None:
    """Push again and again to two engines, and watch what the processes hold."""
    with tempfile.TemporaryDirectory() as directory:
        run = PushRun(Path(directory), WeightsConfig(backend=backend, bucket_bytes=2**16, deadline_s=30.0))
        await run.start()
        try:
            run.engine("a")
            run.engine("b")
            await run.joined("a", "b")
            publisher = await run.publisher(1)
            watched = {"trainer": psutil.Process(), **{name: psutil.Process(run.engines[name].pid) for name in ("a", "b")}}
            rss: dict[str, list[int]] = {name: [] for name in watched}
            files: dict[str, list[int]] = {name: [] for name in watched}
            for version in range(1, pushes + 1):
                await run.submit(publisher, version, TinyPolicy(version))
                await run.serves(version, "a", "b", timeout_s=30)
                await publisher.drain(timeout_s=30)
                for path in run.directory.glob("*.pt"):
                    path.unlink()
                for name, process in watched.items():
                    rss[name].append(process.memory_info().rss)
                    files[name].append(process.num_fds())
        finally:
            await run.stop()
        leftovers(run, findings)
    for name in watched:
        slope, opened = slope_of(rss[name]), max(files[name][-10:]) - max(files[name][10:20])
        findings.growth[f"{backend} {name}"] = {"bytes_per_push": round(slope, 1), "files": opened}
        findings.require(slope < GROWTH_BYTES_PER_PUSH, f"{backend}: {name} grows by {slope:.0f} bytes a push")
        findings.require(opened <= 0, f"{backend}: {name} holds {opened} more open files than after the first pushes")


def slope_of(values: Sequence[int]) -> float:
    """Per push, over the last three quarters: the median of the slopes between pushes half the way apart."""
    kept = np.array(values[len(values) // 4 :], dtype=np.float64)
    half = len(kept) // 2
    return float(np.median((kept[half : 2 * half] - kept[:half]) / half))


def leftovers(run: PushRun, findings: Findings) -> None:
    """After the end: no segment, no process, no socket of the server."""
    segments = segments_of_run(run.weights.shm_dir, run.run_id)
    findings.require(not segments, f"left in shared memory: {[path.name for path in segments]}")
    sockets = [path.name for path in run.directory.rglob("*.sock")]
    findings.require(not sockets, f"sockets left: {sockets}")
    parts = [path.name for path in run.directory.rglob("*partial*")]
    findings.require(not parts, f"partial files left: {parts}")


def report(findings: Findings, seconds: float, seed: int) -> dict[str, Any]:
    return {
        "rounds": len(findings.waits_s),
        "deadline_s": DEADLINE_S,
        "wait_max_s": round(max(findings.waits_s, default=0.0), 3),
        "wait_p50_s": round(statistics.median(findings.waits_s), 3) if findings.waits_s else None,
        "late_max_s": round(max(findings.late_s, default=0.0), 3),
        "versions_served_and_compared": findings.served,
        "growth": findings.growth,
        "problems": findings.problems,
        "seconds": round(seconds, 1),
        "seed": seed,
    }


async def everything(arguments: argparse.Namespace, seed: int, findings: Findings, console: Console) -> None:
    choice = random.Random(seed)
    numbers = list(range(arguments.rounds))
    for index, backend in enumerate(BACKENDS):
        await torment(backend, numbers[index :: len(BACKENDS)], choice, findings, console)
    for backend in BACKENDS:
        await repeat(backend, arguments.pushes, findings)


def main() -> int:
    parser = argparse.ArgumentParser(description="Pushes in which engines die, hang and come late.")
    parser.add_argument("--rounds", type=int, default=None, help="default: 100, with --smoke 10")
    parser.add_argument("--pushes", type=int, default=None, help="good pushes per backend; default: 200, with --smoke 60")
    parser.add_argument("--smoke", action="store_true")
    parser.add_argument("--seed", type=int, default=None, help="default: from the clock; it is printed")
    parser.add_argument("--out", type=Path, default=Path("runs/pushes"))
    arguments = parser.parse_args()
    arguments.rounds = arguments.rounds or (10 if arguments.smoke else 100)
    arguments.pushes = arguments.pushes or (60 if arguments.smoke else 200)
    seed = int(time.time()) % 2**31 if arguments.seed is None else arguments.seed
    torch.set_num_threads(1)
    console, findings, started = Console(), Findings(), time.monotonic()
    console.print(f"{arguments.rounds} rounds, {arguments.pushes} pushes per backend, seed {seed}", highlight=False)
    asyncio.run(everything(arguments, seed, findings, console))
    summary = report(findings, time.monotonic() - started, seed)
    arguments.out.mkdir(parents=True, exist_ok=True)
    (arguments.out / "summary.json").write_text(json.dumps(summary, indent=2) + "\n")
    table = Table("process", "bytes a push", "open files", title="growth over good pushes", title_justify="left")
    for name, growth in findings.growth.items():
        table.add_row(name, f"{growth['bytes_per_push']:.0f}", f"{growth['files']:.0f}")
    console.print(table)
    console.print({name: value for name, value in summary.items() if name not in ("growth", "problems")})
    for problem in findings.problems:
        console.print(f"PROBLEM: {problem}", style="bold red", markup=False)
    return 1 if findings.problems else 0


if __name__ == "__main__":
    raise SystemExit(main())
