"""A group's prompt computed once against once per completion: trained tokens per second of a train step.

python tests/bench/bench_shared_prompt.py [--out runs/bench] [--repeats 2] [--smoke]

A group of 8 completions, 135 M parameters (30 layers, hidden 576, 9 heads and 3 of keys, vocabulary 49,152, tied), float32, one
thread. Both variants train the same tokens with the same train step and pack without padding; gradient norms must agree. Times
are processor seconds, the variants in turn. limit_share: the ratio over that of the tokens that go through the model.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.table import Table

from async_rl.algorithms.losses import ClipRange, LossSettings, decoupled_clip
from async_rl.model.attention import PACKED
from async_rl.testing.batches import group_samples
from async_rl.testing.tiny_models import make_tiny_model
from async_rl.trainer.packing import MicroBatch, pack
from async_rl.trainer.policy import PolicyModel
from async_rl.trainer.step import StepSettings, make_optimizer, train_step

MODEL: dict[str, Any] = {
    "vocab_size": 49_152,
    "hidden_size": 576,
    "intermediate_size": 1536,
    "num_hidden_layers": 30,
    "num_attention_heads": 9,
    "num_key_value_heads": 3,
    "head_dim": 64,
    "max_position_embeddings": 2048,
}
SMALL = {"num_hidden_layers": 2, "vocab_size": 1024}
GROUP = 8
CASES = {"p92_c40": (92, 40), "p512_c64": (512, 64)}
SETTINGS = StepSettings(decoupled_clip, LossSettings(ClipRange(0.2, 0.28)))


@dataclass(frozen=True)
class Metric:
    value: float
    unit: str
    baseline: float
    ratio: float
    limit_share: float | None = None


class Trainer:
    """A policy and its optimizer; every step starts from where the last one of either variant ended."""

    def __init__(self, model: Mapping[str, Any]) -> None:
        self.policy = PolicyModel(make_tiny_model("llama_tied", seed=0, attn_implementation=PACKED, **model))
        self.optimizer = make_optimizer(self.policy, learning_rate=1e-9)  # too small to part the variants' gradients

    def step(self, micro_batch: MicroBatch) -> tuple[float, float]:
        """(processor seconds, gradient norm)"""
        start = time.process_time()
        stats = train_step(self.policy, self.optimizer, [micro_batch], settings=SETTINGS, learning_rate=1e-9)
        return time.process_time() - start, stats.grad_norm


def measure(trainer: Trainer, prompt: int, completion: int, vocabulary: int, repeats: int) -> Metric:
    samples = group_samples([prompt], [[completion] * GROUP], vocab_size=vocabulary)
    (shared,), (plain,) = (pack(samples, 10**6, share_prompts=share) for share in (True, False))
    times: dict[str, list[float]] = {"shared": [], "plain": []}
    for _ in range(repeats):
        results = {"shared": trainer.step(shared), "plain": trainer.step(plain)}
        norms = [norm for _, norm in results.values()]
        if abs(norms[0] - norms[1]) > 1e-3 * norms[1]:
            raise RuntimeError(f"the variants do not train the same: gradient norms {norms}")
        for name, (seconds, _) in results.items():
            times[name].append(seconds)
    rates = {name: shared.num_trained / statistics.median(seconds) for name, seconds in times.items()}
    ratio = rates["shared"] / rates["plain"]
    ceiling = plain.num_tokens / shared.num_tokens
    return Metric(
        round(rates["shared"], 2), "trained tokens/s", round(rates["plain"], 2), round(ratio, 3), round(ratio / ceiling, 3)
    )


def show(metrics: Mapping[str, Metric]) -> None:
    table = Table(title=f"a prompt for {GROUP} completions: once against {GROUP} times")
    for column in ("case", "shared", "plain", "ratio", "share of the tokens' ratio"):
        table.add_column(column, justify="left" if column == "case" else "right")
    for name, metric in metrics.items():
        values = (f"{value:,.1f} {metric.unit}" for value in (metric.value, metric.baseline))
        table.add_row(name, *values, f"{metric.ratio:.2f}", f"{metric.limit_share:.2f}")
    Console().print(table)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, default=Path("runs/bench"))
    parser.add_argument("--repeats", type=int, default=2)
    parser.add_argument("--smoke", action="store_true", help="two layers, one turn, to see that it runs")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    model = {**MODEL, **(SMALL if arguments.smoke else {})}
    trainer = Trainer(model)
    warm = pack(group_samples([8], [[4] * GROUP], vocab_size=model["vocab_size"]), 10**6)
    trainer.step(warm[0])  # makes the optimizer's state
    metrics = {
        name: measure(trainer, prompt, completion, model["vocab_size"], 1 if arguments.smoke else arguments.repeats)
        for name, (prompt, completion) in CASES.items()
    }
    arguments.out.mkdir(parents=True, exist_ok=True)
    (arguments.out / "shared_prompt.json").write_text(json.dumps({k: asdict(v) for k, v in metrics.items()}, indent=2) + "\n")
    show(metrics)


if __name__ == "__main__":
    main()
