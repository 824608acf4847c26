"""How fast the sandbox of the code verifier is: time to a started interpreter, and solutions judged per second and core.

Baseline: the same interpreter without any isolation.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path

from rich.console import Console
from rich.table import Table

from async_rl.environments.verifiers.code_tests import CodeTests
from async_rl.environments.verifiers.sandbox import Limits, Sandbox, find_layout

RIGHT = "def f(x):\n    return x * x"
CALLS = [{"call": "f", "args": [value], "expected": value * value} for value in range(10)]


async def starts(sandbox: Sandbox, count: int) -> list[float]:
    """Seconds from asking for an interpreter to its answer that it is ready, one after the other."""
    seconds = []
    for _ in range(count):
        started = time.perf_counter()
        async with sandbox.interpreter("serve", {"code": RIGHT}):
            seconds.append(time.perf_counter() - started)
    return seconds


def plain_starts(count: int) -> list[float]:
    """The interpreter alone."""
    python = next(argument for argument in find_layout(None) if "python" in Path(argument).name)
    seconds = []
    for _ in range(count):
        started = time.perf_counter()
        subprocess.run([python, "-I", "-S", "-c", "pass"], check=True)
        seconds.append(time.perf_counter() - started)
    return seconds


async def judged_per_second(seconds: float) -> float:
    verifier = CodeTests()
    end, done = time.perf_counter() + seconds, 0
    started = time.perf_counter()

    async def judge() -> None:
        nonlocal done
        while time.perf_counter() < end:
            passed, _ = await verifier.run(RIGHT, CALLS)
            assert all(passed)
            done += 1

    await asyncio.gather(*(judge() for _ in range(os.cpu_count() or 1)))
    return done / (time.perf_counter() - started)


def main(argv: Sequence[str]) -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, default=Path("runs/bench"))
    parser.add_argument("--smoke", action="store_true")
    arguments = parser.parse_args(argv)
    count = 20 if arguments.smoke else 300
    inside, outside = list[float](), list[float]()
    for _ in range(5):  # interleaved
        outside += plain_starts(count // 5)
        inside += asyncio.run(starts(Sandbox(Limits(), concurrent=1), count // 5))
    rate = asyncio.run(judged_per_second(2.0 if arguments.smoke else 15.0))
    cores = os.cpu_count() or 1
    ranks = {"p50": statistics.median, "p99": lambda values: sorted(values)[int(0.99 * (len(values) - 1))]}
    figures: dict[str, dict[str, object]] = {}
    for name, rank in ranks.items():
        value, baseline = rank(inside) * 1e3, rank(outside) * 1e3
        figures[f"start_{name}"] = {
            "value": value, "unit": "ms", "baseline": baseline, "ratio": value / baseline, "limit_share": None
        }  # fmt: skip
    per_core = rate / cores
    figures["judged_per_core"] = {"value": per_core, "unit": "1/s", "baseline": None, "ratio": None, "limit_share": None}
    arguments.out.mkdir(parents=True, exist_ok=True)
    (arguments.out / "sandbox.json").write_text(json.dumps(figures, indent=2))
    table = Table("figure", "value", "unit", "interpreter alone", "ratio")
    for name, figure in figures.items():
        cells = (figure["value"], figure["baseline"], figure["ratio"])
        value, baseline, ratio = (f"{cell:.3g}" if isinstance(cell, float) else "" for cell in cells)
        table.add_row(name, value, str(figure["unit"]), baseline, ratio)
    Console().print(table)


if __name__ == "__main__":
    main(sys.argv[1:])
