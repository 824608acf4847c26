"""Train the demo over a network that delays, loses requests and replies, and cuts connections; show that nothing was lost.

    python tests/chaos/network.py [--smoke] [--seed N] [--out runs/network] [--cut-every 2.5]

Every role reaches Redis through a proxy. Each chunk of bytes is delayed, and some are lost with their connection, before the
server saw them or after it acted; every few seconds all connections are cut at once. In the end the run must finish, with every
task ended exactly once and an accuracy of at least .90 (with --smoke, which trains less, it is only reported). Writes
summary.json.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import random
import shutil
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from rich.console import Console

from async_rl.checks.audit import audit
from async_rl.launch.embedded_redis import EmbeddedRedis
from async_rl.testing.proxy import Faults, FaultyProxy

ACCURACY = 0.90
SMOKE_STEPS = 150
SECONDS, SMOKE_SECONDS = 2400.0, 500.0
FAULTS = Faults(delay_s=0.002, lose_requests=0.001, lose_replies=0.001)
FLAGS = ("--reward.placement=workers", "--redis.lease_s=5", "--checkpoint.every_steps=50")


@dataclass(frozen=True, slots=True)
class Plan:
    """What is to be done."""

    seed: int
    out: Path
    cut_every_s: float
    max_steps: int | None  # None: as long as the demo trains by itself
    deadline_s: float


async def run(plan: Plan, console: Console) -> dict[str, object]:
    """Everything; returns the summary, and writes it."""
    plan.out.mkdir(parents=True, exist_ok=True)
    run_dir = plan.out / "demo"
    for old in (run_dir, plan.out / "redis"):
        if old.exists():
            shutil.rmtree(old)
    started = time.monotonic()
    with EmbeddedRedis(plan.out / "redis") as server:
        async with FaultyProxy(server.socket_path, faults=FAULTS, seed=plan.seed) as proxy:
            cutting = asyncio.create_task(_cut(proxy, plan, console))
            try:
                code = await _demo(plan, run_dir, f"redis://{proxy.address}")
            finally:
                cutting.cancel()
            counted = asdict(proxy.counted)
    summary = {**_figures(run_dir), **counted, "exit_code": code, "seconds": round(time.monotonic() - started, 1)}
    summary |= {"seed": plan.seed, "cut_every_s": plan.cut_every_s, "delay_s": FAULTS.delay_s}
    (plan.out / "summary.json").write_text(json.dumps(summary, indent=2) + "\n")
    return summary


async def _demo(plan: Plan, run_dir: Path, url: str) -> int:
    flags = [f"--run_dir={run_dir}", f"--redis.url={url}", f"--seed={plan.seed}", *FLAGS]
    if plan.max_steps is not None:
        flags.append(f"--trainer.max_steps={plan.max_steps}")
    with (plan.out / "demo.out").open("w") as output:
        command = [sys.executable, "-m", "workers.cli", "demo", "--overwrite", *flags]
        demo = await asyncio.create_subprocess_exec(
            *command, stdout=output, stderr=asyncio.subprocess.STDOUT, stdin=asyncio.subprocess.DEVNULL
        )
        try:
            async with asyncio.timeout(plan.deadline_s):
                return await demo.wait()
        except TimeoutError:
            return -1
        finally:
            if demo.returncode is None:
                demo.kill()
                await demo.wait()


async def _cut(proxy: FaultyProxy, plan: Plan, console: Console) -> None:
    choice = random.Random(plan.seed)
    while True:
        await asyncio.sleep(choice.uniform(0.5, 1.5) * plan.cut_every_s)
        console.print(f"cut {proxy.cut()} connections", highlight=False)


def _figures(run_dir: Path) -> dict[str, object]:
    found = audit(run_dir)
    page = run_dir / "summary.json"
    figures = json.loads(page.read_text()) if page.exists() else {}
    return {
        "lost": found.lost,
        "twice": len(found.twice),
        "audit_exact": found.is_exact,
        "ends": dict(found.ends),
        "issued": found.issued,
        **{name: figures.get(name) for name in ("accuracy_start", "accuracy_end", "steps", "train_seconds")},
    }


def problems(summary: Mapping[str, object], *, accuracy: float | None) -> list[str]:
    """What the run failed to show."""
    reached = summary["accuracy_end"]
    checks = {
        f"the demo ended with exit code {summary['exit_code']}": summary["exit_code"] == 0,
        f"the audit is not exact: {summary['lost']} lost, {summary['twice']} trained twice": summary["audit_exact"] is True,
        "the network did nothing": all(bool(summary[name]) for name in ("cuts", "lost_requests", "lost_replies")),
        f"accuracy {reached} is below {accuracy}": accuracy is None or (isinstance(reached, float) and reached >= accuracy),
    }
    return [problem for problem, holds in checks.items() if not holds]


def main(argv: Sequence[str] | None = None) -> int:
    """Exit code 1 if the run did not show what it must."""
    parser = argparse.ArgumentParser(description="Train the demo over a bad network and see that nothing is lost.")
    parser.add_argument("--smoke", action="store_true")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", type=Path, default=Path("runs/network"))
    parser.add_argument("--cut-every", type=float, default=2.5, help="seconds between cuts, in the mean")
    arguments = parser.parse_args(argv)
    plan = Plan(
        arguments.seed,
        arguments.out.absolute(),
        arguments.cut_every,
        SMOKE_STEPS if arguments.smoke else None,
        SMOKE_SECONDS if arguments.smoke else SECONDS,
    )
    console = Console()
    summary = asyncio.run(run(plan, console))
    console.print(summary)
    found = problems(summary, accuracy=None if arguments.smoke else ACCURACY)
    for problem in found:
        console.print(f"PROBLEM: {problem}", style="bold red", markup=False)
    return 1 if found else 0


if __name__ == "__main__":
    raise SystemExit(main())
