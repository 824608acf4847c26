"""Tokens per second of the built-in engine against Hugging Face `generate`, one thread, the same run, interleaved repeats.

python tests/bench/bench_engine.py [--out runs/bench] [--repeats 7]

The engine is driven as a rollout worker drives it: `await engine.generate(...)` per prompt, completions with logprobs and
versions coming back. limit_share: time of the same matrix products alone, over the engine's time per token.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import statistics
import tempfile
import time
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.table import Table
from transformers import PreTrainedModel

from async_rl.config.rollout import RolloutConfig
from async_rl.model.load import load_causal_lm
from async_rl.rollout.torch_engine import TorchEngine
from async_rl.testing.tiny_models import TinyModel, save_tiny_model
from protocol.messages import SamplingParams

BENCH_MODEL = {
    "vocab_size": 256,
    "hidden_size": 128,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "head_dim": 32,
    "intermediate_size": 384,
    "eos_token_id": None,
}
DEMO_MODEL = {"vocab_size": 22, "hidden_size": 64, "num_hidden_layers": 3, "intermediate_size": 192, "eos_token_id": None}


@dataclass(frozen=True)
class Case:
    """`prompts` prompts of `prompt_tokens`, each completed `group` times with `new_tokens`."""

    model: str
    prompts: int
    group: int
    prompt_tokens: int
    new_tokens: int

    @property
    def rows(self) -> int:
        return self.prompts * self.group


CASES = {
    "batch_1": Case("bench", 1, 1, 16, 64),
    "batch_8": Case("bench", 8, 1, 16, 64),
    "batch_64": Case("bench", 64, 1, 16, 64),
    "batch_256": Case("bench", 256, 1, 16, 64),
    "groups_32x8": Case("demo", 32, 8, 8, 7),
}


@dataclass(frozen=True)
class Metric:
    value: float
    unit: str
    baseline: float
    ratio: float
    limit_share: float


def prompts_of(case: Case, vocab_size: int) -> list[list[int]]:
    ids = torch.randint(3, vocab_size, (case.prompts, case.prompt_tokens), generator=torch.Generator().manual_seed(1))
    return [[int(token) for token in row] for row in ids]


async def run_engine(engine: TorchEngine, case: Case, prompts: Sequence[Sequence[int]]) -> None:
    groups = [
        [SamplingParams(1.0, case.new_tokens, seed=case.group * index + member) for member in range(case.group)]
        for index in range(case.prompts)
    ]
    results = await asyncio.gather(*[engine.generate(ids, group) for ids, group in zip(prompts, groups, strict=True)])
    sampled = sum(completion.token_ids.size for result in results for completion in result)
    assert sampled == case.rows * case.new_tokens


def run_generate(model: Any, case: Case, prompts: Sequence[Sequence[int]]) -> None:
    ids = torch.tensor(prompts)
    with torch.inference_mode():
        output = model.generate(
            ids,
            attention_mask=torch.ones_like(ids),
            do_sample=True,
            temperature=1.0,
            top_k=0,
            top_p=1.0,
            num_return_sequences=case.group,
            max_new_tokens=case.new_tokens,
            min_new_tokens=case.new_tokens,
            pad_token_id=0,
        )
    assert output.shape == (case.rows, case.prompt_tokens + case.new_tokens)


def run_matmuls(model: PreTrainedModel, case: Case) -> None:
    """The matrix products of every sampled token, on contiguous operands, and nothing else."""
    weights = [p.detach().t().contiguous() for name, p in model.named_parameters() if p.dim() == 2 and "embed" not in name]
    inputs = {weight.shape[0]: torch.randn(case.rows, weight.shape[0]) for weight in weights}
    with torch.inference_mode():
        for _ in range(case.new_tokens):
            for weight in weights:
                torch.mm(inputs[weight.shape[0]], weight)


async def timed(run: Callable[[], Awaitable[None]]) -> float:
    start = time.perf_counter()
    await run()
    return time.perf_counter() - start


async def measure(engine: TorchEngine, model: PreTrainedModel, case: Case, repeats: int) -> Metric:
    prompts = prompts_of(case, int(model.config.vocab_size))

    async def ours() -> None:
        await run_engine(engine, case, prompts)

    async def theirs() -> None:
        run_generate(model, case, prompts)

    async def limit() -> None:
        run_matmuls(model, case)

    times: dict[str, list[float]] = {"ours": [], "theirs": [], "limit": []}
    for repeat in range(repeats + 1):
        for name, run in (("ours", ours), ("theirs", theirs), ("limit", limit)):
            elapsed = await timed(run)
            if repeat:  # the first round warms up
                times[name].append(elapsed)
    median = {name: statistics.median(values) for name, values in times.items()}
    ratio = statistics.median(theirs / ours for theirs, ours in zip(times["theirs"], times["ours"], strict=True))
    tokens = case.rows * case.new_tokens
    return Metric(tokens / median["ours"], "tokens/s", tokens / median["theirs"], ratio, median["limit"] / median["ours"])


async def bench(repeats: int) -> dict[str, Metric]:
    metrics: dict[str, Metric] = {}
    with tempfile.TemporaryDirectory() as directory:
        for name, settings in (("bench", BENCH_MODEL), ("demo", DEMO_MODEL)):
            path = save_tiny_model(Path(directory) / name, TinyModel.LLAMA, **settings)
            model = load_causal_lm(path)
            engine = TorchEngine(path, RolloutConfig(max_running=256), f"bench-{name}")
            await engine.start()
            await engine.serve(0)
            for case_name, case in CASES.items():
                if case.model == name:
                    metrics[case_name] = await measure(engine, model, case, repeats)
            await engine.close()
    return metrics


def show(metrics: dict[str, Metric]) -> None:
    table = Table("case", "engine, tokens/s", "generate, tokens/s", "ratio", "share of the matmul limit")
    for name, metric in metrics.items():
        table.add_row(
            name, f"{metric.value:,.0f}", f"{metric.baseline:,.0f}", f"{metric.ratio:.2f}", f"{metric.limit_share:.0%}"
        )
    Console().print(table)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=Path("runs/bench"))
    parser.add_argument("--repeats", type=int, default=7)
    parser.add_argument("--smoke", action="store_true", help="one short turn of everything, to see that it runs")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    metrics = asyncio.run(bench(1 if arguments.smoke else arguments.repeats))
    show(metrics)
    arguments.out.mkdir(parents=True, exist_ok=True)
    target = arguments.out / "engine.json"
    target.write_text(json.dumps({name: asdict(metric) for name, metric in metrics.items()}, indent=2) + "\n")


if __name__ == "__main__":
    main()
