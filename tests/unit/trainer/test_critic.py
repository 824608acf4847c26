"""The critic: values and gradients however a step is cut, credit by hand, clip, skips, checkpoints, and that it learns."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from async_rl.algorithms.kl import kl_penalty
from async_rl.config import RunConfig
from async_rl.errors import CheckpointError
from async_rl.run_dir.intake_log import Position
from async_rl.run_dir.layout import create_run
from async_rl.testing.batches import group_samples, make_sample
from async_rl.testing.builders import make_group, make_trajectory
from async_rl.testing.steps import random_groups, step_of
from async_rl.testing.tiny_models import TinyModel, save_tiny_model
from async_rl.trainer.assemble import make_learner
from async_rl.trainer.checkpoint import open_checkpoint
from async_rl.trainer.critic import Critic, MicroBatchTargets
from async_rl.trainer.distributed import Ranks, joined_ranks
from async_rl.trainer.intake import ComposedStep
from async_rl.trainer.learner import Learner
from async_rl.trainer.packing import MicroBatch, filler_micro_batch, lay_out, pack, unpack
from async_rl.trainer.policy import PolicyOptions
from async_rl.trainer.progress import Progress
from async_rl.trainer.step import SkipReason
from async_rl.trainer.value_model import ValueModel, load_value_model
from protocol.messages import Reward

SAMPLES = group_samples([7, 12, 4], [[5, 9, 1], [3, 3, 14, 6], [8]])
NUM_TRAINED = sum(int(sample.loss_mask.sum()) for sample in SAMPLES)
WAYS: dict[str, list[MicroBatch]] = {
    "packed": pack(SAMPLES, 1000),
    "shared": pack(SAMPLES, 1000, share_prompts=True),
    "shared, cut": pack(SAMPLES, 40, share_prompts=True),
    "one by one": pack(SAMPLES, 1),
    "one empty": [*pack(SAMPLES, 1000), filler_micro_batch()],
}


@pytest.fixture(scope="module")
def ranks() -> Iterator[Ranks]:
    with joined_ranks() as joined:
        yield joined


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tiny_model(tmp_path_factory.mktemp("model"), TinyModel.LLAMA_TIED, sharpness=2.0)


def config_of(model: Path, run_dir: Path | None = None, *, critic: dict[str, Any] | None = None, **trainer: Any) -> RunConfig:
    return RunConfig.model_validate(
        {
            "model": {"path": model},
            "run_dir": run_dir or Path("unused"),
            "algorithm": {"advantage": "gae"},
            "critic": {"learning_rate": 1e-3, **(critic or {})},
            "trainer": {"learning_rate": 1e-3, "max_tokens_per_micro_batch": 64, "max_steps": 10, **trainer},
        }
    )


def model_with_a_head(model: Path) -> ValueModel:
    """A head that has learned something, or no gradient would reach the trunk."""
    values = load_value_model(model, options=PolicyOptions())
    with torch.no_grad():
        values.head.weight.copy_(torch.randn(values.head.weight.shape, generator=torch.Generator().manual_seed(0)) / 8)
        values.head.bias.fill_(0.25)
    return values


def targets_of(
    micro_batches: Sequence[MicroBatch], returns: Sequence[Tensor], old: Sequence[Tensor]
) -> list[MicroBatchTargets]:
    old_values, wanted = dict(enumerate(old)), dict(enumerate(returns))
    return [MicroBatchTargets(lay_out(m, old_values), lay_out(m, wanted)) for m in micro_batches]


def batch_of(first: int) -> list[ComposedStep]:
    """Two steps of two groups each."""
    groups = random_groups(4, seed=first)
    return [step_of(groups[:2], number=first), step_of(groups[2:], number=first + 1)]


# -- values and gradients ------------------------------------------------------------------------------------------------
@torch.no_grad()
def test_every_way_of_packing_has_the_values_of_the_plain_trunk_in_float64(tmp_path: Path) -> None:
    """GPT-2: nothing in it rounds to float32."""
    values = model_with_a_head(save_tiny_model(tmp_path, TinyModel.GPT2, sharpness=2.0)).double()
    expected = []
    for sample in SAMPLES:
        values.trunk.set_attn_implementation("sdpa")  # type: ignore[operator]  # a PreTrainedModel
        hidden = values.trunk(input_ids=torch.from_numpy(sample.token_ids).long()[None], use_cache=False).last_hidden_state[0]
        before = torch.cat((torch.zeros(1, dtype=torch.float64), values.head(hidden)[:-1, 0]))
        expected.append(torch.where(torch.from_numpy(sample.loss_mask), before, 0.0))
    values.trunk.set_attn_implementation("async_rl_packed")  # type: ignore[operator]  # a PreTrainedModel
    for way, micro_batches in WAYS.items():
        got = unpack(micro_batches, [values.values(m) for m in micro_batches])
        assert len(got) == len(SAMPLES)
        for index, rows in got.items():
            assert float((rows - expected[index]).abs().max()) <= 1e-12, (way, index)


def test_a_critic_that_knows_nothing_says_0_and_shares_nothing_with_the_policy(model: Path, ranks: Ranks) -> None:
    learner = make_learner(config_of(model), ranks)
    critic = learner._critic
    assert critic is not None
    assert not any(rows.any() for rows in critic.values(WAYS["packed"]))
    owned = {parameter.data_ptr() for parameter in critic.model.parameters()}
    assert not owned & {parameter.data_ptr() for parameter in learner._policy.parameters()}
    assert [spec.name for spec in learner._policy.weight_specs()] == [name for name, _ in learner._policy.hf.named_parameters()]


@pytest.mark.parametrize("way", [way for way in WAYS if way != "packed"])
def test_the_gradient_does_not_depend_on_how_a_step_is_cut(way: str, model: Path) -> None:
    rng = np.random.default_rng(0)
    returns = [torch.from_numpy(rng.normal(size=len(sample))).float() for sample in SAMPLES]
    old = [torch.from_numpy(rng.normal(scale=0.1, size=len(sample))).float() for sample in SAMPLES]
    results = []
    for micro_batches in (WAYS["packed"], WAYS[way]):
        critic = Critic(model_with_a_head(model), config_of(model, grad_clip=1e9))
        stats = critic.learn(micro_batches, targets_of(micro_batches, returns, old), num_tokens=NUM_TRAINED, step=1)
        moments = {name: critic.optimizer.state[p]["exp_avg"] for name, p in critic.model.named_parameters()}
        results.append((stats, moments))
    (one, expected), (other, got) = results
    assert other.loss == pytest.approx(one.loss, rel=1e-6)
    assert other.clipped_share == one.clipped_share > 0
    scale = max(float(moment.abs().max()) for moment in expected.values())
    assert all(float(moment.abs().max()) > 1e-6 * scale for moment in expected.values())  # the whole trunk learns
    for name, moment in expected.items():
        assert float((got[name] - moment).abs().max()) / scale <= 1e-6, name


# -- credit --------------------------------------------------------------------------------------------------------------
def two_turns() -> ComposedStep:
    """Two tokens sampled, three of a tool, two sampled: rewards 1 and 0."""
    members = [make_trajectory(prompt_length=3, turns=((2, 3), (2, 0)), reward=reward) for reward in (1.0, 0.0)]
    return step_of([make_group(members)])


def test_credit_by_hand_where_the_critic_knows_nothing(model: Path, ranks: Ranks) -> None:
    """V = 0, λ = 1/2: the reward is on the last token, half of it on the one before, across the tool's tokens likewise."""
    learner = make_learner(config_of(model, critic={"gae_lambda": 0.5, "whiten": False}), ranks)
    credited = learner._credit.credited(two_turns())
    first, second = credited.samples
    assert first.advantages.tolist() == [0, 0, 0, 0.125, 0.25, 0, 0, 0, 0.5, 1]
    assert second.advantages.tolist() == [0.0] * 10
    assert credited.targets is not None
    assert credited.targets.returns[0].tolist() == first.advantages.tolist()  # A + V
    assert (credited.targets.explained_variance, credited.targets.return_mean) == (0.0, 0.5)


