"""One rank of test_fsdp_ranks.py, started by torchrun's environment: runs every scenario, rank 0 writes what came out.

usage: fsdp_rank.py OUT UNTIED_MODEL TIED_MODEL CHECKPOINTS_OF_ONE_RANK
"""

from __future__ import annotations

import json
import math
import os
import sys
import threading
import time
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path

import torch
import torch.distributed as dist
from safetensors.torch import save_file
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh
from torch.optim import AdamW

from async_rl.algorithms.aggregation import TOKEN_MEAN, Aggregation
from async_rl.algorithms.gspo import gspo
from async_rl.algorithms.losses import ClipRange, LossFn, LossSettings, decoupled_clip
from async_rl.config.algorithm import AlgorithmConfig, CriticConfig
from async_rl.config.run import ModelConfig, RunConfig
from async_rl.config.trainer import TrainerConfig, WeightsConfig
from async_rl.errors import CheckpointError, ShapeError
from async_rl.run_dir.layout import create_run, open_run
from async_rl.run_dir.segments_of_run import segments_of_run
from async_rl.testing.batches import credit_loss, first_step_gradients, group_samples, make_sample, random_samples
from async_rl.testing.steps import random_groups, step_of
from async_rl.trainer.assemble import make_learner
from async_rl.trainer.checkpoint import find_latest, load_checkpoint, save_checkpoint
from async_rl.trainer.distributed import Ranks, joined_ranks
from async_rl.trainer.intake import ComposedStep
from async_rl.trainer.learner import Learner
from async_rl.trainer.packing import MicroBatch, balance, filler_micro_batch, pack
from async_rl.trainer.policy import PolicyModel, PolicyOptions, load_policy
from async_rl.trainer.sharding import full_tensor
from async_rl.trainer.step import (
    KlSettings,
    OtherLogprobs,
    StepSettings,
    StepStats,
    make_optimizer,
    policy_logprobs,
    train_step,
)
from async_rl.weights.send_buffer import SendBuffer, lay_out
from async_rl.weights.shm_segment import Segment, SegmentReader

LOSS = LossSettings(ClipRange(0.2, 0.28))
A = make_sample([3, 4, 5], trained=[2], advantages=8.0)
B = make_sample([6, 7, 8, 9], advantages=2.0)
PROMPTS, COMPLETIONS = [7, 12, 4], [[5, 9, 1], [3, 3, 14, 6], [8]]
NUM_LOGGED = 3
CRITIC = CriticConfig(learning_rate=1e-3, updates_per_step=2)
STUCK_S = 3.0
UNEVEN = [95] * 5 + [20] * 5


