"""Every tensor of a push comes once and equal after the cast: of a sharded model with buffers that change, a parameter that
FSDP does not shard, and a tied head."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from torch import nn
from torch.distributed.fsdp import fully_shard

from async_rl.model.attention import PACKED
from async_rl.testing.tiny_models import TinyModel, make_tiny_model
from async_rl.trainer.distributed import joined_ranks
from async_rl.trainer.policy import PolicyModel
from async_rl.trainer.sharding import decoder_layers
from async_rl.weights.send_buffer import SendBuffer, lay_out


@pytest.fixture
def policy() -> Iterator[PolicyModel]:
    """Sharded, all but `temperature`; `calls` and `mean` are state that a forward pass would change, `scratch` is none."""
    hf = make_tiny_model(TinyModel.LLAMA_TIED, attn_implementation=PACKED)
    base = hf.base_model
    base.register_parameter("temperature", nn.Parameter(torch.linspace(0.1, 0.7, 7)))
    base.register_buffer("mean", torch.tensor([1.0, 2.5, -3.25]))
    base.register_buffer("calls", torch.tensor(0, dtype=torch.int64))
    base.register_buffer("scratch", torch.zeros(5), persistent=False)
    policy = PolicyModel(hf)
    with joined_ranks() as ranks:
        for layer in decoder_layers(hf):
            fully_shard(layer, mesh=ranks.mesh)
        fully_shard(policy, mesh=ranks.mesh, ignored_params={base.get_parameter("temperature")})
        policy.mesh = ranks.mesh
        yield policy


def test_a_push_holds_every_tensor_as_it_is_now_whether_gathered_or_written_shard_by_shard(policy: PolicyModel) -> None:
    expected = {name: tensor.clone() for name, tensor in policy.named_full_tensors()}
    base = policy.hf.base_model
    base.get_buffer("mean").mul_(3.0)
    base.get_buffer("calls").add_(41)
    expected |= {"model.mean": torch.tensor([3.0, 7.5, -9.75]), "model.calls": torch.tensor(41)}
    slots, sizes = lay_out(policy.weight_specs(), "bfloat16", 4096)
    gathered, written = (
        SendBuffer(slots, tuple(torch.zeros(size, dtype=torch.uint8) for size in sizes), policy.ties()) for _ in range(2)
    )
    gathered.fill(policy.named_full_tensors())
    written.fill_shards(policy.named_shards())
    for buffer in (gathered, written):
        held = {slot.name: slot.view(buffer.buckets) for slot in buffer.slots}
        assert held.keys() == expected.keys()
        for name, tensor in held.items():
            wire = expected[name].to(torch.bfloat16) if expected[name].is_floating_point() else expected[name]
            assert torch.equal(tensor, wire), name


def test_names_are_accounted_for_once(policy: PolicyModel) -> None:
    specs = {spec.name: spec for spec in policy.weight_specs()}
    assert policy.ties() == (("lm_head.weight", "model.embed_tokens.weight"),)
    assert "lm_head.weight" not in specs
    assert "model.temperature" in specs
    assert "model.scratch" not in specs
    assert {name for name, spec in specs.items() if spec.is_buffer} == {"model.mean", "model.calls"}
    assert specs.keys() | {"lm_head.weight"} == set(policy.hf.state_dict())