def test_credit_by_hand_with_values_a_discount_and_whitening(model: Path, ranks: Ranks) -> None:
    """γ = λ = 1/2, own values 1, 2, 3, 1, reward 1: δ = 0, −1/2, −5/2, 0, so A = −9/32, −9/8, −5/2, 0 and R = A + V."""
    learner = make_learner(config_of(model, critic={"gamma": 0.5, "gae_lambda": 0.5, "whiten": False}), ranks)
    step = two_turns()
    task = step.groups[0].task_id
    learner._credit._values = {
        (task, 0): np.array([9, 9, 9, 1, 2, 9, 9, 9, 3, 1.0]),
        (task, 1): np.zeros(10),
    }
    credited = learner._credit.credited(step)
    assert credited.targets is not None
    trained = [3, 4, 8, 9]
    assert credited.samples[0].advantages[trained].tolist() == [-0.28125, -1.125, -2.5, 0.0]
    assert credited.targets.returns[0].tolist() == [0, 0, 0, 0.71875, 0.875, 0, 0, 0, 0.5, 1.0]
    assert credited.targets.old_values[0].tolist() == [0, 0, 0, 1, 2, 0, 0, 0, 3, 1]
    observed, said = np.array([0.125, 0.25, 0.5, 1.0, 0, 0, 0, 0]), np.array([1.0, 2, 3, 1, 0, 0, 0, 0])
    assert credited.targets.explained_variance == pytest.approx(1 - np.var(observed - said) / np.var(observed))
    learner._credit._critic = config_of(model, critic={"gamma": 0.5, "gae_lambda": 0.5}).critic
    whitened = np.concatenate([sample.advantages[trained] for sample in learner._credit.credited(step).samples])
    assert float(whitened.mean()) == pytest.approx(0.0, abs=1e-6)
    assert float(whitened.std(ddof=1)) == pytest.approx(1.0, abs=1e-6)


