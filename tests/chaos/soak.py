"""Train the demo for a long time and show that no process grows: neither a role, nor what starts them, nor the server.

    python tests/chaos/soak.py [--minutes 30] [--smoke] [--seed N] [--out runs/soak]

Every few seconds: the memory that each process has for itself (USS: what would be free if it ended), with its children, and
the server's own count. What comes after the first minutes is cut into windows of a minute; a line is fitted through their
medians. A slope counts as growth if even the lower end of its 95 % interval is above LIMIT_MIB_PER_H. Nothing may have been
restarted meanwhile. Writes samples.csv, summary.json and memory.png.
"""

from __future__ import annotations

import argparse
import csv
import itertools
import json
import math
import shutil
import signal
import statistics
import subprocess
import sys
import time
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path

import psutil
import redis
from progress import Progress
from rich.console import Console
from rich.table import Table

MINUTES, SMOKE_MINUTES = 30.0, 1.5
SETTLE_MINUTES, SMOKE_SETTLE_MINUTES = 5.0, 0.5
"""Allocators reach their level, first checkpoints are written, the log starts to be compacted."""
SAMPLE_S = 2.0
WINDOW_S, SMOKE_WINDOW_S = 60.0, 10.0
LIMIT_MIB_PER_H, SMOKE_LIMIT_MIB_PER_H = 12.0, 400.0
"""12 MiB an hour are 2 GiB in a week. The demo makes some hundred times more groups an hour than a run with a real model."""
MIB = 2**20
STOP_S = 90.0
ROLES = ("coordinator", "trainer", "rollout", "reward")
SUPERVISOR, SERVER, SERVER_DATA = "supervisor", "redis", "redis used_memory"
FLAGS = (
    "--trainer.max_steps=100000000",
    "--trainer.schedule=constant",
    "--trainer.learning_rate=1e-5",  # endless steps at the demo's own rate would end anywhere
    "--reward.placement=workers",
    "--checkpoint.every_steps=100",
    "--checkpoint.log_segment_bytes=8388608",
)


@dataclass(frozen=True, slots=True)
class Plan:
    """What is to be done. Times in seconds."""

    out: Path
    seed: int
    seconds: float
    settle_s: float
    window_s: float
    limit_mib_per_h: float


@dataclass(frozen=True, slots=True)
class Fit:
    """A line through the medians of the windows; `low` and `high` are the 95 % interval of its slope, MiB an hour."""

    slope: float
    low: float
    high: float
    start_mib: float
    end_mib: float
    windows: int


@dataclass(slots=True)
class Samples:
    """Name → (seconds since the start, bytes)."""

    series: dict[str, list[tuple[float, int]]] = field(default_factory=lambda: defaultdict(list))
    pids: dict[str, set[int]] = field(default_factory=lambda: defaultdict(set))

    def take(self, supervisor: psutil.Process, server: redis.Redis, at_s: float) -> None:
        """One sample of everything. A process that ends meanwhile is left out."""
        for name, processes in owners(supervisor).items():
            self.pids[name].add(processes[0].pid)
            try:
                used = sum(process.memory_full_info().uss for process in processes)
            except psutil.Error:
                continue
            self.series[name].append((at_s, used))
        try:
            self.series[SERVER_DATA].append((at_s, int(server.info("memory")["used_memory"])))
        except redis.RedisError:
            return

    def write(self, path: Path) -> None:
        with path.open("w", newline="") as file:
            rows = csv.writer(file)
            rows.writerow(("seconds", "process", "bytes"))
            rows.writerows((f"{at_s:.1f}", name, used) for name, samples in self.series.items() for at_s, used in samples)


def owners(supervisor: psutil.Process) -> dict[str, list[psutil.Process]]:
    """Name → a process of the run and what it started itself, but for the server's forks, which share its pages."""
    found: dict[str, list[psutil.Process]] = {SUPERVISOR: [supervisor]}
    for child in supervisor.children():
        try:
            command = child.cmdline()
            role = next((role for role in ROLES if f"workers.{role}" in command), None)
            if role is not None:
                found[role] = [child, *child.children(recursive=True)]
            elif any("redis.sock" in part for part in command):
                found[SERVER] = [child]
        except psutil.Error:
            continue
    return found


