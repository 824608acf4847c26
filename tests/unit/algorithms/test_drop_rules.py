"""Groups without signal and truncated answers: sound, young enough, and not trained."""

from __future__ import annotations

import dataclasses

import msgspec
import pytest

from async_rl.algorithms.dapo import is_truncated
from async_rl.algorithms.staleness import DropReason, DropRules, GroupVerdict, InvalidReason, Verdict, judge
from async_rl.testing.builders import make_group, make_trajectory
from protocol.messages import EndReason, FinishReason, Reward, Trajectory, TrajectoryGroup


def verdict_of(group: TrajectoryGroup, rules: DropRules) -> GroupVerdict:
    return judge(group, current_version=0, max_lag=0, stragglers="drop", rules=rules)


def with_turns(*reasons: FinishReason) -> Trajectory:
    trajectory = make_trajectory(turns=tuple((2, 1) for _ in reasons))
    turns = tuple(
        msgspec.structs.replace(turn, finish_reason=reason) for turn, reason in zip(trajectory.turns, reasons, strict=True)
    )
    return msgspec.structs.replace(trajectory, turns=turns)


def test_a_trajectory_is_truncated_if_any_turn_hit_the_limit() -> None:
    stop, length = FinishReason.STOP, FinishReason.LENGTH
    rollouts = [with_turns(stop, length, stop), with_turns(stop)]
    assert [is_truncated(rollout) for rollout in rollouts] == [True, False]


@pytest.mark.parametrize(
    ("rewards", "trains"),
    [
        ((1.0, 1.0, 1.0), False),
        ((0.0, 0.0, 0.0), False),
        ((1.0, 0.0, 1.0), True),
        ((1.0, Reward.invalid("boom", "E"), 1.0), False),  # what could not be scored makes no difference
        ((1.0, None, 0.0), True),
        ((1.0,), False),
    ],
)
def test_groups_whose_rewards_do_not_differ_are_dropped_with_the_reason(rewards: tuple[float, ...], trains: bool) -> None:
    verdict = verdict_of(make_group(rewards=rewards), DropRules(without_signal=True))
    assert verdict.trains is trains
    if not trains:
        assert (verdict.end, verdict.drop_reason) == (EndReason.DROPPED, DropReason.NO_SIGNAL)
        assert GroupVerdict.from_record(verdict.to_record()) == verdict
    assert verdict_of(make_group(rewards=rewards), DropRules()).drop_reason is None


def test_what_could_not_be_scored_keeps_its_own_reason() -> None:
    failed = Reward.invalid("boom", "E")
    verdict = verdict_of(make_group(rewards=(1.0, failed, 1.0)), DropRules(without_signal=True))
    assert [t.reason for t in verdict.trajectories] == [DropReason.NO_SIGNAL, InvalidReason.REWARD, DropReason.NO_SIGNAL]


def test_groups_1_and_3_of_4_stay_aligned_with_their_rewards() -> None:
    rows = [(1.0, 0.0), (1.0, 1.0), (0.0, 1.0), (0.0, 0.0)]
    groups = [make_group(rewards=rewards, row=row) for row, rewards in enumerate(rows)]
    kept = [group for group in groups if verdict_of(group, DropRules(without_signal=True)).trains]
    assert [group.task.row for group in kept] == [0, 2]
    assert [[t.reward.value for t in group.trajectories if t.reward] for group in kept] == [[1.0, 0.0], [0.0, 1.0]]


def test_truncated_answers_leave_the_loss_and_stay_in_the_baseline() -> None:
    group = make_group([make_trajectory(reward=1.0), with_turns(FinishReason.LENGTH)])
    verdict = verdict_of(group, DropRules(truncated=True))
    assert [t.verdict for t in verdict.trajectories] == [Verdict.TRAIN, Verdict.DROP]
    assert verdict.trajectories[1].reason is DropReason.TRUNCATED
    assert (verdict.trajectories[1].in_baseline, verdict.trajectories[1].num_trained) == (True, 0)


def test_rules_are_off_unless_asked_for() -> None:
    assert dataclasses.astuple(DropRules()) == (False, False)
