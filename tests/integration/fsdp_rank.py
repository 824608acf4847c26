"""One rank of test_fsdp_ranks.py, started by torchrun's environment: runs every scenario, rank 0 writes what came out.

usage: fsdp_rank.py OUT UNTIED_MODEL TIED_MODEL CHECKPOINTS_OF_ONE_RANK
"""

from __future__ import annotations

import json
import math
import os
import sys
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path

import torch
import torch.distributed as dist
from safetensors.torch import save_file
from torch import Tensor
from torch.optim import AdamW

from async_rl.algorithms.aggregation import TOKEN_MEAN, Aggregation
from async_rl.algorithms.gspo import gspo
from async_rl.algorithms.losses import ClipRange, LossFn, LossSettings, decoupled_clip
from async_rl.errors import CheckpointError, ShapeError
from async_rl.testing.batches import credit_loss, first_step_gradients, group_samples, make_sample, random_samples
from async_rl.trainer.checkpoint import find_latest, load_checkpoint, save_checkpoint
from async_rl.trainer.distributed import Ranks, joined_ranks
from async_rl.trainer.packing import MicroBatch, balance, filler_micro_batch, pack
from async_rl.trainer.policy import PolicyModel, PolicyOptions, full_tensor, load_policy
from async_rl.trainer.step import StepSettings, StepStats, make_optimizer, policy_logprobs, train_step

LOSS = LossSettings(ClipRange(0.2, 0.28))
A = make_sample([3, 4, 5], trained=[2], advantages=8.0)
B = make_sample([6, 7, 8, 9], advantages=2.0)
PROMPTS, COMPLETIONS = [7, 12, 4], [[5, 9, 1], [3, 3, 14, 6], [8]]
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
            for max_tokens in (1000, 60, 30):
                cut = balance(groups, max_tokens, 2, share_prompts=True)
                self.gradients(f"{name}_{max_tokens}", self.tied, cut, gspo, aggregation=Aggregation(name))
        self.gradients("one_group", self.tied, balance(groups[:3], 1000, 2, share_prompts=True), gspo)
        self.skips()
        self.unequal_counts()
        self.weights_and_scores()
        self.checkpoints(checkpoints_of_one_rank)

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
            self.stats[f"ties_{name}"] = policy.ties()

    def checkpoints(self, of_one_rank: Path) -> None:
        policy, optimizer = self.learner(self.untied)
        for _ in range(2):
            self.step(
                "before_save", policy, optimizer, balance(random_samples(UNEVEN), 100, 2)[self.ranks.rank], decoupled_clip
            )
        save_checkpoint(self.out / "checkpoints", policy, optimizer, step=2, meta={"from": "two ranks"})
        self.keep("saved", everything(policy, optimizer))
        loaded, other = self.learner(self.untied)
        latest = find_latest(of_one_rank).latest
        assert latest is not None
        load_checkpoint(latest, loaded, other)
        self.keep("loaded", everything(loaded, other))
        file = self.out / "a_file"
        if self.ranks.is_first:
            file.write_text("")
        dist.barrier()
        try:
            save_checkpoint(file, policy, optimizer, step=3)
        except CheckpointError as error:
            (self.out / f"failed_save.{self.ranks.rank}").write_text(str(error))


def everything(policy: PolicyModel, optimizer: AdamW) -> dict[str, Tensor]:
    """Parameters and moments, whole. Every rank calls it."""
    state = dict(policy.named_full_tensors())
    for name, parameter in policy.hf.named_parameters():
        state.update({f"{name}.{key}": full_tensor(value) for key, value in optimizer.state[parameter].items()})
    return state


def main() -> None:
    out, untied, tied, of_one_rank = (Path(argument) for argument in sys.argv[1:])
    torch.set_num_threads(1)
    with joined_ranks(int(os.environ["WORLD_SIZE"]), timeout_s=60) as ranks:
        program = Program(ranks, out, untied, tied)
        program.run(of_one_rank)
        if ranks.is_first:
            save_file(program.tensors, out / "tensors.safetensors")
            (out / "stats.json").write_text(json.dumps(program.stats))


if __name__ == "__main__":
    main()
