"""Two real ranks over Gloo against one process: the same loss, gradients, weights, scores and checkpoints."""

from __future__ import annotations

import json
import math
import os
import re
import socket
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor
from torch.optim import AdamW

from async_rl.algorithms.aggregation import TOKEN_MEAN, Aggregation, AggregationName
from async_rl.algorithms.gspo import gspo
from async_rl.algorithms.losses import ClipRange, LossFn, LossSettings, decoupled_clip
from async_rl.config.algorithm import AlgorithmConfig, CriticConfig
from async_rl.config.run import ModelConfig, RunConfig
from async_rl.config.trainer import TrainerConfig
from async_rl.model.load import load_causal_lm
from async_rl.testing.batches import credit_loss, first_step_gradients, group_samples, make_sample, random_samples
from async_rl.testing.steps import random_groups, step_of
from async_rl.testing.tiny_models import TinyModel, save_tiny_model
from async_rl.trainer.assemble import make_learner
from async_rl.trainer.checkpoint import find_latest, load_checkpoint, save_checkpoint
from async_rl.trainer.distributed import joined_ranks
from async_rl.trainer.learner import Learner
from async_rl.trainer.packing import MicroBatch, balance, pack
from async_rl.trainer.policy import PolicyModel, load_policy
from async_rl.trainer.step import StepSettings, make_optimizer, train_step

LOSS = LossSettings(ClipRange(0.2, 0.28))
A = make_sample([3, 4, 5], trained=[2], advantages=8.0)  # one trained token, loss 8
B = make_sample([6, 7, 8, 9], advantages=2.0)  # three, loss 2 each
UNEVEN = [95] * 5 + [20] * 5
START_TIMEOUT_S = 250


@dataclass(frozen=True)
class Outcome:
    out: Path
    untied: Path
    tied: Path
    of_one_rank: dict[str, Tensor]
    stats: dict[str, Any]
    tensors: dict[str, Tensor]

    def kept(self, name: str) -> dict[str, Tensor]:
        return {key.removeprefix(f"{name}/"): value for key, value in self.tensors.items() if key.startswith(f"{name}/")}


def learner(path: Path) -> tuple[PolicyModel, AdamW]:
    policy = load_policy(path)
    return policy, make_optimizer(policy, learning_rate=1e-3)


def one_step(
    policy: PolicyModel,
    optimizer: AdamW,
    micro_batches: list[MicroBatch],
    loss_fn: LossFn = credit_loss,
    aggregation: Aggregation = TOKEN_MEAN,
) -> None:
    settings = StepSettings(loss_fn, LOSS, aggregation, grad_clip=math.inf)
    assert train_step(policy, optimizer, micro_batches, settings=settings, learning_rate=1e-3).applied


def alone(
    path: Path, micro_batches: list[MicroBatch], loss_fn: LossFn = credit_loss, aggregation: Aggregation = TOKEN_MEAN
) -> dict[str, Tensor]:
    """The gradient of the same step in one process."""
    policy, optimizer = learner(path)
    one_step(policy, optimizer, micro_batches, loss_fn, aggregation)
    return first_step_gradients(policy, optimizer)


def everything(policy: PolicyModel, optimizer: AdamW) -> dict[str, Tensor]:
    state = {name: tensor.clone() for name, tensor in policy.named_full_tensors()}
    for name, parameter in policy.hf.named_parameters():
        state.update({f"{name}.{key}": value.clone() for key, value in optimizer.state[parameter].items()})
    return state


def assert_close(got: dict[str, Tensor], expected: dict[str, Tensor]) -> None:
    """Equal up to the order of float32 sums, relative to the largest entry."""
    assert got.keys() == expected.keys()
    scale = max(float(tensor.abs().max()) for tensor in expected.values())
    for name, tensor in expected.items():
        torch.testing.assert_close(
            got[name] / scale, tensor / scale, rtol=0, atol=1e-6, msg=lambda t, name=name: f"{name}: {t}"
        )


def assert_equal(got: dict[str, Tensor], expected: dict[str, Tensor]) -> None:
    assert got.keys() == expected.keys()
    assert [name for name in expected if not torch.equal(got[name], expected[name])] == []