class Program:
    """Scenarios by name. Each leaves numbers in `stats` and tensors in `tensors`; every rank runs all of them."""

    def __init__(self, ranks: Ranks, out: Path, untied: Path, tied: Path) -> None:
        self.ranks, self.out, self.untied, self.tied = ranks, out, untied, tied
        self.stats: dict[str, object] = {}
        self.tensors: dict[str, Tensor] = {}

    def learner(self, path: Path, options: PolicyOptions | None = None) -> tuple[PolicyModel, AdamW]:
        policy = load_policy(path, options=options, mesh=self.ranks.mesh)
        return policy, make_optimizer(policy, learning_rate=1e-3)

    def step(
        self,
        name: str,
        policy: PolicyModel,
        optimizer: AdamW,
        mine: Sequence[MicroBatch],
        loss_fn: LossFn = credit_loss,
        aggregation: Aggregation = TOKEN_MEAN,
    ) -> StepStats:
        settings = StepSettings(loss_fn, LOSS, aggregation, grad_clip=math.inf)
        stats = train_step(policy, optimizer, mine, settings=settings, learning_rate=1e-3)
        self.stats[name] = asdict(stats)
        return stats

    def keep(self, name: str, tensors: dict[str, Tensor]) -> None:
        self.tensors.update({f"{name}/{key}": tensor.clone().contiguous() for key, tensor in tensors.items()})

    def gradients(
        self,
        name: str,
        path: Path,
        per_rank: Sequence[Sequence[MicroBatch]],
        loss_fn: LossFn = credit_loss,
        options: PolicyOptions | None = None,
        aggregation: Aggregation = TOKEN_MEAN,
    ) -> None:
        """One first step, and its gradient."""
        policy, optimizer = self.learner(path, options)
        self.step(name, policy, optimizer, per_rank[self.ranks.rank], loss_fn, aggregation)
        self.keep(name, first_step_gradients(policy, optimizer))

    def run(self, checkpoints_of_one_rank: Path) -> None:
        self.gradients("two_ranks", self.tied, [pack([A], 100), pack([B], 100)])
        self.gradients("two_ranks_untied", self.untied, [pack([A], 100), pack([B], 100)])
        padded = [[*pack([sample], 100), filler_micro_batch()] for sample in (A, B)]
        self.gradients("two_micro_batches_each", self.tied, padded)
        self.gradients("no_sample_on_rank_1", self.tied, balance([A], 100, 2))
        self.gradients("uneven", self.untied, balance(random_samples(UNEVEN), 100, 2), decoupled_clip)
        recompute = PolicyOptions(activation_checkpointing=True)
        self.gradients("recomputed", self.untied, balance(random_samples(UNEVEN), 100, 2), decoupled_clip, recompute)
        masked, one = make_sample([3, 4, 5], trained=[]), make_sample([6, 7, 8], advantages=1.0)
        self.gradients("rank_0_masked", self.tied, [pack([masked], 100), pack([one], 100)])
        groups = group_samples(PROMPTS, COMPLETIONS)
        for name in ("token_mean", "sequence_mean_of_means", "sequence_mean_of_sums"):
            for max_tokens in (1000, 60, 30, 1):
                cut = balance(groups, max_tokens, 2, share_prompts=True)
                self.gradients(f"{name}_{max_tokens}", self.tied, cut, gspo, aggregation=Aggregation(name))
        self.gradients("one_group", self.tied, balance(groups[:3], 1000, 2, share_prompts=True), gspo)
        self.kl()
        self.options()
        self.log()
        self.critic()
        self.snapshot()
        self.stuck()
        self.skips()
        self.unequal_counts()
        self.weights_and_scores()
        self.checkpoints(checkpoints_of_one_rank)

    def kl(self) -> None:
        """A reference that is sqrt 2 nats away from the policy, so that k2 is 1: nothing to train on rank 0, then on both."""
        masked, one = make_sample([3, 4, 5], trained=[]), make_sample([6, 7, 8], advantages=0.0)
        for name, samples in (("kl_rank_0_masked", (masked, one)), ("kl_all_masked", (masked, masked))):
            policy, optimizer = self.learner(self.tied)
            mine = pack([samples[self.ranks.rank]], 100)
            others = OtherLogprobs(reference=[own - math.sqrt(2) for own in policy_logprobs(policy, mine)])
            settings = StepSettings(credit_loss, LOSS, grad_clip=math.inf, kl=KlSettings(0.5, "k2", "plain"))
            stats = train_step(policy, optimizer, mine, settings=settings, learning_rate=1e-3, others=others)
            self.stats[name] = asdict(stats)

    def skips(self) -> None:
        policy, optimizer = self.learner(self.tied)
        before = dict(policy.named_full_tensors())
        self.step("all_masked", policy, optimizer, pack([make_sample([3, 4, 5], trained=[])], 100))
        bad = make_sample([3, 4, 5], advantages=math.nan if self.ranks.rank == 1 else 1.0)
        self.step("nan_on_rank_1", policy, optimizer, pack([bad], 100))
        after = dict(policy.named_full_tensors())
        self.stats["unchanged_after_skips"] = all(torch.equal(before[name], after[name]) for name in before)
        self.step("after_skips", policy, optimizer, pack([A], 100))

    def unequal_counts(self) -> None:
        policy, optimizer = self.learner(self.tied)
        try:
            self.step("unequal", policy, optimizer, pack([A], 100) * (1 + self.ranks.rank))
        except ShapeError as error:
            (self.out / f"unequal.{self.ranks.rank}").write_text(str(error))

    def weights_and_scores(self) -> None:
        for dtype in (torch.float32, torch.bfloat16):
            policy, _ = self.learner(self.tied, PolicyOptions(dtype=dtype))
            name = str(dtype).removeprefix("torch.")
            self.keep(f"scores_{name}", {"0": torch.from_numpy(policy.score([list(range(3, 20))], temperature=0.7)[0])})
            policy_logprobs(policy, pack([A], 100))
            self.keep(f"weights_{name}", dict(policy.named_full_tensors()))
            self.shards(name, policy)
            self.stats[f"ties_{name}"] = policy.ties()

    def options(self) -> None:
        """HSDP (a copy of the model per rank), and parameters in host memory: the same gradients and weights."""
        mine = balance(random_samples(UNEVEN), 100, 2)
        copies = init_device_mesh("cpu", (2, 1), mesh_dim_names=("replicate", "shard"))
        for name, mesh, options in (
            ("hsdp", copies, PolicyOptions()),
            ("offloaded", self.ranks.mesh, PolicyOptions(cpu_offload=True)),
        ):
            policy = load_policy(self.untied, options=options, mesh=mesh)
            optimizer = make_optimizer(policy, learning_rate=1e-3)
            self.step(name, policy, optimizer, mine[self.ranks.rank], decoupled_clip)
            self.keep(name, first_step_gradients(policy, optimizer))
            self.shards(name, policy)
            self.keep(f"whole_{name}", dict(policy.named_full_tensors()))
        save_checkpoint(self.out / "of_copies", policy, optimizer, step=1)
        self.keep("saved_copies", everything(policy, optimizer))

    def log(self) -> None:
        """Steps of one log, each from the same state, as rank 0's learner leads them."""
        for number in range(NUM_LOGGED):
            policy = load_policy(self.untied, mesh=self.ranks.mesh)
            learner = Learner(run_config(self.untied, self.out, 2), policy, self.ranks)
            if self.ranks.is_first:
                result = learner.train(logged_step(number))
                self.stats[f"logged_{number}"] = dict(result.metrics)
                learner.stop()
            else:
                learner.follow()
            self.keep(f"logged_{number}", first_step_gradients(policy, learner.optimizer))

    def critic(self) -> None:
        """Two steps with a critic, as rank 0's learner leads them: what both models have learned, and their checkpoint."""
        config = run_config(self.untied, self.out, 2)
        config = config.model_copy(update={"algorithm": AlgorithmConfig(advantage="gae"), "critic": CRITIC})
        learner = make_learner(config, self.ranks)
        critic = learner._critic
        assert critic is not None
        if self.ranks.is_first:
            for number in range(2):
                learner.begin_batch([logged_step(number)])
                self.stats[f"critic_{number}"] = dict(learner.train(logged_step(number)).metrics)
            learner.stop()
        else:
            learner.follow()
        moments = {name: critic.optimizer.state[p]["exp_avg"] for name, p in critic.model.named_parameters()}
        self.keep("critic_moments", {name: full_tensor(moment) for name, moment in moments.items()})
        self.keep("critic", dict(critic.model.named_full_tensors()))
        save_checkpoint(self.out / "of_critic", learner._policy, learner.optimizer, step=2, critic=critic)

    def snapshot(self) -> None:
        """A push's snapshot through the learner, gathered and through shared memory; segments are gone afterwards."""
        for backend in ("gloo", "shm"):
            run_dir = self.out / f"run_{backend}"
            if self.ranks.is_first:
                create_run(run_dir)
            dist.barrier()
            policy = load_policy(self.tied, mesh=self.ranks.mesh)
            config = run_config(self.tied, run_dir, 2)
            weights = WeightsConfig(backend=backend, shm_dir=self.out, wire_dtype="bfloat16")
            learner = Learner(config.model_copy(update={"weights": weights}), policy, self.ranks)
            if not self.ranks.is_first:
                learner.follow()
                continue
            buffer, _ = learner.snapshot([[3, 4, 5]])
            self.keep(f"pushed_{backend}", {slot.name: slot.view(buffer.buckets) for slot in buffer.slots})
            learner.stop()
            _, identity = open_run(run_dir)
            self.stats[f"segments_{backend}"] = [path.name for path in segments_of_run(self.out, identity.run_id)]

    def stuck(self) -> None:
        """Rank 1 is busy elsewhere while rank 0 waits for it in a collective; half-way rank 0 is asked for whom."""
        watchdog = self.ranks.watchdog
        assert watchdog is not None
        reports: list[str] = []
        ask = threading.Timer(STUCK_S / 2, lambda: reports.append(watchdog.report()))
        with watchdog.doing("train"):
            if self.ranks.is_first:
                ask.start()
            else:
                time.sleep(STUCK_S)
            dist.all_reduce(torch.zeros(1))
        if self.ranks.is_first:
            ask.join()
        self.stats["stuck"] = reports

    def shards(self, name: str, policy: PolicyModel) -> None:
        """Each rank writes what it owns into one segment; nothing is gathered."""
        slots, sizes = lay_out(policy.weight_specs(), "float32", 2**16)
        path = self.out / f"segment_{name}"
        if self.ranks.is_first:
            Segment(path, sum(sizes), create=True)
        dist.barrier()
        buckets = SegmentReader(write=True).buckets(str(path), sizes)
        SendBuffer(slots, buckets, ()).fill_shards(policy.named_shards())
        dist.barrier()
        self.keep(f"shards_{name}", {slot.name: slot.view(buckets) for slot in slots})

    def load(self, name: str, directory: Path) -> None:
        policy, optimizer = self.learner(self.untied)
        latest = find_latest(directory).latest
        assert latest is not None
        load_checkpoint(latest, policy, optimizer)
        self.keep(name, everything(policy, optimizer))

    def checkpoints(self, of_one_rank: Path) -> None:
        policy, optimizer = self.learner(self.untied)
        for _ in range(2):
            self.step(
                "before_save", policy, optimizer, balance(random_samples(UNEVEN), 100, 2)[self.ranks.rank], decoupled_clip
            )
        save_checkpoint(self.out / "checkpoints", policy, optimizer, step=2, meta={"from": "two ranks"})
        self.keep("saved", everything(policy, optimizer))
        self.load("loaded", of_one_rank)
        file = self.out / "a_file"
        if self.ranks.is_first:
            file.write_text("")
        dist.barrier()
        try:
            save_checkpoint(file, policy, optimizer, step=3)
        except CheckpointError as error:
            (self.out / f"failed_save.{self.ranks.rank}").write_text(str(error))


