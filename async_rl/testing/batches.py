"""Training samples and a loss with known values, for tests of whoever trains or packs."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor
from torch.optim import AdamW

from async_rl.algorithms.losses import LossOutput, LossSettings, LossStats, LossTokens
from async_rl.trainer.policy import PolicyModel
from async_rl.trainer.samples import TrainingSample
from async_rl.trainer.sharding import full_tensor


def make_sample(
    token_ids: Sequence[int],
    *,
    trained: Sequence[int] | None = None,
    advantages: float | Sequence[float] = 1.0,
    behavior_logprob: float = -3.0,
    temperature: float = 1.0,
    task_id: str = "test",
    member: int = 0,
) -> TrainingSample:
    """Return a sample whose tokens at the positions `trained` (default: all but the first) are trained.

    advantages: one number, or one per trained token.
    """
    positions = np.arange(1, len(token_ids)) if trained is None else np.asarray(trained, dtype=np.int64)
    loss_mask = np.zeros(len(token_ids), dtype=bool)
    loss_mask[positions] = True
    credit = np.zeros(len(token_ids), dtype=np.float32)
    credit[positions] = advantages
    return TrainingSample(
        token_ids=np.asarray(token_ids, dtype=np.int32),
        loss_mask=loss_mask,
        behavior_logprobs=np.where(loss_mask, behavior_logprob, 0.0).astype(np.float32),
        advantages=credit,
        lags=np.zeros(len(token_ids), dtype=np.int32),
        temperature=temperature,
        task_id=task_id,
        member=member,
    )


def random_samples(lengths: Sequence[int], *, seed: int = 0, vocab_size: int = 22) -> list[TrainingSample]:
    """Return samples of random tokens and advantages; the second half of each is trained."""
    rng = np.random.default_rng(seed)
    samples = []
    for length in lengths:
        trained = range(max(1, length // 2), length)
        credit = rng.normal(size=len(trained)).tolist()
        samples.append(make_sample(rng.integers(0, vocab_size, length).tolist(), trained=trained, advantages=credit))
    return samples


def group_samples(
    prompt_lengths: Sequence[int], completion_lengths: Sequence[Sequence[int]], *, seed: int = 0, vocab_size: int = 22
) -> list[TrainingSample]:
    """Return samples of groups: per group a random prompt, and per member a random completion that is trained."""
    rng = np.random.default_rng(seed)
    samples = []
    for task, (prompt_length, lengths) in enumerate(zip(prompt_lengths, completion_lengths, strict=True)):
        prompt = rng.integers(0, vocab_size, prompt_length).tolist()
        for member, length in enumerate(lengths):
            ids = prompt + rng.integers(0, vocab_size, length).tolist()
            trained, credit = range(prompt_length, prompt_length + length), rng.normal(size=length).tolist()
            samples.append(make_sample(ids, trained=trained, advantages=credit, task_id=f"test:{task}", member=member))
    return samples


def credit_loss(tokens: LossTokens, settings: LossSettings) -> LossOutput:
    """Return the advantage of each trained token, with gradient advantage · ∂logprob: its value is known without a model."""
    one = 1.0 + tokens.policy_logprobs - tokens.policy_logprobs.detach()
    losses: Tensor = torch.where(tokens.loss_mask, tokens.advantages * one, 0.0)
    return LossOutput(losses, LossStats.zeros(losses.device))


def first_step_gradients(policy: PolicyModel, optimizer: AdamW) -> dict[str, Tensor]:
    """Return the (clipped) gradient of an optimizer's first step, whole, by name: its first moment is (1 − β₁) times that."""
    beta = float(optimizer.param_groups[0]["betas"][0])
    return {
        name: full_tensor(optimizer.state[parameter]["exp_avg"]) / (1 - beta)
        for name, parameter in policy.hf.named_parameters()
    }
