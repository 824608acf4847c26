"""Every backend's two ends, and what is said where one cannot run."""

from __future__ import annotations

from pathlib import Path
from typing import get_args

import pytest
import torch

from async_rl.config.trainer import WeightsConfig
from async_rl.errors import ConfigError
from async_rl.registry.versions import PushPlan
from async_rl.testing.push_targets import TinyPolicy
from async_rl.weights.backends import make_receiver, make_sender
from async_rl.weights.collective_backend import CollectiveReceiver, CollectiveSender
from async_rl.weights.rates import memcpy_bytes_per_s
from async_rl.weights.send_buffer import SendBuffer, named_weights


@pytest.mark.parametrize("backend", get_args(WeightsConfig.model_fields["backend"].annotation))
def test_every_backend_has_two_ends_that_close(backend: str, tmp_path: Path) -> None:
    config = WeightsConfig(backend=backend)
    sender, receiver = make_sender(config, tmp_path), make_receiver(config)
    assert bool(sender.address) == (backend in ("gloo", "nccl"))
    for end in (sender, receiver):
        end.reset()
        end.close()


def test_gloo_and_nccl_share_everything_but_the_transport(tmp_path: Path) -> None:
    ends = [
        (make_sender(WeightsConfig(backend=b), tmp_path), make_receiver(WeightsConfig(backend=b))) for b in ("gloo", "nccl")
    ]
    assert {type(sender) for sender, _ in ends} == {CollectiveSender}
    assert {type(receiver) for _, receiver in ends} == {CollectiveReceiver}


@pytest.mark.skipif(torch.cuda.is_available(), reason="it works there")
def test_nccl_without_a_gpu_says_what_to_use(tmp_path: Path) -> None:
    sender = make_sender(WeightsConfig(backend="nccl"), tmp_path)
    plan = PushPlan(1, 1, 1, ("a",), sender.address, 30.0, 0.0)
    with pytest.raises(ConfigError, match="CUDA build"):
        sender.send(plan, SendBuffer.copy_from(named_weights(TinyPolicy(1))[0], "float32"))


def test_the_limit_is_a_rate() -> None:
    assert memcpy_bytes_per_s(2**20) > 1e6
