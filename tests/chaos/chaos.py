"""Train the demo while its processes are killed at random, Redis included, and show that nothing was lost.

    python tests/chaos/chaos.py [--kills 100] [--smoke] [--seed N] [--out runs/chaos] [--only KIND …]

A kill has been recovered from when the trainer has made an optimizer step that it had not made before, and an engine has
served a version that is newer than any trained before. The next kill comes after that, or after 10 s. In the end the run must
finish, with every task ended exactly once, an accuracy of at least .90, and nothing left running. Writes summary.json.
"""

from __future__ import annotations

import argparse
import json
import random
import shutil
import signal
import statistics
import subprocess
import sys
import time
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import psutil
from injuries import KINDS, Injury, Processes
from progress import Progress
from rich.console import Console
from rich.table import Table

from async_rl.checks.audit import audit

NEXT_KILL_S = 10.0
POLL_S = 0.05
LONGEST_PAUSE_S = 0.6
"""Random time between a recovery and the next kill, so that kills fall anywhere in a step."""
STEPS_PER_KILL = 12
FULL, SMOKE = 100, 20
ACCURACY = 0.90
FLAGS = (
    "--reward.placement=workers",
    "--checkpoint.every_steps=10",
    "--redis.lease_s=2",
    "--launch.hang_leases=10",
    "--launch.max_restarts=100000",
    "--launch.backoff_s=0.1",
    "--launch.max_backoff_s=0.1",
)


@dataclass(slots=True)
class Kill:
    """One kill, and how long the run took to recover from it."""

    kind: str
    at_s: float
    trained_before: int
    detail: str = ""
    recovery_s: float | None = None


@dataclass(frozen=True, slots=True)
class Plan:
    """What is to be done."""

    kills: int
    seed: int
    out: Path
    kinds: Mapping[str, float]  # name → weight
    max_steps: int
    deadline_s: float


@dataclass(slots=True)
class Chaos:
    """One run of the demo, and what is done to it."""

    plan: Plan
    console: Console
    kills: list[Kill] = field(default_factory=list)

    @property
    def run_dir(self) -> Path:
        return self.plan.out / "demo"

    def run(self) -> dict[str, object]:
        """Everything; returns the summary, and writes it."""
        self.plan.out.mkdir(parents=True, exist_ok=True)
        if (self.run_dir / "run.json").exists():
            shutil.rmtree(self.run_dir)  # or its files would be taken for progress
        flags = (f"--run_dir={self.run_dir}", f"--trainer.max_steps={self.plan.max_steps}", f"--seed={self.plan.seed}", *FLAGS)
        started = time.monotonic()
        with (self.plan.out / "demo.out").open("w") as output:
            command = [sys.executable, "-m", "workers.cli", "demo", "--overwrite", *flags]
            demo = subprocess.Popen(command, stdout=output, stderr=subprocess.STDOUT, stdin=subprocess.DEVNULL)
            try:
                self._torment(demo, started + self.plan.deadline_s)
                code = demo.wait(max(1.0, started + self.plan.deadline_s - time.monotonic()))
            finally:
                demo.kill()  # its roles end with it
                demo.wait()
        return self._summary(code, time.monotonic() - started)

    def _torment(self, demo: subprocess.Popen[bytes], deadline: float) -> None:
        """Kill until the count is reached, then look on until the end."""
        choice = random.Random(self.plan.seed)
        processes, progress = Processes(demo.pid, self.run_dir), Progress(self.run_dir)
        next_at = None
        while demo.poll() is None and time.monotonic() < deadline:
            time.sleep(POLL_S)
            progress.refresh()
            self._note_recoveries(progress)
            if len(self.kills) >= self.plan.kills:
                if all(kill.recovery_s is not None for kill in self.kills):
                    return
                continue
            if progress.trained < 2 or progress.served < 1:
                continue  # not under way yet
            now = time.monotonic()
            if next_at is None and self._is_time(now):
                next_at = now + choice.uniform(0, LONGEST_PAUSE_S)
            if next_at is not None and now >= next_at:
                next_at = None
                self._kill(choice, processes, progress)

    def _is_time(self, now: float) -> bool:
        if not self.kills:
            return True
        last = self.kills[-1]
        return last.recovery_s is not None or now - last.at_s >= NEXT_KILL_S

    def _kill(self, choice: random.Random, processes: Processes, progress: Progress) -> None:
        kind = choice.choices(list(self.plan.kinds), list(self.plan.kinds.values()))[0]
        injury: Injury = KINDS[kind]
        detail = injury(processes, progress)
        if detail is None:
            return  # that role is not up now: another one next time
        progress.refresh()
        self.kills.append(Kill(kind, time.monotonic(), progress.trained, detail))
        self.console.print(
            f"{len(self.kills):>4} {kind:<15} at step {progress.trained:<5} {detail}", highlight=False, markup=False
        )

    def _note_recoveries(self, progress: Progress) -> None:
        now = time.monotonic()
        for kill in self.kills:
            if kill.recovery_s is None and progress.trained > kill.trained_before and progress.served > kill.trained_before:
                kill.recovery_s = now - kill.at_s

    def _summary(self, code: int, seconds: float) -> dict[str, object]:
        found = audit(self.run_dir)
        times = [kill.recovery_s for kill in self.kills if kill.recovery_s is not None]
        per_kind: dict[str, list[float | None]] = defaultdict(list)
        for kill in self.kills:
            per_kind[kill.kind].append(None if kill.recovery_s is None else round(kill.recovery_s, 3))
        page = self.run_dir / "summary.json"
        figures = json.loads(page.read_text()) if page.exists() else {}
        summary: dict[str, object] = {
            "kills": len(self.kills),
            "lost": found.lost,
            "twice": len(found.twice),
            "recovery_p50_s": round(statistics.median(times), 3) if times else None,
            "recovery_max_s": round(max(times), 3) if times else None,
            "accuracy_end": figures.get("accuracy_end"),
            "accuracy_start": figures.get("accuracy_start"),
            "audit_exact": found.is_exact,
            "ends": dict(found.ends),
            "issued": found.issued,
            "steps": figures.get("steps"),
            "exit_code": code,
            "left_running": left_running(self.run_dir),
            "not_recovered": sum(kill.recovery_s is None for kill in self.kills),
            "seconds": round(seconds, 1),
            "seed": self.plan.seed,
            "recovery_s": dict(per_kind),
        }
        (self.plan.out / "summary.json").write_text(json.dumps(summary, indent=2) + "\n")
        return summary


