"""Held-out evaluation: sampled rewards on prompts that are never trained, with an honest error bar."""

from __future__ import annotations

import asyncio
import math
import time
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass

from async_rl.environments.base import Environment, Row, RowSource
from async_rl.errors import ConfigError, EngineError
from protocol.messages import PromptTask, TrajectoryGroup, task_id
from protocol.seeds import group_seed

Rollout = Callable[[PromptTask], Awaitable[TrajectoryGroup]]
"""Sample and score one task."""
Decode = Callable[[Sequence[int]], str]


@dataclass(frozen=True, slots=True)
class SampleCompletion:
    """One held-out prompt with what was sampled for it."""

    prompt: str
    completion: str
    reward: float


@dataclass(frozen=True, slots=True)
class EvaluationResult:
    """Mean reward of one sample per held-out prompt."""

    mean_reward: float
    """For rewards of 0 and 1 the sampled accuracy."""
    standard_error: float
    num_prompts: int
    """Prompts with a valid reward; what could not be scored is in `num_invalid`, never counted as 0."""
    num_invalid: int
    seconds: float
    samples: tuple[SampleCompletion, ...]


@dataclass(frozen=True, slots=True)
class EvaluationPlan:
    """What is sampled, and how. Equal plans sample equal prompts with equal seeds."""

    num_prompts: int = 512
    temperature: float = 1.0
    max_new_tokens: int = 64
    seed: int = 0
    max_concurrent: int = 128
    num_samples: int = 8
    """Completions kept to look at."""


def held_out_tasks(environment: Environment, plan: EvaluationPlan) -> tuple[PromptTask, ...]:
    """One task of one completion per held-out row.

    Raises: ConfigError if the environment brings no held-out rows.
    """
    if not isinstance(environment, RowSource):
        raise ConfigError(f"{type(environment).__name__} brings no held-out prompts (it has no held_out_rows); cannot evaluate")
    rows = environment.held_out_rows(plan.num_prompts)
    if not rows:
        raise ConfigError(f"{type(environment).__name__} has 0 held-out prompts; raise its held-out share")
    return tuple(_task(row, index, plan) for index, row in enumerate(rows))


def _task(row: Row, index: int, plan: EvaluationPlan) -> PromptTask:
    identity = task_id("held_out", 0, index, 0)
    return PromptTask(
        run_id="evaluation",
        task_id=identity,
        source="held_out",
        data_epoch=0,
        row=index,
        repeat=0,
        prompt=row.prompt,
        columns=row.columns,
        environment="held_out",
        group_size=1,
        seed=group_seed(plan.seed, identity),
        temperature=plan.temperature,
        max_new_tokens=plan.max_new_tokens,
        issued_at_s=0.0,
    )


async def evaluate(
    rollout: Rollout,
    environment: Environment,
    decode: Decode,
    plan: EvaluationPlan = EvaluationPlan(),
    *,
    on_progress: Callable[[int, int], None] = lambda done, total: None,
    now: Callable[[], float] = time.monotonic,
) -> EvaluationResult:
    """Sample and score every held-out task of the plan.

    Raises: ConfigError as in `held_out_tasks`; EngineError if nothing at all could be scored.
    """
    tasks = held_out_tasks(environment, plan)
    started = now()
    slots = asyncio.Semaphore(plan.max_concurrent)
    done = 0

    async def one(task: PromptTask) -> TrajectoryGroup:
        nonlocal done
        async with slots:
            group = await rollout(task)
        done += 1
        on_progress(done, len(tasks))
        return group

    async with asyncio.TaskGroup() as running:
        pending = [running.create_task(one(task)) for task in tasks]
    groups = [task.result() for task in pending]
    return _result(groups, decode, plan, now() - started)


def _result(groups: Sequence[TrajectoryGroup], decode: Decode, plan: EvaluationPlan, seconds: float) -> EvaluationResult:
    rewards = [reward for group in groups for reward in _rewards(group)]
    if not rewards:
        raise EngineError(f"none of {len(groups)} held-out completions could be scored: {_first_reason(groups)}")
    mean = sum(rewards) / len(rewards)
    return EvaluationResult(
        mean_reward=mean,
        standard_error=standard_error(rewards),
        num_prompts=len(rewards),
        num_invalid=sum(len(group.trajectories) for group in groups) - len(rewards),
        seconds=seconds,
        samples=tuple(_samples(groups, decode))[: plan.num_samples],
    )


def standard_error(values: Sequence[float]) -> float:
    """Of the mean of independent values (with the unbiased variance); 0 for a single one."""
    count = len(values)
    if count < 2:
        return 0.0
    mean = sum(values) / count
    return math.sqrt(sum((value - mean) ** 2 for value in values) / (count - 1) / count)


def _rewards(group: TrajectoryGroup) -> Sequence[float]:
    rewards = (trajectory.reward for trajectory in group.trajectories)
    return [reward.value for reward in rewards if reward is not None and reward.value is not None]


def _samples(groups: Sequence[TrajectoryGroup], decode: Decode) -> Sequence[SampleCompletion]:
    samples: list[SampleCompletion] = []
    for group in groups:
        for trajectory in group.trajectories:
            if trajectory.reward is not None and trajectory.reward.value is not None:
                ids, start = trajectory.token_ids.tolist(), trajectory.prompt_length
                samples.append(SampleCompletion(decode(ids[:start]), decode(ids[start:]), trajectory.reward.value))
    return samples


def _first_reason(groups: Sequence[TrajectoryGroup]) -> str:
    for group in groups:
        for trajectory in group.trajectories:
            if trajectory.reward is not None and trajectory.reward.invalid_reason is not None:
                return trajectory.reward.invalid_reason
    return "no trajectory has a reward"
