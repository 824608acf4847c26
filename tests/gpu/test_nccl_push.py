"""A push from one GPU to another over NCCL, through the same sender and receiver as over Gloo. Needs two GPUs.

python -m pytest tests/gpu -m gpu
"""

from __future__ import annotations

import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch

from async_rl.errors import WeightPushError
from async_rl.registry.versions import PushPlan
from async_rl.testing.push_targets import TinyPolicy, tiny_probe
from async_rl.weights.collective_backend import CollectiveReceiver, CollectiveSender
from async_rl.weights.manifest import Tolerance, decode_manifest, encode_manifest
from async_rl.weights.send_buffer import SendBuffer, named_weights
from async_rl.weights.transports import NCCL

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(torch.cuda.device_count() < 2, reason="NCCL needs a GPU per rank: two here"),
]
TIMEOUT_S = 30.0


def plan(address: str, generation: int = 1) -> PushPlan:
    return PushPlan(1, 1, generation, ("a",), address, TIMEOUT_S, 0.0)


def receive(directory: Path, address: str) -> None:
    """The receiver's process: writes what it holds."""
    torch.cuda.set_device(1)
    receiver = CollectiveReceiver(timeout_s=TIMEOUT_S, transport=NCCL)
    manifest = decode_manifest((directory / "manifest").read_bytes())
    tensors = receiver.receive(plan(address), "a", manifest)
    torch.save({name: tensor.cpu() for name, tensor in tensors.items()}, directory / "received.pt")
    receiver.close()


def test_a_push_over_nccl_arrives_bit_for_bit(tmp_path: Path) -> None:
    torch.cuda.set_device(0)
    model = TinyPolicy(3)
    named, ties, buffers = named_weights(model)
    sent = SendBuffer.copy_from(named, "bfloat16", ties=ties, buffer_names=buffers)
    manifest = sent.manifest(epoch=1, version=1, probe=tiny_probe(model), tolerance=Tolerance(1e-2))
    (tmp_path / "manifest").write_bytes(encode_manifest(manifest))
    sender = CollectiveSender(host="127.0.0.1", timeout_s=TIMEOUT_S, transport=NCCL)
    child = subprocess.Popen([sys.executable, __file__, str(tmp_path), sender.address])
    try:
        sender.send(plan(sender.address), sent)
        assert child.wait(TIMEOUT_S) == 0
    finally:
        child.kill()
        sender.close()
    received = torch.load(tmp_path / "received.pt", weights_only=True)
    for slot in sent.slots:
        assert torch.equal(received[slot.name], slot.view(sent.buckets)), slot.name


def test_a_receiver_that_never_comes_costs_the_timeout_and_no_more() -> None:
    torch.cuda.set_device(0)
    sender = CollectiveSender(host="127.0.0.1", timeout_s=3.0, transport=NCCL)
    named, ties, _ = named_weights(TinyPolicy(3))
    started = time.monotonic()
    with pytest.raises(WeightPushError):
        sender.send(plan(sender.address, generation=2), SendBuffer.copy_from(named, "bfloat16", ties=ties))
    assert time.monotonic() - started < 10
    sender.close()


if __name__ == "__main__":
    receive(Path(sys.argv[1]), sys.argv[2])