def test_a_kl_in_the_reward_belongs_to_its_own_token(model: Path, ranks: Ranks) -> None:
    """λ = 1 and V = 0: what a token is credited with is the reward, less the penalties from it on."""
    config = config_of(model, critic={"gae_lambda": 1.0, "whiten": False})
    algorithm = config.algorithm.model_copy(update={"kl_coef": 0.5, "kl_in": "reward", "kl_estimator": "k1"})
    learner = make_learner(config.model_copy(update={"algorithm": algorithm}), ranks)
    (first, _) = learner._credit.credited(two_turns()).samples
    own = learner.scores([first.token_ids], temperature=1.0)[0]  # the reference is the policy itself
    k = kl_penalty(
        torch.from_numpy(first.behavior_logprobs), torch.from_numpy(np.append(0, own)), torch.from_numpy(first.loss_mask), "k1"
    ).numpy()
    trained = [3, 4, 8, 9]
    expected = [1 - 0.5 * k[[t for t in trained if t >= at]].sum() for at in trained]
    assert first.advantages[trained].tolist() == pytest.approx(expected, abs=1e-5)
    assert len(set(np.round(np.diff(expected), 6))) == 3  # a penalty of its own on every token


def test_the_values_of_a_drawn_batch_are_those_of_its_beginning(model: Path, ranks: Ranks) -> None:
    learner = make_learner(config_of(model), ranks)
    batch = batch_of(0)
    learner.begin_batch(batch)
    assert learner.train(batch[0]).metrics["value_loss"] > 0
    later = learner._credit.credited(batch[1]).targets
    assert later is not None
    assert not any(rows.any() for rows in later.old_values)  # before the first step it knew nothing
    learner.begin_batch(batch[1:])
    now = learner._credit.credited(batch[1]).targets
    assert now is not None
    assert all(rows.any() for rows in now.old_values)


# -- what an update does -------------------------------------------------------------------------------------------------
def test_the_clip_binds_once_values_have_moved(model: Path) -> None:
    micro_batches = WAYS["shared"]
    returns = [torch.full((len(sample),), 5.0) for sample in SAMPLES]
    old = [torch.zeros(len(sample)) for sample in SAMPLES]
    shares = []
    for updates in (1, 8):
        config = config_of(model, critic={"updates_per_step": updates, "learning_rate": 0.1, "value_clip": 0.2})
        critic = Critic(load_value_model(model, options=PolicyOptions()), config)
        stats = critic.learn(micro_batches, targets_of(micro_batches, returns, old), num_tokens=NUM_TRAINED, step=1)
        assert (stats.num_updates, stats.skip_reason, stats.loss) == (updates, None, 12.5)
        shares.append(stats.clipped_share)
    assert shares[0] == 0.0
    assert shares[1] > 0.5


def test_an_update_that_is_not_finite_changes_nothing_and_is_the_last(model: Path) -> None:
    micro_batches = WAYS["packed"]
    returns = [torch.full((len(sample),), float("nan")) for sample in SAMPLES]
    critic = Critic(model_with_a_head(model), config_of(model, critic={"updates_per_step": 3}))
    before = {name: p.detach().clone() for name, p in critic.model.named_parameters()}
    stats = critic.learn(micro_batches, targets_of(micro_batches, returns, returns), num_tokens=NUM_TRAINED, step=1)
    assert (stats.num_updates, stats.skip_reason) == (0, SkipReason.NON_FINITE_LOSS)
    assert all(torch.equal(p, before[name]) for name, p in critic.model.named_parameters())
    assert all(p.grad is None for p in critic.model.parameters())


