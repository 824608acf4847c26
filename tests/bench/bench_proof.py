"""What each part of a push's proof detects, and its false alarms, on a tiny model with a real trainer and engine.

python tests/bench/bench_proof.py [--out runs/bench] [--pushes 1000] [--smoke]

Every fault is put into one push, and each part of the proof is asked alone. Honest pushes follow steps of Adam's size; half of
them are in float32, half in bfloat16 (wire and engine; the trainer scores in float32). The margin is how far the canary's
probe moves when one tensor alone is old, over what is tolerated, for the tensor that moves it least.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import tempfile
import time
from pathlib import Path

import torch
from rich.console import Console
from rich.table import Table

from async_rl.testing.proof_power import Detected, Pushing, canary_margins, detect, false_alarms, fault_cases
from async_rl.testing.tiny_models import TinyModel

DTYPES = ("float32", "bfloat16")


async def measure(pushes: int, console: Console) -> dict[str, dict[str, object]]:
    table = Table(title="what finds it: digest, probe, canary")
    for column in ("fault", *(f"{part} {dtype}" for dtype in DTYPES for part in ("digest", "probe", "canary"))):
        table.add_column(column)
    found: dict[str, dict[str, Detected]] = {}
    metrics: dict[str, dict[str, object]] = {}
    alarms, seconds = 0, 0.0
    with tempfile.TemporaryDirectory() as directory:
        for dtype in DTYPES:
            for what, fault, learning_rate, tensor, other in fault_cases(tied=True):
                pushing = Pushing(Path(directory), TinyModel.LLAMA_TIED, dtype)
                detected = await detect(pushing, fault, learning_rate=learning_rate, tensor=tensor, other=other)
                found.setdefault(what, {})[dtype] = detected
            pushing = Pushing(Path(directory), TinyModel.LLAMA_TIED, dtype)
            margins = await canary_margins(pushing)
            weakest = min(margins, key=lambda name: margins[name])
            metrics[f"canary_margin_{dtype}"] = _metric(round(margins[weakest], 2), "× tolerance")
            console.print(f"{dtype}: the canary's weakest tensor is {weakest}, {margins[weakest]:.1f} × the tolerance")
            started = time.perf_counter()
            alarms += await false_alarms(pushing, pushes // len(DTYPES))
            seconds += time.perf_counter() - started
    for what, by_dtype in found.items():
        parts = [getattr(by_dtype[dtype], part) for dtype in DTYPES for part in ("digest", "probe", "canary")]
        table.add_row(what, *("yes" if part else "–" for part in parts))
    console.print(table)
    missed = [what for what, by_dtype in found.items() for d in by_dtype.values() if not (d.digest or d.probe or d.canary)]
    console.print(f"faults that no part finds: {', '.join(missed) or 'none'}; {alarms} false alarms in {pushes} honest pushes")
    metrics["false_alarms"] = _metric(alarms, f"of {pushes} honest pushes")
    metrics["faults_missed"] = _metric(len(missed), "faults")
    metrics["proof_s"] = _metric(round(seconds / pushes, 5), "s per honest push: step, scores, canary, swap and proof")
    return metrics


def _metric(value: float, unit: str) -> dict[str, object]:
    return {"value": value, "unit": unit, "baseline": None, "ratio": None, "limit_share": None}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, default=Path("runs/bench"))
    parser.add_argument("--pushes", type=int, default=1000)
    parser.add_argument("--smoke", action="store_true", help="one short turn of everything, to see that it runs")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    metrics = asyncio.run(measure(20 if arguments.smoke else arguments.pushes, Console()))
    arguments.out.mkdir(parents=True, exist_ok=True)
    (arguments.out / "proof.json").write_text(json.dumps(metrics, indent=2) + "\n")
    return 1 if metrics["false_alarms"]["value"] or metrics["faults_missed"]["value"] else 0


if __name__ == "__main__":
    raise SystemExit(main())
