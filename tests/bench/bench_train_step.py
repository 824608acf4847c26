"""Packed against padded train step: real tokens per second and memory, the same model, head, loss and optimizer.

python tests/bench/bench_train_step.py [--out runs/bench] [--repeats 3] [--threads 1]

16 sequences of 32 to 512 tokens (uniform), the second half of each trained; 30 M parameters, vocabulary 32k, float32. The
baseline pads them to [16, 512] with an attention mask, as is usual. Each variant runs in a process of its own; timed steps
alternate. Memory is the peak resident size during a step minus the resident size before it, in processes whose allocator
returns freed blocks at once. limit_share: the step's useful floating-point operations over what the same process reaches on a
1024³ matrix product, timed in turn with the steps.
"""

from __future__ import annotations

import argparse
import gc
import json
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
from rich.console import Console
from rich.table import Table
from torch import Tensor
from transformers import PreTrainedModel

from async_rl.algorithms.losses import ClipRange, LossSettings, decoupled_clip
from async_rl.model.attention import PACKED, PackedSegments
from async_rl.model.logprobs import HeadOptions, token_logprobs
from async_rl.testing.batches import random_samples
from async_rl.testing.tiny_models import make_tiny_model
from async_rl.trainer.architecture import output_head
from async_rl.trainer.packing import pack
from async_rl.trainer.policy import PolicyModel
from async_rl.trainer.step import StepSettings, make_optimizer, train_step

MODEL = {
    "vocab_size": 32_000,
    "hidden_size": 320,
    "intermediate_size": 864,
    "num_hidden_layers": 16,
    "num_attention_heads": 5,
    "num_key_value_heads": 5,
    "head_dim": 64,
    "max_position_embeddings": 512,
}
LENGTHS = [32 + round(i * 480 / 15) for i in range(16)]
VARIANTS = ("packed", "padded")
SETTINGS = StepSettings(decoupled_clip, LossSettings(ClipRange(0.2, 0.28)))
RETURN_FREED_BLOCKS = {"MALLOC_MMAP_THRESHOLD_": "65536", "MALLOC_TRIM_THRESHOLD_": "65536"}


class PaddedPolicy(PolicyModel):
    """The same weights and head over a right-padded batch with an attention mask."""

    def __init__(self, hf: PreTrainedModel, lengths: list[int]) -> None:
        super().__init__(hf)
        hf.set_attn_implementation("sdpa")
        self.mask = torch.arange(max(lengths))[None, :] < torch.tensor(lengths)[:, None]
        self.slots = self.mask.flatten().nonzero()[:, 0]  # of each packed token

    def forward(
        self,
        token_ids: Tensor,
        position_ids: Tensor,
        segments: PackedSegments,
        rows: Tensor,
        temperature: float | Tensor,
        with_entropy: bool = False,
        head_weight: Tensor | None = None,
    ) -> tuple[Tensor, Tensor | None]:
        padded = torch.zeros(self.mask.numel(), dtype=torch.int64).index_copy(0, self.slots, token_ids).view(self.mask.shape)
        output = self.hf.base_model(input_ids=padded, attention_mask=self.mask.long(), use_cache=False)
        hidden = output.last_hidden_state.flatten(0, 1).index_select(0, self.slots[rows - 1])
        options = HeadOptions(transform=self.transform, chunk_tokens=self.options.chunk_tokens)
        logprobs, _ = token_logprobs(
            hidden, output_head(self.hf).weight, token_ids[rows], temperature=temperature, options=options
        )
        return logprobs.new_zeros(len(token_ids)).index_copy(0, rows, logprobs), None


def make_step(variant: str) -> Callable[[], float]:
    """Return a function that runs one train step and returns its gradient norm."""
    hf = make_tiny_model("llama_tied", seed=0, attn_implementation=PACKED, **MODEL)
    (micro_batch,) = pack(random_samples(LENGTHS, vocab_size=MODEL["vocab_size"]), sum(LENGTHS))
    policy = PolicyModel(hf) if variant == "packed" else PaddedPolicy(hf, LENGTHS)
    optimizer = make_optimizer(policy, learning_rate=1e-4)
    return lambda: train_step(policy, optimizer, [micro_batch], settings=SETTINGS, learning_rate=1e-4).grad_norm


