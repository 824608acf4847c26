from __future__ import annotations

import subprocess
import sys
from collections import Counter
from typing import Any

import msgpack
import msgspec
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from async_rl.algorithms.staleness import DropReason, GroupVerdict, InvalidReason, TrajectoryVerdict, Verdict, judge
from async_rl.testing.builders import make_group, make_trajectory
from protocol.messages import EndReason, FinishReason, Reward, Trajectory, Turn
from protocol.versions import VersionSpan


def verdict_on(
    trajectory: Trajectory, *, current_version: int = 7, max_lag: int = 2, stragglers: Any = "drop"
) -> TrajectoryVerdict:
    verdict = judge(make_group([trajectory]), current_version=current_version, max_lag=max_lag, stragglers=stragglers)
    return verdict.trajectories[0]


@pytest.mark.parametrize("stragglers", ["mask", "drop"])
def test_one_stale_member_does_not_take_the_others_along(stragglers: Any) -> None:
    group = make_group([make_trajectory(versions=version) for version in (7, 7, 7, 3)])
    verdict = judge(group, current_version=7, max_lag=2, stragglers=stragglers)
    assert [t.verdict for t in verdict.trajectories] == [Verdict.TRAIN, Verdict.TRAIN, Verdict.TRAIN, Verdict.DROP]
    assert [t.lag for t in verdict.trajectories] == [0, 0, 0, 4]
    assert verdict.trajectories[3].reason is DropReason.STALE
    assert [t.in_baseline for t in verdict.trajectories] == [True] * 4  # a stale reward is still a fact
    assert (verdict.end, verdict.trains, verdict.num_trained, verdict.max_trained_lag) == (EndReason.TRAINED, True, 12, 0)
    assert verdict.counts == Counter({Verdict.TRAIN: 3, Verdict.DROP: 1})


@pytest.mark.parametrize(("version", "expected"), [(5, Verdict.TRAIN), (4, Verdict.DROP)])
def test_lag_equal_to_the_limit_is_accepted(version: int, expected: Verdict) -> None:
    assert verdict_on(make_trajectory(versions=version)).verdict is expected


def test_judge_uses_oldest_version_of_a_mixed_trajectory() -> None:
    verdict = verdict_on(make_trajectory(versions=[4, 5, 6, 6]))
    assert (verdict.verdict, verdict.lag, verdict.lag_in_flight, verdict.lag_in_queue) == (Verdict.DROP, 3, 2, 1)


def test_a_token_is_as_old_as_the_kv_it_attended_to() -> None:
    verdict = verdict_on(make_trajectory(versions=7, kv_versions=4), stragglers="mask")
    assert (verdict.verdict, verdict.lag, verdict.num_trained) == (Verdict.DROP, 3, 0)


def test_mask_takes_only_the_too_old_tokens_out() -> None:
    verdict = verdict_on(make_trajectory(versions=[3, 4, 5, 7]), stragglers="mask")
    assert verdict == TrajectoryVerdict(Verdict.MASK, lag=4, lag_in_flight=4, num_tokens=4, num_trained=2)
    assert verdict.num_masked == 2


def test_too_old_tokens_that_are_not_trained_anyway_mask_nothing() -> None:
    trajectory = make_trajectory(turns=((2, 1), (2, 0)), versions=[3, 3, 7, 7])
    trajectory.loss_mask[3:5] = 0
    verdict = verdict_on(trajectory, stragglers="mask")
    assert (verdict.verdict, verdict.lag, verdict.num_tokens, verdict.num_masked) == (Verdict.TRAIN, 4, 2, 0)


def invalid_trajectories() -> dict[str, tuple[Trajectory, InvalidReason]]:
    replace = msgspec.structs.replace
    good = make_trajectory(versions=7)
    unversioned = replace(good, versions=(VersionSpan(3, 6, 7, 7),))
    overlapping = replace(good, versions=(VersionSpan(3, 6, 7, 7), VersionSpan(5, 7, 7, 7)))
    first_trained = make_trajectory(prompt_length=0, versions=7)
    return {
        "verifier raised": (
            make_trajectory(versions=7, reward=Reward.invalid("ValueError: no", "ValueError")),
            InvalidReason.REWARD,
        ),
        "never scored": (make_trajectory(versions=7, reward=None), InvalidReason.UNSCORED),
        "nan reward": (make_trajectory(versions=7, reward=float("nan")), InvalidReason.NON_FINITE_REWARD),
        "-inf logprob": (
            make_trajectory(turns=((3, 0),), versions=7, logprobs=[-0.1, -np.inf, -2.0]),
            InvalidReason.NON_FINITE_LOGPROB,
        ),
        "nan logprob": (make_trajectory(turns=((1, 0),), versions=7, logprobs=[np.nan]), InvalidReason.NON_FINITE_LOGPROB),
        "no token sampled": (make_trajectory(turns=(), versions=()), InvalidReason.EMPTY),
        "turn of no tokens": (make_trajectory(turns=((0, 0),), versions=()), InvalidReason.EMPTY),
        "cancelled": (make_trajectory(versions=7, finish_reason=FinishReason.ABORTED), InvalidReason.ABORTED),
        "short logprobs": (replace(good, behavior_logprobs=good.behavior_logprobs[:-1]), InvalidReason.LENGTH_MISMATCH),
        "short ids": (replace(good, token_ids=good.token_ids[:-1]), InvalidReason.LENGTH_MISMATCH),
        "long mask": (replace(good, loss_mask=np.append(good.loss_mask, np.uint8(1))), InvalidReason.LENGTH_MISMATCH),
        "turn beyond the end": (replace(good, turns=(Turn(3, 8, FinishReason.STOP),)), InvalidReason.LENGTH_MISMATCH),
        "span beyond the end": (replace(good, versions=(VersionSpan(3, 8, 7, 7),)), InvalidReason.LENGTH_MISMATCH),
        "overlapping spans": (overlapping, InvalidReason.LENGTH_MISMATCH),
        "trained token without version": (unversioned, InvalidReason.UNVERSIONED),
        "first token trained": (first_trained, InvalidReason.NO_CONTEXT),
        "version of the future": (make_trajectory(versions=[7, 7, 8, 8]), InvalidReason.FUTURE_VERSION),
    }


