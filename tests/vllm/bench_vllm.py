"""Tokens per second of the whole rollout side (queue, loop, groups, rewards, vLLM) against the same vLLM driven alone.

python tests/vllm/bench_vllm.py [--out runs/bench] [--repeats 5] [--smoke]        (make bench-vllm)

Both sides ask the same engine process for the same prompts with the same seeds, so many requests at a time; repeats are
interleaved. Alone means AsyncLLM.generate, one call per completion, without logprobs and without anything around it.
"""

from __future__ import annotations

import argparse
import asyncio
import itertools
import json
import statistics
import tempfile
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, cast

from rich.console import Console
from rich.table import Table
from vllm import SamplingParams as VllmSamplingParams
from vllm.inputs.engine import tokens_input
from vllm.sampling_params import RequestOutputKind

from async_rl.config.rollout import RolloutConfig, VllmConfig
from async_rl.environments.prompt_reward import PromptReward
from async_rl.model.tokenizer import load_tokenizer
from async_rl.registry.memory_registry import MemoryRegistry
from async_rl.rollout.chat import Tokenizer
from async_rl.rollout.engines import vllm_engine
from async_rl.rollout.group import GroupRollout, RolloutLimits
from async_rl.rollout.loop import RolloutLoop, RolloutSettings
from async_rl.rollout.vllm_engine import VllmEngine
from async_rl.rollout.vllm_in_process import InProcessHost
from async_rl.testing.builders import make_task
from async_rl.testing.smollm import smollm_directory
from async_rl.testing.tiny_models import TinyModel, save_tiny_model
from protocol.codec import encode
from protocol.memory_streams import MemoryStreams
from protocol.messages import PromptTask
from protocol.seeds import trajectory_seed
from protocol.streams import IssuedTask, Stream


@dataclass(frozen=True)
class Case:
    """`groups` prompts, each completed `group` times with `new_tokens`; `at_once` groups in flight."""

    model: str
    dtype: Any
    groups: int
    group: int
    new_tokens: int
    at_once: int


CASES = {
    "smollm_4x8": Case("smollm", "bfloat16", 8, 8, 32, 4),
    "tiny_8x8": Case("tiny", "float32", 32, 8, 32, 8),
}
SMOKE = {"tiny_8x8": Case("tiny", "float32", 8, 8, 16, 8)}


@dataclass(frozen=True)
class Metric:
    value: float
    unit: str
    baseline: float
    ratio: float
    limit_share: float


class NoPushes:
    async def run(self) -> None:
        await asyncio.Event().wait()


