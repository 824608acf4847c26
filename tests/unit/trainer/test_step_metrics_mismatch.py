"""Recorded logprobs that do not belong to their tokens are seen where policy and behavior are one number."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch

from async_rl.algorithms.losses import LOSSES, ClipRange, LossSettings
from async_rl.testing.tiny_models import save_tiny_model
from async_rl.trainer.packing import pack
from async_rl.trainer.policy import load_policy
from async_rl.trainer.samples import TrainingSample
from async_rl.trainer.step import StepSettings, make_optimizer, train_step
from async_rl.trainer.step_metrics import logprob_mismatch, step_stats_metrics

TOLERANCE = 1e-4


@pytest.mark.parametrize(("shift", "caught"), [(0, False), (1, True), (-1, True)])
def test_a_list_of_logprobs_shifted_by_one_is_caught_on_policy(tmp_path: Path, shift: int, caught: bool) -> None:
    policy = load_policy(save_tiny_model(tmp_path / "model", sharpness=4.0))
    ids = np.array([3, 7, 11, 5, 9, 13, 4, 8], dtype=np.int32)
    own = policy.score([ids.tolist()], temperature=1.0)[0]
    assert len(set(np.round(own, 3))) == len(own)  # a distinct logprob at each position
    behavior = np.concatenate(([0.0], np.roll(own, shift))).astype(np.float32)
    mask = np.arange(len(ids)) > 0
    sample = TrainingSample(ids, mask, behavior, mask.astype(np.float32), np.zeros(8, np.int32), 1.0, "t", 0)
    settings = StepSettings(LOSSES["decoupled_clip"], LossSettings(ClipRange(0.2, 0.28)))
    optimizer = make_optimizer(policy, learning_rate=1e-3)
    stats = train_step(policy, optimizer, pack([sample], 64), settings=settings, learning_rate=1e-3)
    line = {"skip_reason": None, **step_stats_metrics(stats)}
    mismatch = logprob_mismatch(line, tolerance=TOLERANCE)
    assert (mismatch is not None) is caught
    if caught:
        expected = torch.from_numpy(np.abs(own - np.roll(own, shift))).max()
        assert mismatch == pytest.approx(float(expected), abs=1e-5)


def test_tokens_of_older_versions_and_steps_without_an_update_are_not_judged() -> None:
    assert logprob_mismatch({"skip_reason": None, "same_version_gap_max": None}, tolerance=TOLERANCE) is None
    assert logprob_mismatch({"skip_reason": "no_tokens", "same_version_gap_max": 3.0}, tolerance=TOLERANCE) is None