def start(arguments: list[str], world_size: int) -> None:
    """Run the program on every rank, as torchrun would, and wait."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    program = str(Path(__file__).with_name("fsdp_rank.py"))
    shared = {"WORLD_SIZE": str(world_size), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "OMP_NUM_THREADS": "1"}
    processes = [
        subprocess.Popen(
            [sys.executable, program, *arguments],
            env={**os.environ, **shared, "RANK": str(rank), "LOCAL_RANK": str(rank)},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        for rank in range(world_size)
    ]
    try:
        outputs = [process.communicate(timeout=START_TIMEOUT_S)[0] for process in processes]
    finally:
        for process in processes:
            process.kill()
            process.wait()
    for rank, process in enumerate(processes):
        assert process.returncode == 0, f"rank {rank}:\n{outputs[rank]}"


@pytest.fixture(scope="module")
def outcome(tmp_path_factory: pytest.TempPathFactory) -> Outcome:
    root = tmp_path_factory.mktemp("ranks")
    untied = save_tiny_model(root / "untied", TinyModel.LLAMA, sharpness=2.0)
    tied = save_tiny_model(root / "tied", TinyModel.LLAMA_TIED, sharpness=2.0)
    policy, optimizer = learner(untied)
    one_step(policy, optimizer, pack(random_samples([30, 20], seed=5), 100), decoupled_clip)
    save_checkpoint(root / "of_one_rank", policy, optimizer, step=1)
    out = root / "out"
    out.mkdir()
    start([str(path) for path in (out, untied, tied, root / "of_one_rank")], world_size=2)
    start([str(path) for path in (out, untied, tied, root / "of_one_rank")], world_size=4)
    stats = json.loads((out / "stats2.json").read_text())
    tensors = load_file(out / "tensors2.safetensors")
    tensors |= {f"four_{name}": tensor for name, tensor in load_file(out / "tensors4.safetensors").items()}
    return Outcome(out, untied, tied, everything(policy, optimizer), stats, tensors)


@pytest.mark.parametrize("name", ["two_ranks", "two_ranks_untied", "two_micro_batches_each"])
def test_two_ranks_have_the_token_mean_and_gradient_of_one_batch(name: str, outcome: Outcome) -> None:
    assert outcome.stats[name]["loss"] == pytest.approx(3.5, abs=1e-6)  # not 5, not 1.75
    assert outcome.stats[name]["num_trained_tokens"] == 4
    path = outcome.untied if name == "two_ranks_untied" else outcome.tied
    expected = alone(path, pack([A, B], 100))
    assert_close(outcome.kept(name), expected)
    norm = torch.stack([gradient.norm() for gradient in expected.values()]).norm()
    assert outcome.stats[name]["grad_norm"] == pytest.approx(float(norm), rel=1e-5)


def test_a_rank_without_a_sample_finishes_and_adds_nothing(outcome: Outcome) -> None:
    assert outcome.stats["no_sample_on_rank_1"]["loss"] == pytest.approx(8.0, abs=1e-6)
    assert_close(outcome.kept("no_sample_on_rank_1"), alone(outcome.tied, pack([A], 100)))


@pytest.mark.parametrize("name", ["uneven", "recomputed", "hsdp", "offloaded"])
def test_uneven_work_gets_equal_counts_and_the_gradient_of_one_process(name: str, outcome: Outcome) -> None:
    per_rank = balance(random_samples(UNEVEN), 100, 2)
    assert len(per_rank[0]) == len(per_rank[1])
    assert_close(outcome.kept(name), alone(outcome.untied, pack(random_samples(UNEVEN), 1000), decoupled_clip))


@pytest.mark.parametrize("max_tokens", [1000, 60, 30, 1])
@pytest.mark.parametrize("name", ["token_mean", "sequence_mean_of_means", "sequence_mean_of_sums"])
def test_shared_prompts_over_two_ranks_have_the_gradient_of_one_process(
    name: AggregationName, max_tokens: int, outcome: Outcome
) -> None:
    """One, two and four micro-batches on each of two ranks, against all samples packed one by one on one."""
    samples = group_samples([7, 12, 4], [[5, 9, 1], [3, 3, 14, 6], [8]])
    counts = {1000: 1, 60: 1, 30: 2, 1: 4}
    assert len(balance(samples, max_tokens, 2, share_prompts=True)[0]) == counts[max_tokens]
    one_by_one = [m for sample in samples for m in pack([sample], 1000)]
    assert_close(outcome.kept(f"{name}_{max_tokens}"), alone(outcome.tied, one_by_one, gspo, Aggregation(name)))
    assert outcome.stats[f"{name}_{max_tokens}"]["num_trained_sequences"] == 8


def test_one_group_is_shared_between_two_ranks(outcome: Outcome) -> None:
    samples = group_samples([7, 12, 4], [[5, 9, 1], [3, 3, 14, 6], [8]])[:3]
    assert_close(outcome.kept("one_group"), alone(outcome.tied, pack(samples, 1000), gspo))


def test_a_fully_masked_rank_does_not_dilute_the_other(outcome: Outcome) -> None:
    stats = outcome.stats["rank_0_masked"]
    assert (stats["loss"], stats["applied"]) == (pytest.approx(1.0, abs=1e-6), True)


def test_a_rank_with_nothing_to_train_does_not_dilute_the_mean_kl_and_two_of_them_skip_the_step(outcome: Outcome) -> None:
    one, none = outcome.stats["kl_rank_0_masked"], outcome.stats["kl_all_masked"]
    assert one["kl"] == pytest.approx(1.0, abs=1e-5)
    assert one["loss"] == pytest.approx(0.5, abs=1e-5)  # the coefficient, times that
    assert (none["applied"], none["skip_reason"], none["loss"]) == (False, "no_tokens", 0.0)


def test_a_step_that_cannot_be_applied_is_skipped_on_every_rank(outcome: Outcome) -> None:
    masked, nan, after = (outcome.stats[name] for name in ("all_masked", "nan_on_rank_1", "after_skips"))
    assert (masked["applied"], masked["skip_reason"], masked["loss"]) == (False, "no_tokens", 0.0)
    assert (nan["applied"], nan["skip_reason"]) == (False, "non_finite_loss")
    assert outcome.stats["unchanged_after_skips"] is True
    assert after["applied"] is True


def test_unequal_numbers_of_micro_batches_are_an_error_on_every_rank_not_a_hang(outcome: Outcome) -> None:
    for rank in range(2):
        assert "ranks have 1 to 2 micro-batches" in (outcome.out / f"unequal.{rank}").read_text()


def test_pushed_weights_are_the_whole_float32_model_whatever_ran_before(outcome: Outcome) -> None:
    expected = {name: p.detach() for name, p in load_causal_lm(outcome.tied).named_parameters()}
    for dtype in ("float32", "bfloat16"):
        assert_equal(outcome.kept(f"weights_{dtype}"), expected)
        assert_equal(outcome.kept(f"shards_{dtype}"), expected)
        assert outcome.stats[f"ties_{dtype}"] == [["lm_head.weight", "model.embed_tokens.weight"]]


def test_sharded_scores_are_those_of_one_process(outcome: Outcome) -> None:
    (expected,) = load_policy(outcome.tied).score([list(range(3, 20))], temperature=0.7)
    np.testing.assert_allclose(outcome.kept("scores_float32")["0"].numpy(), expected, rtol=0, atol=1e-5)
    np.testing.assert_allclose(outcome.kept("scores_bfloat16")["0"].numpy(), expected, rtol=0, atol=0.05)


def test_a_checkpoint_of_two_ranks_loads_on_one_element_by_element(outcome: Outcome) -> None:
    latest = find_latest(outcome.out / "checkpoints").latest
    assert latest is not None
    assert latest.meta == {"from": "two ranks"}
    policy, optimizer = learner(outcome.untied)
    load_checkpoint(latest, policy, optimizer)
    assert_equal(everything(policy, optimizer), outcome.kept("saved"))
    one_step(policy, optimizer, pack([A], 100))  # and trains on


def test_a_checkpoint_of_one_rank_loads_on_two_element_by_element(outcome: Outcome) -> None:
    assert_equal(outcome.kept("loaded"), outcome.of_one_rank)


@pytest.mark.parametrize(("saved", "loaded"), [("saved", "four_loaded"), ("saved_copies", "four_loaded_copies")])
def test_a_checkpoint_of_two_ranks_loads_on_four_element_by_element(saved: str, loaded: str, outcome: Outcome) -> None:
    assert_equal(outcome.kept(loaded), outcome.kept(saved))


@pytest.mark.parametrize("name", ["hsdp", "offloaded"])
def test_copies_and_offloaded_parameters_are_pushed_whole(name: str, outcome: Outcome) -> None:
    assert_equal(outcome.kept(f"shards_{name}"), outcome.kept(f"whole_{name}"))


@pytest.mark.parametrize("number", range(3))
def test_a_step_from_the_same_state_and_log_is_the_same_on_one_rank_and_on_two(
    number: int, outcome: Outcome, tmp_path: Path
) -> None:
    groups = random_groups(3, seed=number)
    policy = load_policy(outcome.untied)
    trainer = TrainerConfig(max_tokens_per_micro_batch=64, learning_rate=1e-3, grad_clip=1e6, max_steps=10)
    config = RunConfig(run_dir=tmp_path, model=ModelConfig(path=outcome.untied), trainer=trainer)
    with joined_ranks() as ranks:
        learner = Learner(config, policy, ranks)
        result = learner.train(step_of(groups, number=number))
    stats = outcome.stats[f"logged_{number}"]
    assert stats["loss"] == pytest.approx(result.metrics["loss"], rel=1e-6, abs=1e-7)
    assert stats["tokens"] == result.metrics["tokens"]
    expected = first_step_gradients(policy, learner.optimizer)
    got = outcome.kept(f"logged_{number}")
    norm = torch.stack([gradient.norm() for gradient in expected.values()]).norm()
    difference = torch.stack([(got[name] - gradient).norm() for name, gradient in expected.items()]).norm()
    assert float(norm) > 0.01
    assert float(difference / norm) <= 1e-6


def test_a_critic_over_two_ranks_learns_as_on_one_and_its_checkpoint_loads_there(outcome: Outcome, tmp_path: Path) -> None:
    trainer = TrainerConfig(max_tokens_per_micro_batch=64, learning_rate=1e-3, grad_clip=1e6, max_steps=10)
    critic_config = CriticConfig(learning_rate=1e-3, updates_per_step=2)
    config = RunConfig(
        run_dir=tmp_path,
        model=ModelConfig(path=outcome.untied),
        trainer=trainer,
        algorithm=AlgorithmConfig(advantage="gae"),
        critic=critic_config,
    )
    with joined_ranks() as ranks:
        learner = make_learner(config, ranks)
        critic = learner._critic
        assert critic is not None
        for number in range(2):
            step = step_of(random_groups(3, seed=number), number=number)
            learner.begin_batch([step])
            metrics, other = learner.train(step).metrics, outcome.stats[f"critic_{number}"]
            for name in ("loss", "value_loss", "critic_grad_norm", "value_mean", "return_mean", "value_clipped_share"):
                assert other[name] == pytest.approx(metrics[name], rel=1e-4, abs=1e-6), name
        moments = {name: critic.optimizer.state[p]["exp_avg"] for name, p in critic.model.named_parameters()}
        got = outcome.kept("critic_moments")
        norm = torch.stack([moment.norm() for moment in moments.values()]).norm()
        difference = torch.stack([(got[name] - moment).norm() for name, moment in moments.items()]).norm()
        assert float(norm) > 0.01
        assert float(difference / norm) <= 1e-3  # the second step's values come from AdamW's first, which magnifies rounding
        latest = find_latest(outcome.out / "of_critic").latest
        assert latest is not None
        load_checkpoint(latest, learner._policy, learner.optimizer, critic)
        assert_equal(dict(critic.model.named_full_tensors()), outcome.kept("critic"))
        assert_equal({name: critic.optimizer.state[p]["exp_avg"] for name, p in critic.model.named_parameters()}, got)


def test_a_snapshot_is_the_same_gathered_and_through_shared_memory_of_which_nothing_is_left(outcome: Outcome) -> None:
    expected = {name: p.detach().to(torch.bfloat16) for name, p in load_causal_lm(outcome.tied).named_parameters()}
    for backend in ("gloo", "shm"):
        assert_equal(outcome.kept(f"pushed_{backend}"), expected)
        assert outcome.stats[f"segments_{backend}"] == []


def test_a_rank_that_waits_in_a_collective_can_say_for_whom(outcome: Outcome) -> None:
    (report,) = outcome.stats["stuck"]
    first, *lines = report.splitlines()
    assert re.fullmatch(r"rank 0 waits since \d s in all_reduce \(train\) for rank 1", first)
    assert re.match(r"  rank 1: train for \d s, in no collective", lines[1])


def test_a_save_that_fails_fails_on_every_rank(outcome: Outcome) -> None:
    for rank in range(2):
        assert "a_file/step_00000003.e000000.tmp cannot be written" in (outcome.out / f"failed_save.{rank}").read_text()
