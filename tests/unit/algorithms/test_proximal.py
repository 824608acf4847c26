from __future__ import annotations

import pytest
import torch

from async_rl.algorithms.proximal import interpolated_logprobs


def interpolate(lags: list[int], steps: int) -> list[float]:
    policy = torch.full((len(lags),), -1.0, requires_grad=True)
    values = interpolated_logprobs(policy, torch.full((len(lags),), -3.0), torch.tensor(lags), steps_since_proximal=steps)
    assert not values.requires_grad
    return values.tolist()


def test_the_proximal_version_lies_between_behavior_and_policy_by_its_share_of_the_versions() -> None:
    # behavior −3, policy −1; of 4 versions between them the proximal one has passed 3, 2, 0
    assert interpolate([4], 1) == pytest.approx([-1.5])
    assert interpolate([4], 2) == pytest.approx([-2.0])
    assert interpolate([4], 4) == pytest.approx([-3.0])


def test_it_is_exact_where_the_proximal_version_is_one_of_the_two() -> None:
    assert interpolate([0, 3], 0) == [-1.0, -1.0]  # first step of a batch: the policy itself
    assert interpolate([2], 2) == [-3.0]  # sampled by the proximal version
    assert interpolate([1], 3) == [-3.0]  # sampled after it: never beyond the behavior policy
