"""The canary: the same weights on both sides, and what an engine that computes with something else shows."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch

from async_rl.errors import ProofFailed
from async_rl.testing.push_targets import FaultyEngine, TinyEngine, TinyPolicy, tiny_probe
from async_rl.weights.canary import CANARY_VERSION, CanaryTensors, canary_scale, canary_tensor, try_canary
from async_rl.weights.manifest import Canary, Manifest, Tolerance, bucket_views
from async_rl.weights.send_buffer import SendBuffer, named_weights


def canary_of(model: TinyPolicy) -> Canary:
    """As a trainer makes it."""
    named, _, _ = named_weights(model)
    scales = {name: canary_scale(tensor) for name, tensor in named if tensor.is_floating_point()}
    made = TinyPolicy(0)
    state = made.state_dict()
    for name, tensor in named:
        value = tensor if name not in scales else canary_tensor(name, tuple(tensor.shape), scales[name], 5, torch.float32)
        state[name].copy_(value)
    return Canary(5, scales, tiny_probe(made), Tolerance(1e-4))


def push(model: TinyPolicy) -> tuple[Manifest, dict[str, torch.Tensor]]:
    named, ties, buffers = named_weights(model)
    sent = SendBuffer.copy_from(named, "float32", ties=ties, buffer_names=buffers)
    manifest = sent.manifest(
        epoch=1, version=3, probe=tiny_probe(model), tolerance=Tolerance(1e-4), canary=canary_of(TinyPolicy(1))
    )
    return manifest, bucket_views(manifest, sent.buckets)


def test_a_canary_tensor_is_a_function_of_seed_and_name_with_the_mean_and_spread_that_were_asked_for() -> None:
    tensor = canary_tensor("a", (200, 50), (0.5, 0.25), 1, torch.float32)
    assert torch.equal(tensor, canary_tensor("a", (200, 50), (0.5, 0.25), 1, torch.float32))
    assert not torch.equal(tensor, canary_tensor("b", (200, 50), (0.5, 0.25), 1, torch.float32))
    assert not torch.equal(tensor, canary_tensor("a", (200, 50), (0.5, 0.25), 2, torch.float32))
    # of 10,000 uniform numbers: the mean to 0.25/100, the standard deviation to about that
    assert float(tensor.mean()) == pytest.approx(0.5, abs=0.01)
    assert float(tensor.std()) == pytest.approx(0.25, abs=0.01)
    assert canary_tensor("a", (2,), (0.5, 0.25), 1, torch.bfloat16).dtype is torch.bfloat16


def test_the_bits_of_a_canary_tensor_do_not_change_between_releases_and_machines() -> None:
    found = canary_tensor("model.norm.weight", (3,), (0.0, 1.0), 0, torch.float32)
    np.testing.assert_array_equal(found.numpy(), np.array([0.092042491, -1.609362364, -0.650426507], dtype=np.float32))


def test_constant_vectors_get_a_spread_of_their_own() -> None:
    assert canary_scale(torch.zeros(8)) == (0.0, 1.0)  # a bias at its start
    assert canary_scale(torch.full((8,), 3.0)) == (3.0, 1.5)
    assert canary_scale(torch.tensor([[1.0, 3.0], [1.0, 3.0]])) == (2.0, 2.0)  # twice the standard deviation of 1
    assert canary_scale(torch.zeros(0, 4))[1] > 0


def test_integers_stay_as_they_were_received() -> None:
    manifest, received = push(TinyPolicy(3))
    assert manifest.canary is not None
    tensors = CanaryTensors(manifest, manifest.canary, received)
    assert set(tensors) == set(received)
    assert len(tensors) == len(received)
    assert torch.equal(tensors["steps"], received["steps"])
    assert not torch.equal(tensors["mix.weight"], received["mix.weight"])


async def test_an_honest_engine_passes_whatever_version_comes_with_it_and_holds_no_version_that_could_be_served() -> None:
    manifest, received = push(TinyPolicy(3))
    engine = TinyEngine(TinyPolicy(9))
    await try_canary(manifest, engine, received)
    assert engine.history == [f"swap {CANARY_VERSION}"]
    assert CANARY_VERSION < 0


async def test_an_engine_that_computes_with_an_old_head_is_found() -> None:
    manifest, received = push(TinyPolicy(3))
    engine = FaultyEngine(TinyPolicy(9), fault="stale_head", at_version=CANARY_VERSION)
    with pytest.raises(ProofFailed, match=r"canary: engine and trainer differ by .* a copy of a tensor"):
        await try_canary(manifest, engine, received)


async def test_a_manifest_without_a_canary_tries_nothing() -> None:
    manifest, received = push(TinyPolicy(3))
    engine = TinyEngine(TinyPolicy(9))
    await try_canary(replace(manifest, canary=None), engine, received)
    assert engine.history == []