def run_config(model: Path, run_dir: Path, world_size: int) -> RunConfig:
    trainer = TrainerConfig(
        world_size=world_size, max_tokens_per_micro_batch=64, learning_rate=1e-3, grad_clip=1e6, max_steps=10
    )
    return RunConfig(run_dir=run_dir, model=ModelConfig(path=model), trainer=trainer)


def logged_step(number: int) -> ComposedStep:
    return step_of(random_groups(3, seed=number), number=number)


def everything(policy: PolicyModel, optimizer: AdamW) -> dict[str, Tensor]:
    """Parameters and moments, whole. Every rank calls it."""
    state = dict(policy.named_full_tensors())
    for name, parameter in policy.hf.named_parameters():
        state.update({f"{name}.{key}": full_tensor(value) for key, value in optimizer.state[parameter].items()})
    return state


def main() -> None:
    out, untied, tied, of_one_rank = (Path(argument) for argument in sys.argv[1:])
    torch.set_num_threads(1)
    world_size = int(os.environ["WORLD_SIZE"])
    with joined_ranks(world_size, timeout_s=60) as ranks:
        program = Program(ranks, out, untied, tied)
        if world_size == 2:
            program.run(of_one_rank)
        else:  # only load what two ranks have saved
            program.load("loaded", out / "checkpoints")
            program.load("loaded_copies", out / "of_copies")
        if ranks.is_first:
            save_file(program.tensors, out / f"tensors{world_size}.safetensors")
            (out / f"stats{world_size}.json").write_text(json.dumps(program.stats))


if __name__ == "__main__":
    main()
