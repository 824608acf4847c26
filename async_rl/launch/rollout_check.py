"""`async-rl-rollout --check CONFIG`: one engine alone, started, pushed to, proven and measured on the config's own prompts."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import cast

import numpy as np
import torch
from rich.console import Console
from rich.table import Table
from transformers import PreTrainedModel

from async_rl.config.run import RunConfig
from async_rl.coordinator.pushes import PushSupervisor
from async_rl.environments.load import load_environment
from async_rl.errors import DeadlineExceeded, ProofFailed
from async_rl.launch.inputs import open_prompts
from async_rl.model.load import load_causal_lm
from async_rl.model.tokenizer import load_tokenizer, stop_token_ids
from async_rl.registry.memory_registry import MemoryRegistry
from async_rl.reward.score import score_episode
from async_rl.rollout.chat import Tokenizer
from async_rl.rollout.engine import RolloutEngine
from async_rl.rollout.engines import make_engine
from async_rl.rollout.group import GroupRollout, RolloutLimits
from async_rl.weights.manifest import Probe, Tolerance
from async_rl.weights.publisher import Publisher, PushRequest, PushStats
from async_rl.weights.receiver import Receiver
from async_rl.weights.send_buffer import SendBuffer, named_weights
from protocol.messages import PromptTask, TrajectoryGroup

EPOCH = 1
PROBE_TOKENS = 24
MEASURE_S = 20.0
CLEANUP_S = 10.0
REPORT_S = 2.0


@dataclass(frozen=True, slots=True)
class RolloutCheck:
    """What was measured. `advice`: what to change, a sentence each."""

    start_s: float
    push: PushStats
    groups: int
    tokens: int
    seconds: float
    prompt_tokens: Sequence[int]
    advice: Sequence[str]

    @property
    def tokens_per_s(self) -> float:
        return self.tokens / self.seconds


async def check_rollout(config: RunConfig, *, measure_s: float = MEASURE_S) -> RolloutCheck:
    """Raises: what starting the engine raises; ProofFailed if the push was not proven; DataError."""
    engine = make_engine(config.model.path, config.rollout, "engine-check")
    begun = time.monotonic()
    try:
        await engine.start()
        started = time.monotonic()
        model = load_causal_lm(config.model.path)
        push = await push_once(engine, config, model, version=1)
        if not push.live:
            raise ProofFailed(f"the push was not proven: {'; '.join(push.failed.values())}")
        del model
        tasks = _tasks(config)
        rollout = _rollout(config, engine)
        prompts = [len(rollout.encode_prompt(task)) for task in tasks]
        groups, seconds = await _measure(rollout, tasks, config.rollout.max_groups_in_flight, measure_s)
    finally:
        await engine.close()
    tokens = sum(trajectory.num_sampled for group in groups for trajectory in group.trajectories)
    advice = _advice(config, prompts, push, groups)
    return RolloutCheck(started - begun, push, len(groups), tokens, seconds, prompts, advice)


async def push_once(engine: RolloutEngine, config: RunConfig, model: PreTrainedModel, *, version: int) -> PushStats:
    """Push `model` to a started engine as a run would, by weights.backend; returns when the push has ended, either way.

    Raises: DeadlineExceeded if it does not end within twice its deadline; what ended one of those who take part in it.
    """
    registry = MemoryRegistry(lambda: EPOCH)
    stats: asyncio.Queue[PushStats] = asyncio.Queue()
    publisher = Publisher(registry, config, epoch=EPOCH, on_complete=stats.put_nowait)
    receiver = Receiver(engine, registry, config.weights, engine_id=engine.engine_id, worker_id="check")
    supervisor = PushSupervisor(registry, _only_worker, deadline_s=config.weights.deadline_s)
    tasks = [asyncio.create_task(one.run()) for one in (publisher, receiver, supervisor)]
    try:
        named, ties, buffers = named_weights(model)
        snapshot = SendBuffer.copy_from(named, config.weights.wire_dtype, ties=ties, buffer_names=buffers)
        tolerance = Tolerance(config.weights.probe_tolerance)
        probe = _probe(model, config)
        await publisher.submit(PushRequest(version, snapshot, probe, 0, 0, tolerance=tolerance))
        async with asyncio.timeout(2 * config.weights.deadline_s):
            return await _first_of(stats, tasks)
    except TimeoutError:
        raise DeadlineExceeded(f"the push did not end within twice weights.deadline_s={config.weights.deadline_s:g}") from None
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.wait(tasks, timeout=CLEANUP_S)
        publisher.close()


async def _first_of(stats: asyncio.Queue[PushStats], tasks: Sequence[asyncio.Task[None]]) -> PushStats:
    """What is reported; else, when one of those who would report it has failed, its error: nobody would say it later."""
    reported = asyncio.create_task(stats.get())
    try:
        await asyncio.wait([reported, *tasks], return_when=asyncio.FIRST_COMPLETED)
        if not reported.done():
            await asyncio.wait([reported], timeout=REPORT_S)  # an engine that broke says so to the registry, too
        if not reported.done():
            for task in tasks:
                if task.done():
                    task.result()
        return await reported
    finally:
        reported.cancel()


async def _only_worker() -> frozenset[str]:
    return frozenset({"check"})


@torch.no_grad()
def _probe(model: PreTrainedModel, config: RunConfig) -> Probe:
    generator = np.random.default_rng(config.seed)
    temperature = config.rollout.temperature
    length = min(PROBE_TOKENS, config.rollout.max_context or PROBE_TOKENS)
    sequences, logprobs = [], []
    for _ in range(config.weights.probe_sequences):
        ids = generator.integers(0, int(model.config.vocab_size), size=length).astype(np.int32)
        tensor = torch.from_numpy(ids.astype(np.int64))[None]
        table = torch.log_softmax(model(input_ids=tensor, use_cache=False).logits[0].float() / temperature, -1)
        sequences.append(ids)
        logprobs.append(table[:-1].gather(1, tensor[0, 1:, None])[:, 0].numpy())
    return Probe(tuple(sequences), tuple(logprobs), temperature)


def _tasks(config: RunConfig) -> Sequence[PromptTask]:
    source = open_prompts(config)
    found = (source.task_at(cursor) for cursor in range(4 * config.rollout.max_groups_in_flight))
    return [task for task in found if task is not None]


def _rollout(config: RunConfig, engine: RolloutEngine) -> GroupRollout:
    tokenizer = load_tokenizer(config.model.path)
    environment = load_environment(config.environment)
    limits = RolloutLimits(config.rollout.max_turns, engine.max_context, config.rollout.max_new_tokens)
    return GroupRollout(
        engine,
        cast(Tokenizer, tokenizer),
        environment,
        limits,
        worker_id="check",
        stop_token_ids=stop_token_ids(Path(config.model.path), tokenizer),
        score=partial(score_episode, environment, timeout_s=config.reward.timeout_s),
        score_session=partial(score_episode, timeout_s=config.reward.timeout_s),
        observe_timeout_s=config.reward.timeout_s,
        skip_long_prompts=config.data.on_long_prompt == "skip",
    )


async def _measure(
    rollout: GroupRollout, tasks: Sequence[PromptTask], at_once: int, measure_s: float
) -> tuple[Sequence[TrajectoryGroup], float]:
    """Groups beside each other, as the loop samples them, for about `measure_s`."""
    groups: list[TrajectoryGroup] = []
    waiting = iter(tasks)
    begun = time.monotonic()

    async def sample() -> None:
        for task in waiting:
            groups.append(await rollout.run(task))
            if time.monotonic() - begun >= measure_s:
                return

    await asyncio.gather(*(sample() for _ in range(at_once)))
    return groups, time.monotonic() - begun


def _advice(config: RunConfig, prompts: Sequence[int], push: PushStats, groups: Sequence[TrajectoryGroup]) -> Sequence[str]:
    """What the figures say about settings."""
    advice = []
    rollout = config.rollout
    block = rollout.vllm.block_size or (32 if rollout.device == "cpu" else 16)
    median = int(np.median(prompts)) if prompts else 0
    if rollout.engine != "torch" and median < block:
        advice.append(
            f"half of the prompts have {median} tokens or fewer, and a KV block has {block}: members of a group share "
            f"nothing of such a prompt; a smaller rollout.vllm.block_size helps if prompts cost time"
        )
    if push.seconds.get("engine_paused", 0.0) > config.weights.deadline_s / 4:
        advice.append(
            f"the engine stood still for {push.seconds['engine_paused']:.1f} s of a push: raise weights.deadline_s "
            f"({config.weights.deadline_s:g} s), or push more rarely (weights.push_every)"
        )
    trajectories = [trajectory for group in groups for trajectory in group.trajectories]
    cut = sum(trajectory.finish_reason.value == "length" for trajectory in trajectories)
    if trajectories and cut > len(trajectories) / 2:
        advice.append(
            f"{cut} of {len(trajectories)} trajectories ran into rollout.max_new_tokens={rollout.max_new_tokens} or the context"
        )
    running = rollout.max_groups_in_flight * rollout.group_size
    if running < rollout.max_running / 2:
        advice.append(
            f"at most {running} sequences are asked for at a time (rollout.max_groups_in_flight × rollout.group_size), and the "
            f"engine takes {rollout.max_running}: raise rollout.max_groups_in_flight"
        )
    return advice


def run_check(config: RunConfig) -> None:
    """Check and print. Raises: as `check_rollout`."""
    torch.set_num_threads(config.rollout.num_threads)
    print_check(asyncio.run(check_rollout(config)), Console())


def print_check(result: RolloutCheck, console: Console) -> None:
    """For people."""
    table = Table(show_header=False, box=None)
    push = result.push
    table.add_row("start", f"{result.start_s:.1f} s")
    table.add_row("push", f"{push.num_bytes / 2**20:,.1f} MiB in {push.seconds['total']:.2f} s: {_phases(push)}")
    largest, mean = push.parity_max_abs, push.parity_mean_abs
    table.add_row("proof", f"largest difference {largest:.2g}, mean {mean:.2g} nats, {push.parity_tokens} tokens")
    table.add_row("prompts", f"{min(result.prompt_tokens)} to {max(result.prompt_tokens)} tokens")
    table.add_row("sampled", f"{result.groups} groups, {result.tokens:,} tokens in {result.seconds:.1f} s")
    table.add_row("rate", f"{result.tokens_per_s:,.0f} tokens/s")
    console.print(table, highlight=False)
    for line in result.advice or ("nothing to change",):
        console.print(f"- {line}", highlight=False)


def _phases(push: PushStats) -> str:
    shown = ("receive", "swap", "digest", "probe", "paused")
    found = ((name, push.seconds.get(f"engine_{name}")) for name in shown)
    return ", ".join(f"{name} {seconds:.2f} s" for name, seconds in found if seconds is not None)