class Sides:
    """Both ways to the same engine."""

    def __init__(self, case: Case, path: Path, engine: VllmEngine, host: InProcessHost) -> None:
        self._case, self._engine, self._host = case, engine, host
        tokenizer = cast(Tokenizer, load_tokenizer(path))
        environment = PromptReward(lambda completion, row: float(len(completion)))
        limits = RolloutLimits(1, engine.max_context, case.new_tokens)
        self._rollout = GroupRollout(
            engine, tokenizer, environment, limits, worker_id="w", stop_token_ids=[], score=environment.score
        )
        self._rounds = itertools.count()

    def tasks(self) -> Sequence[PromptTask]:
        """Prompts that were never used: the prefix cache knows none of them."""
        first = next(self._rounds) * self._case.groups
        return [
            make_task(row=row, prompt=f"{row:05d}+{row * 7919:07d}*{row * 31:06d}-{row:05d}=", group_size=self._case.group,
                      max_new_tokens=self._case.new_tokens)
            for row in range(first, first + self._case.groups)
        ]  # fmt: skip

    async def loop(self, tasks: Sequence[PromptTask]) -> None:
        streams = MemoryStreams(max_message_bytes=2**24)
        await streams.open()
        issued = [IssuedTask(task.task_id, encode(task)) for task in tasks]
        assert await streams.issue(0, issued, next_cursor=len(issued))
        settings = RolloutSettings("w", self._case.at_once, 60.0, 60.0, 3, 0.0, unscored=False)
        loop = RolloutLoop(streams, MemoryRegistry(lambda: 1), self._engine, self._rollout, NoPushes(), settings)
        running = asyncio.create_task(loop.run())
        while (await streams.depths())[Stream.GROUPS].length < len(tasks):  # noqa: ASYNC110 - streams tell nobody
            await asyncio.sleep(0.002)
        loop.stop()
        await running

    async def alone(self, tasks: Sequence[PromptTask]) -> None:
        llm = self._host._alive()
        gate = asyncio.Semaphore(self._case.at_once)

        async def one(ids: list[int], seed: int, name: str) -> None:
            params = VllmSamplingParams(temperature=1.0, max_tokens=self._case.new_tokens, seed=seed, ignore_eos=True,
                                        detokenize=False, output_kind=RequestOutputKind.FINAL_ONLY)  # fmt: skip
            async for output in llm.generate(tokens_input(ids, cache_salt=name), params, name):
                assert len(output.outputs[0].token_ids) == self._case.new_tokens

        async def group(task: PromptTask) -> None:
            async with gate:
                ids = self._rollout.encode_prompt(task)
                seeds = [trajectory_seed(task.seed, member) for member in range(task.group_size)]
                await asyncio.gather(*(one(ids, seed, f"{task.task_id}-{seed}") for seed in seeds))

        await asyncio.gather(*(group(task) for task in tasks))


async def measure(case: Case, path: Path, repeats: int) -> Metric:
    config = RolloutConfig(engine="vllm", dtype=case.dtype, max_context=256, vllm=VllmConfig(kv_cache_bytes=2**29))
    engine = vllm_engine(path, config, "bench", InProcessHost)
    host = cast(InProcessHost, engine._host)
    await engine.start()
    try:
        await engine.serve(0)
        sides = Sides(case, path, engine, host)
        times: dict[str, list[float]] = {"loop": [], "alone": []}
        for repeat in range(repeats + 1):
            for name, run in (("loop", sides.loop), ("alone", sides.alone)):
                tasks = sides.tasks()
                begun = time.perf_counter()
                await run(tasks)
                if repeat:  # the first round warms up
                    times[name].append(time.perf_counter() - begun)
    finally:
        await engine.close()
    tokens = case.groups * case.group * case.new_tokens
    ratio = statistics.median(alone / loop for loop, alone in zip(times["loop"], times["alone"], strict=True))
    value, baseline = (tokens / statistics.median(times[name]) for name in ("loop", "alone"))
    return Metric(value, "tokens/s", baseline, ratio, ratio)


async def bench(cases: dict[str, Case], repeats: int) -> dict[str, Metric]:
    metrics = {}
    with tempfile.TemporaryDirectory() as directory:
        for name, case in cases.items():
            path = Path(directory) / case.model
            if case.model == "smollm":
                smollm_directory(path)
            else:
                save_tiny_model(path, TinyModel.LLAMA, head_dim=32)
            metrics[name] = await measure(case, path, repeats)
    return metrics


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=Path("runs/bench"))
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--smoke", action="store_true", help="one short turn, to see that it runs")
    arguments = parser.parse_args()
    metrics = asyncio.run(bench(SMOKE if arguments.smoke else CASES, 1 if arguments.smoke else arguments.repeats))
    table = Table("case", "rollout side, tokens/s", "vLLM alone, tokens/s", "ratio")
    for name, metric in metrics.items():
        table.add_row(name, f"{metric.value:,.0f}", f"{metric.baseline:,.0f}", f"{metric.ratio:.2f}")
    Console().print(table)
    arguments.out.mkdir(parents=True, exist_ok=True)
    target = arguments.out / "vllm.json"
    target.write_text(json.dumps({name: asdict(metric) for name, metric in metrics.items()}, indent=2) + "\n")


if __name__ == "__main__":
    main()