def fit(samples: Sequence[tuple[float, int]], plan: Plan) -> Fit | None:
    """Least squares through the medians of the windows after the settling time; None with fewer than four of them.

    Memory moves in steps, so residuals are alike in neighbouring windows: the interval is made for as many independent ones as
    their lag-1 autocorrelation r leaves, n (1 − r)/(1 + r) (Bayley and Hammersley 1946, first-order case).
    """
    windows: dict[int, list[float]] = defaultdict(list)
    for at_s, used in samples:
        if at_s >= plan.settle_s:
            windows[int((at_s - plan.settle_s) / plan.window_s)].append(used / MIB)
    if len(windows) < 4:
        return None
    hours = [(index + 0.5) * plan.window_s / 3600 for index in windows]
    levels = [statistics.median(values) for values in windows.values()]
    slope, intercept = statistics.linear_regression(hours, levels)
    residuals = [level - intercept - slope * hour for hour, level in zip(hours, levels, strict=True)]
    square = sum(residual**2 for residual in residuals)
    count = len(levels)
    spread = sum((hour - statistics.fmean(hours)) ** 2 for hour in hours)
    neighbours = sum(a * b for a, b in itertools.pairwise(residuals))
    likeness = min(0.9, max(0.0, neighbours / square)) if square > 0 else 0.0
    independent = max(4.0, count * (1 - likeness) / (1 + likeness))
    half = student_t_975(independent - 2) * math.sqrt(square / (independent - 2) / spread)
    return Fit(slope, slope - half, slope + half, levels[0], levels[-1], count)


def student_t_975(freedom: float) -> float:
    """Upper 97.5 % point of Student's t, by the expansion of Cornish and Fisher (Abramowitz and Stegun 26.7.5)."""
    z = statistics.NormalDist().inv_cdf(0.975)
    terms = (
        (z**3 + z) / 4,
        (5 * z**5 + 16 * z**3 + 3 * z) / 96,
        (3 * z**7 + 19 * z**5 + 17 * z**3 - 15 * z) / 384,
        (79 * z**9 + 776 * z**7 + 1482 * z**5 - 1920 * z**3 - 945 * z) / 92160,
    )
    return z + sum(term / freedom ** (power + 1) for power, term in enumerate(terms))


def soak(plan: Plan, console: Console) -> tuple[Samples, dict[str, object]]:
    """Run the demo for the time of the plan. Returns the samples, and how it went."""
    plan.out.mkdir(parents=True, exist_ok=True)
    run_dir = plan.out / "demo"
    if (run_dir / "run.json").exists():
        shutil.rmtree(run_dir)  # or its files would be taken for progress
    command = [
        sys.executable,
        "-m",
        "workers.cli",
        "demo",
        "--overwrite",
        f"--run_dir={run_dir}",
        f"--seed={plan.seed}",
        *FLAGS,
    ]
    samples, progress = Samples(), Progress(run_dir)
    with (plan.out / "demo.out").open("w") as output:
        demo = subprocess.Popen(command, stdout=output, stderr=subprocess.STDOUT, stdin=subprocess.DEVNULL)
        try:
            server = _wait_for_training(demo, run_dir, progress)
            first, started = progress.trained, time.monotonic()
            with server:
                _look_on(demo, server, samples, started, plan, console)
            seconds = time.monotonic() - started
            demo.send_signal(signal.SIGTERM)
            code = demo.wait(STOP_S)
        finally:
            demo.kill()  # its roles end with it
            demo.wait()
    progress.refresh()
    restarted = sorted(name for name, pids in samples.pids.items() if len(pids) > 1)
    steps = progress.trained - first
    went = {"seconds": round(seconds, 1), "steps": steps, "restarted": restarted, "exit_code": code, "seed": plan.seed}
    return samples, went


def _wait_for_training(demo: subprocess.Popen[bytes], run_dir: Path, progress: Progress) -> redis.Redis:
    deadline = time.monotonic() + 180.0
    while progress.trained < 2:
        if demo.poll() is not None or time.monotonic() > deadline:
            raise SystemExit(f"the demo did not begin to train; see {run_dir.parent / 'demo.out'}")
        time.sleep(0.2)
        progress.refresh()
    return redis.Redis.from_url((run_dir / "redis" / "redis.url").read_text().strip())


def _look_on(
    demo: subprocess.Popen[bytes], server: redis.Redis, samples: Samples, started: float, plan: Plan, console: Console
) -> None:
    supervisor = psutil.Process(demo.pid)
    next_word_s = 0.0
    while demo.poll() is None and (at_s := time.monotonic() - started) < plan.seconds:
        samples.take(supervisor, server, at_s)
        if at_s >= next_word_s:
            next_word_s += 60.0
            now = {name: f"{values[-1][1] / MIB:.1f}" for name, values in samples.series.items()}
            console.print(f"{at_s / 60:4.0f} min, MiB: {now}", highlight=False, markup=False)
        time.sleep(SAMPLE_S)