def useful_flops() -> float:
    """Multiply-adds × 2 of forward and backward (twice the forward) on real tokens; recomputation does not count."""
    width, layers = MODEL["hidden_size"], MODEL["num_hidden_layers"]
    per_layer = 4 * width * width + 3 * width * MODEL["intermediate_size"]
    tokens, trained = sum(LENGTHS), sum(length - length // 2 for length in LENGTHS)
    attention = sum(2 * length * length // 2 * width for length in LENGTHS)  # scores and values, the causal half
    return 6.0 * (layers * (per_layer * tokens + attention) + MODEL["vocab_size"] * width * trained)


def matmul_flops() -> float:
    """Return floating-point operations per second on a 1024³ product, the best of three."""
    a = torch.randn(1024, 1024)
    seconds = []
    for _ in range(3):
        start = time.perf_counter()
        torch.mm(a, a)
        seconds.append(time.perf_counter() - start)
    return 2 * 1024**3 / min(seconds)


def step_memory(step: Callable[[], float]) -> int:
    """Return peak resident bytes during a step minus resident bytes before it (Linux)."""
    gc.collect()
    before = _status("VmRSS")
    Path("/proc/self/clear_refs").write_text("5")  # resets VmHWM to VmRSS
    step()
    return _status("VmHWM") - before


def _status(field: str) -> int:
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(f"{field}:"):
            return int(line.split()[1]) * 1024
    raise RuntimeError(f"/proc/self/status has no {field}")


def child(variant: str, threads: int) -> None:
    """Answer one command a line: `time`, `memory`, `peak`. The first step, which makes the optimizer's state, is over then."""
    torch.set_num_threads(threads)
    step = make_step(variant)
    print(step(), flush=True)
    for line in sys.stdin:
        command = line.strip()
        if command == "time":
            start = time.perf_counter()
            step()
            print(time.perf_counter() - start, flush=True)
        elif command == "memory":
            print(step_memory(step), flush=True)
        elif command == "peak":
            print(matmul_flops(), flush=True)


class Child:
    """A variant in a process of its own."""

    def __init__(self, variant: str, threads: int, environment: Mapping[str, str] | None = None) -> None:
        self._process = subprocess.Popen(
            [sys.executable, __file__, "--child", variant, "--threads", str(threads)],
            env={**os.environ, "OMP_NUM_THREADS": str(threads), **(environment or {})},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        self.grad_norm = self._read()

    def ask(self, command: str) -> float:
        assert self._process.stdin is not None
        self._process.stdin.write(command + "\n")
        self._process.stdin.flush()
        return self._read()

    def close(self) -> None:
        self._process.kill()
        self._process.wait()

    def _read(self) -> float:
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line:
            raise RuntimeError(f"a variant ended with exit code {self._process.wait()}")
        return float(line)


@dataclass(frozen=True)
class Metric:
    value: float
    unit: str
    baseline: float
    ratio: float
    limit_share: float | None


def measure_speed(repeats: int, threads: int) -> Metric:
    children = {variant: Child(variant, threads) for variant in VARIANTS}
    try:
        one, other = (child.grad_norm for child in children.values())
        if abs(one - other) > 1e-3 * other:
            raise RuntimeError(f"the variants do not train the same: gradient norms {one} and {other}")
        seconds: dict[str, list[float]] = {variant: [] for variant in VARIANTS}
        peaks = []
        for _ in range(repeats):
            for variant, process in children.items():
                seconds[variant].append(process.ask("time"))
            peaks.append(children["packed"].ask("peak"))
    finally:
        for process in children.values():
            process.close()
    packed, padded = (sum(LENGTHS) / statistics.median(seconds[variant]) for variant in VARIANTS)
    ratio = statistics.median(b / a for a, b in zip(seconds["packed"], seconds["padded"], strict=True))
    limit = statistics.median(useful_flops() / s / peak for s, peak in zip(seconds["packed"], peaks, strict=True))
    return Metric(round(packed, 1), "real tokens/s", round(padded, 1), round(ratio, 3), round(limit, 3))


def measure_memory(threads: int) -> Metric:
    peaks = {}
    for variant in VARIANTS:
        process = Child(variant, threads, RETURN_FREED_BLOCKS)
        try:
            peaks[variant] = process.ask("memory")
        finally:
            process.close()
    ratio = peaks["packed"] / peaks["padded"]
    return Metric(peaks["packed"], "bytes", peaks["padded"], round(ratio, 3), None)


def show(metrics: Mapping[str, Metric]) -> None:
    table = Table(title="train step: packed against padded")
    for column in ("metric", "packed", "padded", "ratio", "share of matmul peak"):
        table.add_column(column, justify="left" if column == "metric" else "right")
    for name, metric in metrics.items():
        scale, unit = (2**20, "MiB") if metric.unit == "bytes" else (1, metric.unit)
        share = "" if metric.limit_share is None else f"{metric.limit_share:.2f}"
        values = (f"{value / scale:,.0f} {unit}" for value in (metric.value, metric.baseline))
        table.add_row(name, *values, f"{metric.ratio:.2f}", share)
    Console().print(table)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, default=Path("runs/bench"))
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--smoke", action="store_true", help="one short turn of everything, to see that it runs")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--child", choices=VARIANTS, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.child:
        child(arguments.child, arguments.threads)
        return
    metrics = {
        "tokens_per_s": measure_speed(1 if arguments.smoke else arguments.repeats, arguments.threads),
        "peak_memory": measure_memory(arguments.threads),
    }
    arguments.out.mkdir(parents=True, exist_ok=True)
    content = json.dumps({name: asdict(metric) for name, metric in metrics.items()}, indent=2)
    (arguments.out / "train_step.json").write_text(content + "\n")
    show(metrics)


if __name__ == "__main__":
    main()
