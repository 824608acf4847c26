"""Rewards of turns: over the wire, relative to their group, and back to the tokens that earned them."""

from __future__ import annotations

import numpy as np
import pytest

from async_rl.algorithms.staleness import GroupVerdict, judge
from async_rl.algorithms.turns import relative_to_group, token_returns, turn_rewards
from async_rl.config import RunConfig, check, load_config
from async_rl.errors import ConfigError, ShapeError
from async_rl.testing.builders import make_group, make_trajectory
from async_rl.trainer.credit import Credit
from async_rl.trainer.intake import ComposedStep
from async_rl.trainer.samples import TrainingSample
from protocol.codec import decode, encode
from protocol.messages import Reward, Trajectory, TrajectoryGroup

TWO_TURNS = ((1, 1), (1, 0))  # a token, an observation's token, a token


def played(first: float, final: float, *, turns: tuple[tuple[int, int], ...] = TWO_TURNS) -> Trajectory:
    """Two turns; the first one earned `first`, the end `final`."""
    components = {"turn.1": first} if first else {}
    return make_trajectory(prompt_length=1, turns=turns, reward=Reward(first + final, components))


def over_the_wire(group: TrajectoryGroup) -> TrajectoryGroup:
    received = decode(encode(group))
    assert isinstance(received, TrajectoryGroup)
    return received


def samples_of(group: TrajectoryGroup, *flags: str) -> list[TrainingSample]:
    config = load_config(None, ["--model.path=m", *flags], {}).config
    check(config)
    verdict = judge(group, current_version=0, max_lag=2, stragglers="drop")
    return Credit.from_config(config.algorithm).samples(step_of(group, verdict))


def step_of(group: TrajectoryGroup, verdict: GroupVerdict) -> ComposedStep:
    return ComposedStep(record=None, groups=(group,), verdicts=(verdict,))  # type: ignore[arg-type]  # credit reads no record


def test_a_reward_at_the_end_is_discounted_by_own_tokens_only() -> None:
    """Rewards 0, 0, 1 on an own, an observed and an own token, gamma 1/2: 0.5, 1, 1, across the wire."""
    (trajectory,) = over_the_wire(make_group([played(0.0, 1.0)])).trajectories
    returns = token_returns(trajectory, turn_rewards(trajectory, 1.0), gamma=0.5)
    assert returns[1:].tolist() == [0.5, 1.0, 1.0]


def test_a_turns_reward_counts_for_it_and_what_came_before_not_for_what_follows() -> None:
    (trajectory,) = over_the_wire(make_group([played(4.0, 1.0)])).trajectories
    assert turn_rewards(trajectory, 5.0).tolist() == [4.0, 1.0]
    assert token_returns(trajectory, np.array([4.0, 1.0]), gamma=1.0)[1:].tolist() == [5.0, 1.0, 1.0]


def test_a_penalty_is_the_last_turns() -> None:
    assert turn_rewards(played(4.0, 1.0), 5.0 - 0.5).tolist() == [4.0, 0.5]


def test_turns_are_compared_with_all_turns_of_valid_members() -> None:
    earned = [np.array([1.0, 3.0]), np.array([5.0]), np.array([100.0])]
    credit = relative_to_group(earned, np.array([True, True, False]), eps=0.0, scale=True)
    assert [values.tolist() for values in credit] == [[-1.0, 0.0], [1.0], [0.0]]  # mean 3, std (N − 1) 2
    centred = relative_to_group(earned, np.array([True, True, False]), eps=0.0, scale=False)
    assert [values.tolist() for values in centred] == [[-2.0, 0.0], [2.0], [0.0]]
    equal = relative_to_group([np.array([0.1] * 3), np.array([0.1])], np.array([True, True]), eps=0.0, scale=True)
    assert [values.tolist() for values in equal] == [[0.0] * 3, [0.0]]


@pytest.mark.parametrize("advantage", ["grpo", "dr_grpo"])
def test_of_one_turn_each_it_is_the_estimator_itself(advantage: str) -> None:
    group = make_group(rewards=(1.0, 0.0, 0.5, Reward.invalid("down", "OSError")))
    whole = samples_of(group, f"--algorithm.advantage={advantage}")
    by_turn = samples_of(group, f"--algorithm.advantage={advantage}", "--algorithm.credit=turns")
    assert [sample.member for sample in by_turn] == [sample.member for sample in whole] == [0, 1, 2]
    for one, other in zip(by_turn, whole, strict=True):
        np.testing.assert_allclose(one.advantages, other.advantages, rtol=1e-6)


def test_tokens_of_a_tool_have_no_credit_and_the_turn_that_earned_more_has_more() -> None:
    group = over_the_wire(make_group([played(1.0, 0.0), played(0.0, 1.0)]))
    first, second = samples_of(group, "--algorithm.credit=turns", "--algorithm.advantage=dr_grpo")
    # turns earned 1, 0, 0, 1: relative to their mean 1/2, then added up from the end
    assert first.advantages.tolist() == [0.0, 0.0, 0.0, -0.5]
    assert second.advantages.tolist() == [0.0, 0.0, 0.0, 0.5]
    _, discounted = samples_of(
        group, "--algorithm.credit=turns", "--algorithm.advantage=dr_grpo", "--algorithm.turn_discount=0.5"
    )
    assert discounted.advantages.tolist() == [0.0, -0.25, 0.0, 0.5]


def test_what_cannot_credit_turns_is_refused() -> None:
    def checked(*flags: str) -> RunConfig:
        config = load_config(None, ["--model.path=m", *flags], {}).config
        check(config)
        return config

    with pytest.raises(ConfigError, match=r"algorithm\.credit='turns' with algorithm.advantage='rloo'"):
        checked("--algorithm.credit=turns", "--algorithm.advantage=rloo")
    with pytest.raises(ConfigError, match=r"turn_discount=0\.9 has no effect"):
        checked("--algorithm.turn_discount=0.9")
    with pytest.raises(ShapeError, match="one value per turn"):
        token_returns(played(0.0, 1.0), np.zeros(3), gamma=1.0)
