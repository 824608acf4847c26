from __future__ import annotations

import dataclasses
from typing import Any

import msgspec
import numpy as np
import pytest

from async_rl.algorithms.staleness import judge
from async_rl.errors import ShapeError
from async_rl.testing.builders import make_group, make_trajectory
from async_rl.trainer.samples import TrainingSample, to_training_samples
from protocol.messages import TrajectoryGroup


def samples_of(group: TrajectoryGroup, advantages: list[float], *, stragglers: Any = "drop") -> list[TrainingSample]:
    verdict = judge(group, current_version=7, max_lag=2, stragglers=stragglers)
    return to_training_samples(group, verdict, advantages)


def test_a_sample_keeps_ids_and_logprobs_as_sampled_and_credits_only_trained_tokens() -> None:
    trajectory = make_trajectory(
        prompt_length=2, turns=((2, 1), (1, 0)), versions=7, logprobs=[-0.1, -0.2, -0.3], temperature=0.6
    )
    (sample,) = samples_of(make_group([trajectory]), [1.5])
    assert sample.token_ids.tolist() == [1, 2, 3, 4, 5, 6]
    assert sample.loss_mask.tolist() == [False, False, True, True, False, True]
    assert sample.behavior_logprobs.tolist() == pytest.approx([0, 0, -0.1, -0.2, 0, -0.3])
    assert sample.advantages.tolist() == [0, 0, 1.5, 1.5, 0, 1.5]
    assert (sample.temperature, sample.task_id, sample.member) == (0.6, "test:0:0:0", 0)
    assert (sample.advantages.dtype, sample.loss_mask.dtype, len(sample)) == (np.float32, np.bool_, 6)


def test_only_what_trains_becomes_a_sample_and_stays_aligned_with_its_advantage() -> None:
    group = make_group([make_trajectory(versions=v, reward=r) for v, r in ((7, 1.0), (3, 1.0), (7, None), (6, 0.0))])
    samples = samples_of(group, [0.1, 0.2, 0.3, 0.4])
    assert [sample.member for sample in samples] == [0, 3]
    assert [float(sample.advantages.max()) for sample in samples] == pytest.approx([0.1, 0.4])


def test_too_old_tokens_leave_the_loss_and_stay_as_context() -> None:
    trajectory = make_trajectory(prompt_length=2, versions=[4, 4, 5, 7])
    (sample,) = samples_of(make_group([trajectory]), [1.0], stragglers="mask")
    assert sample.token_ids.tolist() == [1, 2, 3, 4, 5, 6]
    assert sample.loss_mask.tolist() == [False, False, False, False, True, True]
    assert sample.advantages.tolist() == [0, 0, 0, 0, 1, 1]
    assert sample.lags.tolist() == [0, 0, 3, 3, 2, 0]
    assert trajectory.loss_mask.tolist() == [0, 0, 1, 1, 1, 1]  # the record is not touched


def test_trained_tokens_of_samples_are_those_the_verdict_counted() -> None:
    group = make_group(
        [make_trajectory(versions=[3, 5, 6, 7]), make_trajectory(versions=[3, 3, 3, 3]), make_trajectory(versions=6)]
    )
    verdict = judge(group, current_version=7, max_lag=2, stragglers="mask")
    samples = to_training_samples(group, verdict, [0.0, 0.0, 0.0])
    assert sum(int(sample.loss_mask.sum()) for sample in samples) == verdict.num_trained == 3 + 0 + 4


def test_tokens_after_the_last_trained_one_are_cut_off() -> None:
    (sample,) = samples_of(make_group([make_trajectory(prompt_length=2, turns=((2, 5),), versions=7)]), [1.0])
    assert sample.token_ids.tolist() == [1, 2, 3, 4]
    assert sample.loss_mask.tolist() == [False, False, True, True]


def test_read_only_arrays_from_the_wire_are_fine() -> None:
    trajectory = make_trajectory(versions=[4, 4, 7, 7])
    frozen = {name: getattr(trajectory, name).copy() for name in ("token_ids", "loss_mask", "behavior_logprobs")}
    for array in frozen.values():
        array.setflags(write=False)
    (sample,) = samples_of(make_group([msgspec.structs.replace(trajectory, **frozen)]), [1.0], stragglers="mask")
    assert int(sample.loss_mask.sum()) == 2


def test_advantages_of_another_length_are_refused() -> None:
    with pytest.raises(ShapeError, match="4 trajectories"):
        samples_of(make_group(version=7), [1.0, 2.0])


def test_a_sample_whose_arrays_do_not_fit_is_refused() -> None:
    (good,) = samples_of(make_group([make_trajectory(versions=7)]), [1.0])
    with pytest.raises(ShapeError, match=r"test:0:0:0\[0\]"):
        dataclasses.replace(good, advantages=good.advantages[:-1])
    first_trained = good.loss_mask.copy()
    first_trained[0] = True
    with pytest.raises(ShapeError, match="first token"):
        dataclasses.replace(good, loss_mask=first_trained)
