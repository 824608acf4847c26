"""Builders of wire messages for tests: plausible by default, every detail that a test cares about is a keyword. Torch-free."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from protocol.messages import (
    FinishReason,
    PromptTask,
    Reward,
    SamplingParams,
    Timings,
    Trajectory,
    TrajectoryGroup,
    Turn,
    task_id,
)
from protocol.seeds import group_seed, trajectory_seed
from protocol.versions import spans_from_tokens


def make_task(
    *,
    row: int = 0,
    repeat: int = 0,
    data_epoch: int = 0,
    run_id: str = "test-run",
    source: str = "test",
    prompt: str = "402913>",
    environment: str = "sort_digits",
    group_size: int = 4,
    run_seed: int = 0,
    temperature: float = 1.0,
    max_new_tokens: int = 8,
) -> PromptTask:
    """Return a task of row `row`; its id and seed follow from its place in the data, as in a run."""
    identity = task_id(source, data_epoch, row, repeat)
    return PromptTask(
        run_id=run_id,
        task_id=identity,
        source=source,
        data_epoch=data_epoch,
        row=row,
        repeat=repeat,
        prompt=prompt,
        columns={},
        environment=environment,
        group_size=group_size,
        seed=group_seed(run_seed, identity),
        temperature=temperature,
        max_new_tokens=max_new_tokens,
        issued_at_s=1_700_000_000.0,
    )


def make_trajectory(
    *,
    prompt_length: int = 3,
    turns: Sequence[tuple[int, int]] = ((4, 0),),
    versions: int | Sequence[int] = 0,
    kv_versions: int | Sequence[int] | None = None,
    token_ids: Sequence[int] | None = None,
    logprobs: Sequence[float] | None = None,
    reward: float | Reward | None = 1.0,
    finish_reason: FinishReason = FinishReason.STOP,
    temperature: float = 1.0,
    seed: int = 0,
    worker_id: str = "rollout-0",
    engine_id: str = "engine-0",
) -> Trajectory:
    """Return a trajectory: a prompt, then per turn (sampled tokens, observed tokens that follow them).

    versions, kv_versions: one for all sampled tokens, or one per sampled token; kv_versions equal versions if not given.
    token_ids: all of them, prompt included (1, 2, 3, … if not given). logprobs: one per sampled token (−0.5 each if not
    given). reward: a number, a Reward, or None for a trajectory that was not scored yet.
    """
    spans_of_turns = _turn_bounds(prompt_length, turns)
    positions = [position for start, end in spans_of_turns for position in range(start, end)]
    length = prompt_length + sum(sampled + observed for sampled, observed in turns)
    sampled_versions = _per_token(versions, len(positions), "versions")
    sampled_kv = sampled_versions if kv_versions is None else _per_token(kv_versions, len(positions), "kv_versions")

    loss_mask = np.zeros(length, dtype=np.uint8)
    loss_mask[positions] = 1
    behavior_logprobs = np.zeros(length, dtype=np.float32)
    behavior_logprobs[positions] = [-0.5] * len(positions) if logprobs is None else logprobs
    ids = np.arange(1, length + 1) if token_ids is None else np.asarray(token_ids)
    return Trajectory(
        token_ids=ids.astype(np.int32),
        loss_mask=loss_mask,
        behavior_logprobs=behavior_logprobs,
        versions=spans_from_tokens(positions, sampled_versions, sampled_kv),
        sampling=SamplingParams(temperature=temperature, max_new_tokens=max(1, len(positions)), seed=seed),
        turns=tuple(Turn(start, end, finish_reason) for start, end in spans_of_turns),
        finish_reason=finish_reason,
        timings=Timings(started_at_s=1_700_000_000.0, finished_at_s=1_700_000_001.0, generate_s=1.0),
        worker_id=worker_id,
        engine_id=engine_id,
        reward=Reward(value=float(reward)) if isinstance(reward, int | float) else reward,
    )


def make_group(
    trajectories: Sequence[Trajectory] | None = None,
    *,
    task: PromptTask | None = None,
    rewards: Sequence[float | Reward | None] = (1.0, 0.0, 1.0, 0.0),
    version: int = 0,
    row: int = 0,
    started_version: int | None = None,
) -> TrajectoryGroup:
    """Return a group: of the given trajectories, or of one default trajectory per reward, all sampled by `version`."""
    size = len(rewards) if trajectories is None else len(trajectories)
    task = make_task(row=row, group_size=max(1, size)) if task is None else task
    if trajectories is None:
        trajectories = [
            make_trajectory(reward=reward, versions=version, seed=trajectory_seed(task.seed, index))
            for index, reward in enumerate(rewards)
        ]
    return TrajectoryGroup(
        task=task,
        trajectories=tuple(trajectories),
        started_version=version if started_version is None else started_version,
        published_at_s=1_700_000_002.0,
    )


def _turn_bounds(prompt_length: int, turns: Sequence[tuple[int, int]]) -> list[tuple[int, int]]:
    bounds: list[tuple[int, int]] = []
    position = prompt_length
    for sampled, observed in turns:
        bounds.append((position, position + sampled))
        position += sampled + observed
    return bounds


def _per_token(values: int | Sequence[int], count: int, name: str) -> list[int]:
    per_token = [values] * count if isinstance(values, int) else list(values)
    if len(per_token) != count:
        raise ValueError(f"{name} has {len(per_token)} values for {count} sampled tokens")
    return per_token