def left_running(run_dir: Path) -> list[str]:
    """Command lines of processes that name the run directory."""
    found = []
    for process in psutil.process_iter(["cmdline", "pid"]):
        line = " ".join(process.info["cmdline"] or ())
        if str(run_dir) in line and process.pid != psutil.Process().pid:
            found.append(line)
    return [line for line in found if "chaos.py" not in line]


def problems(summary: Mapping[str, object], kills: int) -> list[str]:
    """What the run failed to show."""
    accuracy = summary["accuracy_end"]
    checks = {
        f"{summary['kills']} kills instead of {kills}: the run ended before": summary["kills"] == kills,
        f"the demo ended with exit code {summary['exit_code']}": summary["exit_code"] == 0,
        f"the audit is not exact: {summary['lost']} lost, {summary['twice']} trained twice": summary["audit_exact"] is True,
        f"accuracy {accuracy} is below {ACCURACY}": isinstance(accuracy, float) and accuracy >= ACCURACY,
        f"left running: {summary['left_running']}": not summary["left_running"],
        f"{summary['not_recovered']} kills were never recovered from": not summary["not_recovered"],
    }
    return [problem for problem, holds in checks.items() if not holds]


def print_summary(summary: Mapping[str, object], console: Console) -> None:
    recovery = summary["recovery_s"]
    assert isinstance(recovery, dict)
    table = Table("kind of kill", "kills", "median", "longest", title="recovery", title_justify="left")
    for kind, times in recovery.items():
        known = [time for time in times if time is not None]
        table.add_row(kind, str(len(times)), *(f"{f(known):.1f} s" if known else "–" for f in (statistics.median, max)))
    table.add_row("all", str(summary["kills"]), f"{summary['recovery_p50_s']} s", f"{summary['recovery_max_s']} s")
    console.print(table)
    console.print({key: value for key, value in summary.items() if key != "recovery_s"})


def main(argv: Sequence[str] | None = None) -> int:
    """Exit code 1 if the run did not show what it must."""
    parser = argparse.ArgumentParser(description="Kill the demo's processes at random and see that nothing is lost.")
    parser.add_argument("--kills", type=int, default=None, help=f"default: {FULL}, with --smoke {SMOKE}")
    parser.add_argument("--smoke", action="store_true")
    parser.add_argument("--seed", type=int, default=None, help="default: from the clock; it is printed")
    parser.add_argument("--out", type=Path, default=Path("runs/chaos"))
    parser.add_argument("--only", nargs="+", choices=sorted(KINDS), default=None)
    parser.add_argument("--max-steps", type=int, default=None)
    arguments = parser.parse_args(argv)
    kills = arguments.kills or (SMOKE if arguments.smoke else FULL)
    seed = int(time.time()) % 2**31 if arguments.seed is None else arguments.seed
    weights = {kind: injury.weight for kind, injury in KINDS.items() if arguments.only is None or kind in arguments.only}
    max_steps = arguments.max_steps or max(1200, STEPS_PER_KILL * kills)
    plan = Plan(kills, seed, arguments.out.absolute(), weights, max_steps, deadline_s=600.0 + 30.0 * kills)
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    console = Console()
    console.print(f"{kills} kills, seed {seed}, in {plan.out}", highlight=False)
    summary = Chaos(plan, console).run()
    print_summary(summary, console)
    found = problems(summary, kills)
    for problem in found:
        console.print(f"PROBLEM: {problem}", style="bold red", markup=False)
    return 1 if found else 0


if __name__ == "__main__":
    raise SystemExit(main())