@pytest.mark.parametrize("name", invalid_trajectories())
def test_a_record_that_cannot_be_trusted_is_invalid_and_the_group_goes_on(name: str) -> None:
    trajectory, reason = invalid_trajectories()[name]
    group = make_group([make_trajectory(versions=7), trajectory, make_trajectory(versions=6)])
    verdict = judge(group, current_version=7, max_lag=2, stragglers="drop")
    assert [t.verdict for t in verdict.trajectories] == [Verdict.TRAIN, Verdict.INVALID, Verdict.TRAIN]
    assert verdict.trajectories[1].reason is reason
    assert not verdict.trajectories[1].in_baseline
    assert verdict.trajectories[1].num_trained == 0
    assert verdict.invalid_counts == Counter({reason: 1})
    assert (verdict.end, verdict.num_trained) == (EndReason.TRAINED, 8)


def test_a_version_of_the_future_never_gives_a_negative_lag() -> None:
    assert verdict_on(make_trajectory(versions=8)).lag is None


def test_nan_where_nothing_is_trained_is_harmless() -> None:
    trajectory = make_trajectory(versions=7)
    trajectory.behavior_logprobs[0] = np.nan  # a prompt token
    assert verdict_on(trajectory).verdict is Verdict.TRAIN


def test_group_ends_as_dropped_if_a_sound_trajectory_was_too_old_and_none_trains() -> None:
    group = make_group([make_trajectory(versions=1), make_trajectory(versions=7, reward=None)])
    verdict = judge(group, current_version=7, max_lag=2, stragglers="drop")
    assert (verdict.end, verdict.drop_reason, verdict.trains) == (EndReason.DROPPED, DropReason.STALE, False)
    assert verdict.max_trained_lag is None


def test_group_of_invalid_trajectories_ends_as_invalid() -> None:
    verdict = judge(make_group(rewards=[None, None]), current_version=0, max_lag=2, stragglers="drop")
    assert (verdict.end, verdict.drop_reason) == (EndReason.INVALID, None)


def test_group_without_trajectories_ends_as_invalid() -> None:
    assert judge(make_group([]), current_version=0, max_lag=0, stragglers="drop").end is EndReason.INVALID


@pytest.mark.parametrize(("current_version", "max_lag", "stragglers"), [(-1, 0, "drop"), (0, -1, "drop"), (0, 0, "wait")])
def test_arguments_out_of_range_are_refused(current_version: int, max_lag: int, stragglers: Any) -> None:
    with pytest.raises(ValueError, match="must be"):
        judge(make_group(), current_version=current_version, max_lag=max_lag, stragglers=stragglers)


def test_record_of_a_masked_group_by_hand() -> None:
    group = make_group([make_trajectory(versions=[3, 4, 5, 7]), make_trajectory(versions=7, reward=None)])
    assert judge(group, current_version=7, max_lag=2, stragglers="mask").to_record() == {
        "current_version": 7,
        "max_lag": 2,
        "trajectories": [["mask", 4, 4, 4, 2, None], ["invalid", 0, 0, 4, 0, "unscored"]],
    }


token_versions = st.lists(st.integers(0, 9), min_size=0, max_size=6)


@settings(max_examples=60, deadline=None)
@given(
    members=st.lists(st.tuples(token_versions, st.sampled_from([1.0, 0.0, None, float("inf")])), max_size=4),
    current_version=st.integers(0, 9),
    max_lag=st.integers(0, 9),
    stragglers=st.sampled_from(["mask", "drop"]),
)
def test_every_verdict_survives_the_log_and_accounts_for_every_token(
    members: list[tuple[list[int], float | None]], current_version: int, max_lag: int, stragglers: Any
) -> None:
    group = make_group([make_trajectory(turns=((len(v), 0),), versions=v, reward=reward) for v, reward in members])
    verdict = judge(group, current_version=current_version, max_lag=max_lag, stragglers=stragglers)
    assert GroupVerdict.from_record(msgpack.unpackb(msgpack.packb(verdict.to_record()))) == verdict
    for (versions, reward), t in zip(members, verdict.trajectories, strict=True):
        trusted = reward in (0.0, 1.0) and versions != [] and max(versions) <= current_version
        young = [version for version in versions if current_version - version <= max_lag]
        whole = len(young) == len(versions)
        assert t.num_trained == (len(young) if trusted and (whole or stragglers == "mask") else 0)
        assert (t.verdict is Verdict.INVALID) == (not trusted)
        assert t.lag is None or t.lag >= 0


def test_unknown_verdict_in_a_record_is_an_error() -> None:
    with pytest.raises(ValueError, match="retrain"):
        GroupVerdict.from_record({"current_version": 1, "max_lag": 1, "trajectories": [["retrain", 0, 0, 1, 1, None]]})


def test_staleness_and_builders_import_no_torch() -> None:
    code = "import sys, async_rl.algorithms.staleness, async_rl.testing.builders; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False, timeout=60).returncode == 0
