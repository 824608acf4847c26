"""Held-out evaluation with rollouts that are known."""

from __future__ import annotations

import asyncio
import math
from collections.abc import Sequence

import numpy as np
import pytest

from async_rl.environments.prompt_reward import PromptReward
from async_rl.environments.sort_digits import SortDigits
from async_rl.errors import ConfigError, EngineError
from async_rl.evaluation.held_out import EvaluationPlan, evaluate, held_out_tasks, standard_error
from protocol.messages import FinishReason, PromptTask, Reward, SamplingParams, Timings, Trajectory, TrajectoryGroup, Turn
from protocol.versions import VersionSpan

PROMPT_IDS, ANSWER_IDS = [7, 8], [5]


def group(task: PromptTask, reward: Reward) -> TrajectoryGroup:
    trajectory = Trajectory(
        token_ids=np.array(PROMPT_IDS + ANSWER_IDS, dtype=np.int32),
        loss_mask=np.array([0, 0, 1], dtype=np.uint8),
        behavior_logprobs=np.zeros(3, dtype=np.float32),
        versions=(VersionSpan(2, 3, 0, 0),),
        sampling=SamplingParams(task.temperature, task.max_new_tokens, task.seed),
        turns=(Turn(2, 3, FinishReason.STOP),),
        finish_reason=FinishReason.STOP,
        timings=Timings(0.0, 0.0),
        worker_id="w",
        engine_id="e",
        reward=reward,
    )
    return TrajectoryGroup(task, (trajectory,), 0, 0.0)


def decode(ids: Sequence[int]) -> str:
    return ",".join(map(str, ids))


async def test_the_mean_is_over_valid_rewards_only() -> None:
    rewards = [Reward(1.0), Reward(0.0), Reward(1.0), Reward.invalid("verifier down", "OSError")]

    async def rollout(task: PromptTask) -> TrajectoryGroup:
        return group(task, rewards[task.row])

    result = await evaluate(rollout, SortDigits(), decode, EvaluationPlan(num_prompts=4, num_samples=2))
    assert result.mean_reward == pytest.approx(2 / 3)
    assert (result.num_prompts, result.num_invalid) == (3, 1)
    assert result.standard_error == pytest.approx(math.sqrt((1 / 3) / 3))  # variance of 1, 0, 1 is 1/3
    assert [(sample.prompt, sample.completion, sample.reward) for sample in result.samples] == [
        ("7,8", "5", 1.0),
        ("7,8", "5", 0.0),
    ]


async def test_nothing_scored_is_an_error_and_not_an_accuracy_of_zero() -> None:
    async def rollout(task: PromptTask) -> TrajectoryGroup:
        return group(task, Reward.invalid("verifier down", "OSError"))

    with pytest.raises(EngineError, match=r"none of 3 .* verifier down"):
        await evaluate(rollout, SortDigits(), decode, EvaluationPlan(num_prompts=3))


async def test_no_more_rollouts_run_at_a_time_than_the_plan_says() -> None:
    running = most = 0

    async def rollout(task: PromptTask) -> TrajectoryGroup:
        nonlocal running, most
        running += 1
        most = max(most, running)
        await asyncio.sleep(0)
        running -= 1
        return group(task, Reward(1.0))

    done: list[tuple[int, int]] = []
    plan = EvaluationPlan(num_prompts=9, max_concurrent=4)
    await evaluate(rollout, SortDigits(), decode, plan, on_progress=lambda number, total: done.append((number, total)))
    assert most == 4
    assert done[-1] == (9, 9)


def test_tasks_are_held_out_rows_with_seeds_of_their_own() -> None:
    environment = SortDigits(length=3)
    tasks = held_out_tasks(environment, EvaluationPlan(num_prompts=50, temperature=0.5))
    training = {environment.row(index).prompt for index in range(environment.num_rows())}
    assert len({task.seed for task in tasks}) == 50
    assert not {task.prompt for task in tasks} & training
    assert {(task.group_size, task.temperature) for task in tasks} == {(1, 0.5)}
    assert tasks == held_out_tasks(environment, EvaluationPlan(num_prompts=50, temperature=0.5))
    assert tasks != held_out_tasks(environment, EvaluationPlan(num_prompts=50, temperature=0.5, seed=1))


def test_an_environment_without_held_out_prompts_is_refused() -> None:
    async def reward(completion: str, row: object) -> float:
        return 0.0

    with pytest.raises(ConfigError, match="no held-out prompts"):
        held_out_tasks(PromptReward(reward), EvaluationPlan())


def test_the_standard_error_uses_the_unbiased_variance() -> None:
    assert standard_error([0.0, 1.0]) == pytest.approx(0.5)
    assert standard_error([1.0]) == 0.0