def problems(fits: Mapping[str, Fit | None], went: Mapping[str, object], plan: Plan) -> list[str]:
    """What the run failed to show."""
    found = [f"{name}: too few samples for a line" for name, line in fits.items() if line is None]
    found += [f"{name} has no samples" for name in (*ROLES, SUPERVISOR, SERVER, SERVER_DATA) if name not in fits]
    found += [
        f"{name} grows by {line.slope:.1f} MiB an hour ({line.low:.1f} to {line.high:.1f}, limit {plan.limit_mib_per_h:g})"
        for name, line in fits.items()
        if line is not None and line.low > plan.limit_mib_per_h
    ]
    if went["restarted"]:
        found.append(f"restarted: {went['restarted']}; what grew is gone with it")
    if went["exit_code"] != 128 + signal.SIGTERM:
        found.append(f"the demo ended with exit code {went['exit_code']} instead of {128 + signal.SIGTERM}")
    return found


def draw(samples: Samples, fits: Mapping[str, Fit | None], plan: Plan) -> None:
    """memory.png: a panel per process, with its line."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, panels = pyplot.subplots(len(samples.series), 1, figsize=(9, 1.7 * len(samples.series)), sharex=True)
    for panel, (name, values) in zip(panels, samples.series.items(), strict=True):
        panel.plot([at_s / 60 for at_s, _ in values], [used / MIB for _, used in values], linewidth=0.8, color="#4477aa")
        line = fits[name]
        if line is not None:
            start, end = plan.settle_s / 60, plan.settle_s / 60 + line.windows * plan.window_s / 60
            middle = (line.start_mib + line.end_mib) / 2
            rise = line.slope * (end - start) / 60 / 2
            panel.plot([start, end], [middle - rise, middle + rise], linewidth=1.5, color="#cc3311")
        slope = "" if line is None else f": {line.slope:+.1f} MiB/h ({line.low:+.1f} to {line.high:+.1f})"
        panel.set_title(f"{name}{slope}", loc="left", fontsize=9)
        panel.set_ylabel("MiB", fontsize=8)
        panel.axvline(plan.settle_s / 60, color="#bbbbbb", linewidth=0.8)
    panels[-1].set_xlabel("minutes")
    figure.tight_layout()
    figure.savefig(plan.out / "memory.png", dpi=110)
    pyplot.close(figure)


def report(fits: Mapping[str, Fit | None], console: Console) -> None:
    table = Table("process", "MiB at first", "at last", "MiB an hour", "95 % interval", title="memory", title_justify="left")
    for name, line in fits.items():
        if line is not None:
            interval = f"{line.low:+.1f} to {line.high:+.1f}"
            table.add_row(name, f"{line.start_mib:.1f}", f"{line.end_mib:.1f}", f"{line.slope:+.1f}", interval)
    console.print(table)


def main(argv: Sequence[str] | None = None) -> int:
    """Exit code 1 if something grows."""
    parser = argparse.ArgumentParser(description="Train for long and see that no process grows.")
    parser.add_argument("--minutes", type=float, default=None, help=f"default: {MINUTES:g}, with --smoke {SMOKE_MINUTES:g}")
    parser.add_argument("--smoke", action="store_true")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", type=Path, default=Path("runs/soak"))
    arguments = parser.parse_args(argv)
    smoke = arguments.smoke
    plan = Plan(
        out=arguments.out.absolute(),
        seed=arguments.seed,
        seconds=60.0 * (arguments.minutes or (SMOKE_MINUTES if smoke else MINUTES)),
        settle_s=60.0 * (SMOKE_SETTLE_MINUTES if smoke else SETTLE_MINUTES),
        window_s=SMOKE_WINDOW_S if smoke else WINDOW_S,
        limit_mib_per_h=SMOKE_LIMIT_MIB_PER_H if smoke else LIMIT_MIB_PER_H,
    )
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    console = Console()
    samples, went = soak(plan, console)
    samples.write(plan.out / "samples.csv")
    fits = {name: fit(values, plan) for name, values in samples.series.items()}
    summary = {
        **went,
        "limit_mib_per_h": plan.limit_mib_per_h,
        "settle_s": plan.settle_s,
        "processes": {name: None if line is None else asdict(line) for name, line in fits.items()},
    }
    (plan.out / "summary.json").write_text(json.dumps(summary, indent=2) + "\n")
    draw(samples, fits, plan)
    report(fits, console)
    found = problems(fits, went, plan)
    for problem in found:
        console.print(f"PROBLEM: {problem}", style="bold red", markup=False)
    return 1 if found else 0


if __name__ == "__main__":
    raise SystemExit(main())
