"""bfloat16 against float32 on a small model: logprobs, loss and gradient norm within the documented tolerance."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from async_rl.algorithms.losses import LOSSES, ClipRange, LossSettings
from async_rl.testing.batches import group_samples
from async_rl.testing.tiny_models import TinyModel, save_tiny_model
from async_rl.trainer.architecture import output_head
from async_rl.trainer.distributed import joined_ranks
from async_rl.trainer.packing import pack
from async_rl.trainer.policy import PolicyOptions, load_policy, shard_policy
from async_rl.trainer.step import StepSettings, StepStats, make_optimizer, policy_logprobs, train_step

LOGPROB_MEAN, LOGPROB_MAX = 0.02, 0.15
"""|bfloat16 − float32|, nats."""
LOSS_RELATIVE, NORM_RELATIVE = 0.02, 0.03


@pytest.mark.parametrize("name", ["decoupled_clip", "gspo"])
def test_a_step_in_bfloat16_stays_near_float32(name: str, tmp_path: Path) -> None:
    directory = save_tiny_model(tmp_path, TinyModel.LLAMA_TIED, sharpness=2.0)
    micro_batches = pack(group_samples([9, 12], [[20, 14, 17], [30, 8]]), 1000, share_prompts=True)
    settings = StepSettings(LOSSES[name], LossSettings(ClipRange(0.2, 0.28)))
    logprobs, stats = [], []
    with joined_ranks() as ranks:
        for dtype in (torch.float32, torch.bfloat16):
            policy = load_policy(directory, options=PolicyOptions(dtype=dtype))
            shard_policy(policy, ranks.mesh)
            assert output_head(policy.hf).weight.dtype == torch.float32  # the head's master weights, like all
            own = policy_logprobs(policy, micro_batches)
            assert own[0].dtype == torch.float32
            logprobs.append(own[0][micro_batches[0].loss_mask])
            optimizer = make_optimizer(policy, learning_rate=1e-3)
            stats.append(train_step(policy, optimizer, micro_batches, settings=settings, learning_rate=1e-3))
    gap = (logprobs[0] - logprobs[1]).abs()
    assert 0 < float(gap.mean()) <= LOGPROB_MEAN
    assert float(gap.max()) <= LOGPROB_MAX
    exact, rounded = stats
    assert _apart(exact.loss, rounded.loss) <= LOSS_RELATIVE, (exact.loss, rounded.loss)
    assert _apart(exact.grad_norm, rounded.grad_norm) <= NORM_RELATIVE, _norms(stats)


def _apart(one: float, other: float) -> float:
    return abs(one - other) / max(abs(one), abs(other))


def _norms(stats: list[StepStats]) -> list[float]:
    return [one.grad_norm for one in stats]