def test_a_step_that_is_skipped_leaves_the_critic_alone(model: Path, ranks: Ranks) -> None:
    learner = make_learner(config_of(model), ranks)
    before = learner.full_weights()
    nobody = [make_trajectory(reward=Reward.invalid("TimeoutError", "timeout")) for _ in range(2)]
    result = learner.train(step_of([make_group(nobody)]))
    assert result.skip_reason == SkipReason.NO_TOKENS
    assert result.metrics["critic_updates"] == 0
    after = learner.full_weights()
    assert "critic.head.weight" in after
    assert all(torch.equal(after[name], tensor) for name, tensor in before.items())


def test_it_learns_which_prompts_are_solved(model: Path) -> None:
    """The return is 1 behind one prompt and 0 behind another: from nothing explained to nearly all."""
    rng = np.random.default_rng(0)
    samples = [
        make_sample([4 + index % 2, 9, 9, *rng.integers(3, 22, 4)], trained=range(3, 7), task_id=f"t{index}")
        for index in range(16)
    ]
    wanted = [torch.full((7,), float(index % 2)) for index in range(16)]
    critic = Critic(
        load_value_model(model, options=PolicyOptions()), config_of(model, critic={"learning_rate": 3e-3, "value_clip": None})
    )
    micro_batches, losses = pack(samples, 1000), []
    for step in range(1, 26):
        stats = critic.learn(micro_batches, targets_of(micro_batches, wanted, wanted), num_tokens=64, step=step)
        losses.append(stats.loss)
    assert losses[0] == pytest.approx(0.25)  # ½ of a mean squared return of ½
    assert losses[-1] < 0.01


# -- the whole, again and resumed ----------------------------------------------------------------------------------------
def trained(learner: Learner, steps: Sequence[int]) -> dict[str, Tensor]:
    """Train two steps to a batch; everything that a checkpoint keeps."""
    for first in steps[::2]:
        batch = batch_of(first)
        learner.begin_batch(batch)
        for step in batch:
            assert learner.train(step).skip_reason is None
    critic = learner._critic
    assert critic is not None
    moments = {
        f"critic.{name}.{key}": value.clone()
        for name, parameter in critic.model.named_parameters()
        for key, value in critic.optimizer.state[parameter].items()
    }
    return learner.full_weights() | moments


def test_save_load_and_go_on_is_one_run_bit_for_bit_in_both_models(model: Path, ranks: Ranks, tmp_path: Path) -> None:
    create_run(tmp_path / "run")
    config = config_of(model, tmp_path / "run", critic={"updates_per_step": 2}, schedule="linear")
    straight = make_learner(config, ranks)
    at_two = trained(straight, [0, 1])
    path = straight.save(Progress(version=2), Position("1-1", 0), epoch=1).result(timeout=60)
    expected = trained(straight, [2, 3])
    assert all(not torch.equal(expected[name], at_two[name]) for name in expected if name.endswith("weight"))
    resumed = make_learner(config, ranks)
    assert resumed.load(open_checkpoint(path)).version == 2
    got = trained(resumed, [2, 3])
    assert got.keys() == expected.keys()
    assert [name for name in expected if not torch.equal(got[name], expected[name])] == []
    again = trained(make_learner(config, ranks), [0, 1, 2, 3])
    assert [name for name in expected if not torch.equal(again[name], expected[name])] == []


def test_a_checkpoint_without_a_critic_is_refused_by_a_run_with_one_and_the_other_way_round(
    model: Path, ranks: Ranks, tmp_path: Path
) -> None:
    create_run(tmp_path / "run")
    config = config_of(model, tmp_path / "run")
    plain = config.model_copy(update={"algorithm": config.algorithm.model_copy(update={"advantage": "grpo"})})
    for version, (writes, reads, message) in enumerate(
        ((config, plain, "has a critic, which this run has not"), (plain, config, "has no critic, which .* trains"))
    ):
        saved = make_learner(writes, ranks).save(Progress(version=version), Position("1-1", 0), epoch=1).result(timeout=60)
        with pytest.raises(CheckpointError, match=message):
            make_learner(reads, ranks).load(open_checkpoint(saved))
