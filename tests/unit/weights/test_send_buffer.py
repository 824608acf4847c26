"""The flat send buffer."""

from __future__ import annotations

import weakref
from collections.abc import Iterator

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from async_rl.errors import ManifestMismatch
from async_rl.testing.push_targets import TinyPolicy, tiny_probe
from async_rl.weights import copies
from async_rl.weights.manifest import Tolerance, bucket_views, check_layout, tensor_digest
from async_rl.weights.send_buffer import SendBuffer, SendBufferPool, TensorSpec, named_weights

DTYPES = [torch.float32, torch.float64, torch.bfloat16, torch.int64, torch.uint8, torch.bool]
SHAPES = st.lists(st.integers(0, 5), max_size=3).map(tuple)


@given(
    tensors=st.lists(st.tuples(SHAPES, st.sampled_from(DTYPES)), min_size=1, max_size=8),
    wire=st.sampled_from(["float32", "bfloat16"]),
    bucket_bytes=st.integers(1, 300),
)
@settings(max_examples=60, deadline=None)
def test_any_tensors_come_back_equal_after_the_cast(
    tensors: list[tuple[tuple[int, ...], torch.dtype]], wire: str, bucket_bytes: int
) -> None:
    named = [(f"t{i}", (100 * torch.rand(shape)).to(dtype)) for i, (shape, dtype) in enumerate(tensors)]
    buffer = SendBuffer.copy_from(named, wire, bucket_bytes=bucket_bytes)
    manifest = buffer.manifest(epoch=1, version=1, probe=tiny_probe(TinyPolicy(1)), tolerance=Tolerance(1e-4))
    check_layout(manifest)
    views = bucket_views(manifest, buffer.buckets)
    for (name, tensor), entry in zip(named, manifest.entries, strict=True):
        expected = tensor.to(getattr(torch, wire)) if tensor.is_floating_point() else tensor
        assert views[name].dtype == expected.dtype
        assert torch.equal(views[name], expected)
        assert entry.digest == tensor_digest(expected)
        assert (entry.name, entry.shape) == (name, tuple(tensor.shape))


def test_buckets_close_before_they_grow_too_large_and_a_large_tensor_has_one_of_its_own() -> None:
    named = [("a", torch.zeros(10)), ("b", torch.zeros(5)), ("c", torch.zeros(100)), ("d", torch.zeros(1))]
    buffer = SendBuffer.copy_from(named, "float32", bucket_bytes=80)
    # 40 bytes take 48 with alignment, 20 take 32: 80 together; 400; 4 take 16
    assert [len(bucket) for bucket in buffer.buckets] == [80, 400, 16]
    assert [(slot.bucket, slot.offset) for slot in buffer.slots] == [(0, 0), (0, 48), (1, 0), (2, 0)]


def test_a_snapshot_is_isolated_from_what_training_does_next() -> None:
    model = TinyPolicy(1)
    named, ties, buffers = named_weights(model)
    buffer = SendBuffer.copy_from(named, "float32", ties=ties, buffer_names=buffers)
    before = [entry.digest for entry in buffer.entries()]
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(1)
        model.steps += 1
    assert [entry.digest for entry in buffer.entries()] == before


def test_a_model_is_named_once_with_its_ties_and_buffers() -> None:
    named, ties, buffers = named_weights(TinyPolicy(1))
    assert [name for name, _ in named] == ["scale", "steps", "embed.weight", "mix.weight", "mix.bias"]
    assert ties == (("head.weight", "embed.weight"),)
    assert buffers == {"scale", "steps"}
    named, ties, _ = named_weights(TinyPolicy(1, tied=False))
    assert "head.weight" in dict(named)
    assert ties == ()


def test_the_pool_uses_released_memory_again_and_no_other() -> None:
    pool = SendBufferPool("float32", 2**16)
    named, ties, buffers = named_weights(TinyPolicy(1))
    first = pool.copy_from(named, ties=ties, buffer_names=buffers)
    second = pool.copy_from(named, ties=ties, buffer_names=buffers)
    assert second.buckets[0].data_ptr() != first.buckets[0].data_ptr()
    first.release()
    newer = TinyPolicy(2)
    third = pool.copy_from(named_weights(newer)[0], ties=ties, buffer_names=buffers)
    assert third.buckets[0].data_ptr() == first.buckets[0].data_ptr()
    assert {entry.name: entry.digest for entry in third.entries()}["mix.bias"] == tensor_digest(newer.mix.bias)
    assert third.ties == ties
    assert [slot.name for slot in third.slots if slot.is_buffer] == ["scale", "steps"]


@pytest.mark.parametrize("threads", [1, 2])
def test_what_was_gathered_is_let_go_on_the_way(threads: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(copies, "PIECE", 8)
    monkeypatch.setattr(copies, "MAX_PENDING", 2)
    monkeypatch.setattr(copies.Copies.__init__, "__defaults__", (threads,))
    alive: weakref.WeakSet[torch.Tensor] = weakref.WeakSet()
    most = 0

    def gather() -> Iterator[tuple[str, torch.Tensor]]:
        nonlocal most
        for i in range(40):
            tensor = torch.full((8,), 10.0 * i)
            alive.add(tensor)
            most = max(most, len(alive))
            yield f"t{i}", tensor

    buffer = SendBuffer.copy_from([(f"t{i}", torch.zeros(8)) for i in range(40)], "float32", bucket_bytes=64)
    buffer.fill(gather())
    assert [float(slot.view(buffer.buckets)[0]) for slot in buffer.slots] == [10.0 * i for i in range(40)]
    assert most <= 2 + threads + 2  # waiting, being copied, at hand and just made
    assert buffer.seconds == buffer.gather_s + buffer.cast_s


def test_shards_of_several_ranks_make_the_whole_snapshot() -> None:
    whole = torch.arange(7 * 3, dtype=torch.float32).reshape(7, 3)
    pool = SendBufferPool("bfloat16", 2**16)
    buffer = pool.take([TensorSpec("w", (7, 3), torch.float32), TensorSpec("b", (5,), torch.float32)])
    buffer.fill_shards([("w", whole[:4], 0), ("b", torch.ones(3), 0)])
    buffer.fill_shards([("w", whole[4:], 4 * 3), ("b", torch.full((2,), 2.0), 3), ("b", torch.zeros(0), 5)])
    views = [slot.view(buffer.buckets) for slot in buffer.slots]
    assert torch.equal(views[0], whole.to(torch.bfloat16))
    assert views[1].tolist() == [1, 1, 1, 2, 2]


def test_names_and_shapes_must_fit_the_layout() -> None:
    buffer = SendBuffer.copy_from([("a", torch.zeros(2)), ("b", torch.zeros(3))], "float32")
    with pytest.raises(ManifestMismatch, match="b first"):
        buffer.fill([("a", torch.zeros(2))])
    with pytest.raises(ManifestMismatch, match="no tensor of that name"):
        buffer.fill([("c", torch.zeros(2))])
    with pytest.raises(ManifestMismatch, match=r"a of shape \(2,\)"):
        buffer.fill([("a", torch.zeros(3))])
    with pytest.raises(ManifestMismatch, match="a comes twice"):
        SendBuffer.copy_from([("a", torch.zeros(2)), ("a", torch.zeros(2))], "float32")
    with pytest.raises(ManifestMismatch, match="complex64"):
        SendBuffer.copy_from([("a", torch.zeros(2, dtype=torch.complex64))], "float32")
