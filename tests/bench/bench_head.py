"""Chunked logprobs and entropies against full logits: time, memory, gradients.

python tests/bench/bench_head.py [--out runs/bench] [--repeats 2] [--smoke]

4096 tokens, hidden size 576, vocabularies of 49,152 and 128,256, float32, one thread. The baseline holds the logits: one matrix
product, log_softmax, gather and the entropy from the same, backward by autograd. Forward and backward are timed together, in
processor seconds, the variants in turn, so that other load matters little. Memory is the peak resident size of a process during
one forward and backward pass, minus before it.
"""

from __future__ import annotations

import argparse
import gc
import json
import statistics
import subprocess
import sys
import time
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
from rich.console import Console
from rich.table import Table
from torch import Tensor

from async_rl.model.logprobs import HeadOptions, token_logprobs

TOKENS, HIDDEN = 4096, 576
VOCABULARIES = {"v49k": 49_152, "v128k": 128_256}
VARIANTS = ("chunked", "logits")
GRADIENT_TOLERANCE = 1e-5


@dataclass(frozen=True)
class Metric:
    value: float
    unit: str
    baseline: float
    ratio: float
    limit_share: float | None = None


def inputs(vocabulary: int, tokens: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(0)
    hidden = torch.randn(tokens, HIDDEN, generator=generator).requires_grad_()
    weight = (torch.randn(vocabulary, HIDDEN, generator=generator) / HIDDEN**0.5).requires_grad_()
    targets = torch.randint(vocabulary, (tokens,), generator=generator)
    return hidden, weight, targets, torch.randn(tokens, generator=generator) / tokens


def chunked(hidden: Tensor, weight: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
    logprobs, entropy = token_logprobs(hidden, weight, targets, options=HeadOptions(with_entropy=True))
    assert entropy is not None
    return logprobs, entropy


def full_logits(hidden: Tensor, weight: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
    logs = torch.log_softmax(hidden @ weight.t(), dim=1)
    with torch.no_grad():
        entropy = -(logs.exp() * logs).sum(dim=1)
    return logs.gather(1, targets[:, None])[:, 0], entropy


def forward_backward(variant: str, vocabulary: int, tokens: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    hidden, weight, targets, upstream = inputs(vocabulary, tokens)
    logprobs, entropy = (chunked if variant == "chunked" else full_logits)(hidden, weight, targets)
    d_hidden, d_weight = torch.autograd.grad(logprobs, (hidden, weight), upstream)
    return logprobs.detach(), entropy, d_hidden, d_weight


def seconds(variant: str, vocabulary: int, tokens: int) -> float:
    gc.collect()
    start = time.process_time()
    forward_backward(variant, vocabulary, tokens)
    return time.process_time() - start


def require_equal(vocabulary: int, tokens: int) -> None:
    """Results and gradients agree, relative to their largest entry."""
    for name, mine, other in zip(
        ("logprobs", "entropy", "hidden gradient", "weight gradient"),
        forward_backward("chunked", vocabulary, tokens),
        forward_backward("logits", vocabulary, tokens),
        strict=True,
    ):
        difference = float((mine - other).abs().max() / other.abs().max())
        if not difference <= GRADIENT_TOLERANCE:
            raise RuntimeError(f"{name} differs by {difference:.2e} of its largest entry, more than {GRADIENT_TOLERANCE:g}")


def peak_bytes(variant: str, vocabulary: int, tokens: int) -> int:
    """Of a fresh process: what a pass adds to its inputs (Linux)."""
    command = [sys.executable, __file__, "--child", variant, "--vocabulary", str(vocabulary), "--tokens", str(tokens)]
    return int(subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True).stdout)


def child(variant: str, vocabulary: int, tokens: int) -> None:
    torch.set_num_threads(1)
    hidden, weight, targets, upstream = inputs(vocabulary, tokens)
    small = inputs(64, 8)
    torch.autograd.grad((chunked if variant == "chunked" else full_logits)(*small[:3])[0], small[:2], small[3])
    before = _status("VmRSS")
    Path("/proc/self/clear_refs").write_text("5")  # resets VmHWM to VmRSS
    logprobs, _ = (chunked if variant == "chunked" else full_logits)(hidden, weight, targets)
    torch.autograd.grad(logprobs, (hidden, weight), upstream)
    print(_status("VmHWM") - before)


def _status(field: str) -> int:
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(f"{field}:"):
            return int(line.split()[1]) * 1024
    raise RuntimeError(f"/proc/self/status has no {field}")


def measure(vocabulary: int, tokens: int, repeats: int) -> dict[str, Metric]:
    require_equal(vocabulary, min(tokens, 512))
    times: dict[str, list[float]] = {variant: [] for variant in VARIANTS}
    for _ in range(repeats):
        for variant in VARIANTS:
            times[variant].append(seconds(variant, vocabulary, tokens))
    mine, baseline = (statistics.median(times[variant]) for variant in VARIANTS)
    peaks = {variant: peak_bytes(variant, vocabulary, tokens) for variant in VARIANTS}
    return {
        "seconds": Metric(round(mine, 3), "processor seconds", round(baseline, 3), round(mine / baseline, 3)),
        "peak": Metric(peaks["chunked"], "bytes", peaks["logits"], round(peaks["chunked"] / peaks["logits"], 3)),
    }


def show(metrics: Mapping[str, Metric]) -> None:
    table = Table(title=f"logprobs and entropies of {TOKENS} tokens: chunked against full logits")
    for column in ("metric", "chunked", "full logits", "ratio"):
        table.add_column(column, justify="left" if column == "metric" else "right")
    for name, metric in metrics.items():
        scale, unit = (2**20, "MiB") if metric.unit == "bytes" else (1, "s")
        table.add_row(
            name, f"{metric.value / scale:,.2f} {unit}", f"{metric.baseline / scale:,.2f} {unit}", f"{metric.ratio:.2f}"
        )
    Console().print(table)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, default=Path("runs/bench"))
    parser.add_argument("--repeats", type=int, default=2)
    parser.add_argument("--smoke", action="store_true", help="one short turn of everything, to see that it runs")
    parser.add_argument("--child", choices=VARIANTS, help=argparse.SUPPRESS)
    parser.add_argument("--vocabulary", type=int, help=argparse.SUPPRESS)
    parser.add_argument("--tokens", type=int, default=TOKENS, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.child:
        child(arguments.child, arguments.vocabulary, arguments.tokens)
        return
    torch.set_num_threads(1)
    tokens, repeats = (512, 1) if arguments.smoke else (arguments.tokens, arguments.repeats)
    metrics = {
        f"{name}_{key}": metric
        for name, vocabulary in VOCABULARIES.items()
        for key, metric in measure(vocabulary, tokens, repeats).items()
    }
    arguments.out.mkdir(parents=True, exist_ok=True)
    (arguments.out / "head.json").write_text(json.dumps({k: asdict(v) for k, v in metrics.items()}, indent=2) + "\n")
    show(metrics)


if __name__ == "__main__":
    main()
