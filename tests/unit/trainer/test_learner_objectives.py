"""The learner with a reference, in loss and in reward, and with proximal policies recomputed or interpolated."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from async_rl.algorithms.staleness import judge
from async_rl.config import RunConfig
from async_rl.run_dir.records import StepRecord
from async_rl.testing.builders import make_group, make_task, make_trajectory
from async_rl.testing.tiny_models import save_tiny_model
from async_rl.trainer.distributed import Ranks, joined_ranks
from async_rl.trainer.intake import ComposedStep
from async_rl.trainer.learner import Learner
from async_rl.trainer.policy import load_policy
from protocol.messages import TrajectoryGroup


@pytest.fixture(scope="module")
def ranks() -> Iterator[Ranks]:
    with joined_ranks() as joined:
        yield joined


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    root = tmp_path_factory.mktemp("models")
    return save_tiny_model(root / "policy", sharpness=3.0), save_tiny_model(root / "reference", seed=1, sharpness=3.0)


def make_learner(models: tuple[Path, Path], ranks: Ranks, *, reference: bool = False, **algorithm: object) -> Learner:
    config = RunConfig.model_validate(
        {"model": {"path": models[0]}, "algorithm": algorithm, "trainer": {"learning_rate": 2e-3, "groups_per_step": 1}}
    )
    return Learner(config, load_policy(models[0]), ranks, reference=load_policy(models[1]) if reference else None)


def group_of(learner: Learner, row: int) -> TrajectoryGroup:
    """Two trajectories of version 0 with the policy's own logprobs."""
    trajectories = []
    for member, reward in enumerate((1.0, 0.0)):
        ids = np.random.default_rng(10 * row + member).integers(3, 22, 7)
        ids[:3] = [5, 6, 7 + row]
        scores = learner.scores([ids.astype(np.int32)], temperature=1.0)[0]
        trajectories.append(
            make_trajectory(prompt_length=3, token_ids=ids.tolist(), logprobs=scores[2:].tolist(), reward=reward)
        )
    return make_group(trajectories, task=make_task(row=row, group_size=2))


def step_of(group: TrajectoryGroup, version: int) -> ComposedStep:
    verdict = judge(group, current_version=version, max_lag=4, stragglers="drop")
    return ComposedStep(StepRecord(version, version, 0, True, (), 0), (group,), (verdict,))


def test_a_kl_loss_pulls_towards_the_reference(models: tuple[Path, Path], ranks: Ranks) -> None:
    kls = []
    for coefficient in (1e-6, 10.0):
        learner = make_learner(models, ranks, reference=True, kl_coef=coefficient, kl_estimator="k2")
        group = group_of(learner, 0)
        learner.begin_batch([step_of(group, 0)])
        results = [learner.train(step_of(group, version)).metrics["kl_reference"] for version in range(4)]
        kls.append(results)
    assert kls[0][0] == pytest.approx(kls[1][0], rel=1e-5)  # before any step
    assert kls[1][-1] < 0.9 * kls[1][0]
    assert kls[1][-1] < kls[0][-1]


def test_a_kl_in_the_reward_is_taken_off_before_the_baseline(models: tuple[Path, Path], ranks: Ranks) -> None:
    learner = make_learner(models, ranks, reference=True, kl_coef=0.5, kl_in="reward", kl_estimator="k1", advantage="dr_grpo")
    group = group_of(learner, 0)
    samples = learner._credit.credited(step_of(group, 0)).samples
    reference = load_policy(models[1])
    penalties = []
    for trajectory in group.trajectories:
        own = reference.score([trajectory.token_ids.tolist()], temperature=1.0)[0]
        penalties.append(0.5 * float((trajectory.behavior_logprobs[3:] - own[2:]).sum()))
    shaped = np.array([1.0, 0.0]) - np.array(penalties)
    expected = shaped - shaped.mean()
    assert [float(sample.advantages[-1]) for sample in samples] == pytest.approx(expected.tolist(), abs=1e-5)
    assert learner.train(step_of(group, 0)).metrics["kl_reference"] is None  # no second term in the loss


@pytest.mark.parametrize("proximal", ["recompute", "interpolate"])
def test_later_steps_of_a_batch_are_clipped_against_its_start(proximal: str, models: tuple[Path, Path], ranks: Ranks) -> None:
    """Everything was sampled by the version that the batch starts from, so the proximal policy is the behavior policy: exact
    both ways, and the loss's ratio is policy/behavior."""
    learner = make_learner(models, ranks, proximal=proximal)
    groups = [group_of(learner, row) for row in range(2)]
    learner.begin_batch([step_of(groups[0], 0), step_of(groups[1], 1)])
    first = learner.train(step_of(groups[0], 0)).metrics
    assert first["loss_ratio_mean"] == pytest.approx(1.0, abs=1e-5)
    second = learner.train(step_of(groups[1], 1)).metrics
    assert second["loss_ratio_mean"] == pytest.approx(second["ratio_mean"], rel=1e-4)
    assert abs(second["loss_ratio_mean"] - 1) > 1e-3
    assert second["importance_weight_mean"] == pytest.approx(1.0, abs=1e-4)
