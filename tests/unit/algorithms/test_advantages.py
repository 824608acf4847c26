from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from async_rl.algorithms.advantages import ADVANTAGES, group_rewards
from async_rl.algorithms.credit import AdvantageSettings, RewardGroup
from async_rl.algorithms.staleness import judge
from async_rl.errors import ShapeError
from async_rl.testing.builders import make_group, make_trajectory
from protocol.messages import Reward


def credit(estimator: str, group: RewardGroup, eps: float = 1e-6) -> list[float]:
    (values,) = ADVANTAGES[estimator]([group], AdvantageSettings(eps))
    return values.tolist()


def test_rewards_that_hardly_differ_are_scaled_by_their_std_plus_eps() -> None:
    values = credit("grpo", RewardGroup.of([1.0, 1.00001]))
    expected = 5e-6 / (1e-5 / math.sqrt(2) + 1e-6)  # 0.6195: half the difference over (sample std + eps)
    assert values == pytest.approx([-expected, expected], rel=1e-6)


@pytest.mark.parametrize(
    ("estimator", "expected"),
    [("dr_grpo", [1 / 3, -2 / 3, 1 / 3, 0.0]), ("rloo", [0.5, -1.0, 0.5, 0.0]), ("grpo", [0.577349, -1.154699, 0.577349, 0.0])],
)
def test_what_the_verifier_could_not_score_leaves_baseline_and_credit(estimator: str, expected: list[float]) -> None:
    failed = Reward.invalid("ZeroDivisionError: division by zero", "ZeroDivisionError")
    group = make_group(rewards=[1.0, 0.0, 1.0, failed])
    verdict = judge(group, current_version=0, max_lag=0, stragglers="drop")
    rewards, valid = group_rewards(group, verdict)
    assert credit(estimator, RewardGroup.of(rewards, valid)) == pytest.approx(expected, abs=1e-6)  # the baseline is 2/3


def test_a_stale_reward_stays_in_the_baseline_of_its_siblings() -> None:
    group = make_group([make_trajectory(versions=v, reward=r) for v, r in ((7, 1.0), (7, 0.0), (7, 0.0), (3, 1.0))])
    verdict = judge(group, current_version=7, max_lag=2, stragglers="drop")
    assert credit("dr_grpo", RewardGroup.of(*group_rewards(group, verdict))) == [0.5, -0.5, -0.5, 0.5]


def test_rewards_of_another_group_are_refused() -> None:
    verdict = judge(make_group(rewards=[1.0, 0.0]), current_version=0, max_lag=0, stragglers="drop")
    with pytest.raises(ShapeError, match="2 trajectories for a group of 4"):
        group_rewards(make_group(), verdict)


def test_bad_arguments_are_refused() -> None:
    with pytest.raises(ShapeError, match="per trajectory"):
        RewardGroup.of([1.0, 0.0], [True])
    with pytest.raises(ValueError, match="must be finite"):
        RewardGroup.of([1.0, math.nan])


@settings(max_examples=60, deadline=None)
@given(
    rewards=st.lists(st.floats(-10, 10, width=32), min_size=2, max_size=8),
    estimator=st.sampled_from(["grpo", "dr_grpo", "rloo", "reinforce_pp_baseline"]),
    valid_bits=st.integers(0, 255),
)
def test_credit_sums_to_zero_and_orders_as_the_rewards(rewards: list[float], estimator: str, valid_bits: int) -> None:
    valid = np.array([bool(valid_bits >> i & 1) for i in range(len(rewards))])
    values = np.array(credit(estimator, RewardGroup.of(rewards, valid)))
    assert abs(values.sum()) <= 1e-6
    assert (values[~valid] == 0).all()
    order = np.argsort(np.array(rewards)[valid], kind="stable")
    assert (np.diff(values[valid][order]) >= 0).all()
