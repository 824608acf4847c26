"""Steps as the intake composes them, made at hand: for tests of what trains them."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from async_rl.algorithms.staleness import judge
from async_rl.run_dir.records import StepRecord
from async_rl.testing.builders import make_group, make_trajectory
from async_rl.trainer.intake import ComposedStep
from protocol.messages import TrajectoryGroup


def random_groups(count: int, *, seed: int, vocabulary: int = 22, group_size: int = 4) -> list[TrajectoryGroup]:
    """Groups whose answers are random and of uneven length, with random logprobs and rewards."""
    rng = np.random.default_rng(seed)
    groups = []
    for row in range(count):
        members = []
        for _ in range(group_size):
            length = int(rng.integers(2, 40))
            members.append(
                make_trajectory(
                    prompt_length=5,
                    turns=((length, 0),),
                    token_ids=rng.integers(3, vocabulary, 5 + length).tolist(),
                    logprobs=(-3 + rng.normal(scale=0.3, size=length)).tolist(),
                    reward=float(rng.integers(0, 2)),
                )
            )
        groups.append(make_group(members, row=row))
    return groups


def step_of(groups: Sequence[TrajectoryGroup], *, number: int = 0) -> ComposedStep:
    """A step of these groups, all fresh."""
    verdicts = tuple(judge(group, current_version=0, max_lag=0, stragglers="mask") for group in groups)
    return ComposedStep(StepRecord(number, 0, number, True, (), 0), tuple(groups), verdicts)
