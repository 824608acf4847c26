"""Manifest: digests, names, layout, encoding."""

from __future__ import annotations

from dataclasses import replace

import msgpack
import numpy as np
import pytest
import torch
import xxhash

from async_rl.errors import ManifestMismatch
from async_rl.weights.manifest import (
    Canary,
    Manifest,
    Probe,
    TensorEntry,
    Tolerance,
    check_layout,
    check_names,
    decode_manifest,
    encode_manifest,
    tensor_digest,
)

CANARY_PROBE = Probe((np.array([4, 5], dtype=np.int32),), (np.array([-2.0], dtype=np.float32),), 1.0)
CANARY = Canary(5, {"a": (0.5, 0.25)}, CANARY_PROBE, Tolerance(0.5))
PROBE = Probe((np.array([1, 2, 3], dtype=np.int32),), (np.array([-0.5, -1.25], dtype=np.float32),), 0.7)


def entry(name: str, shape: tuple[int, ...], *, offset: int = 0, bucket: int = 0, dtype: str = "float32") -> TensorEntry:
    return TensorEntry(name, shape, dtype, bucket, offset, "00")


def manifest(*entries: TensorEntry, sizes: tuple[int, ...] = (256,), ties: tuple[tuple[str, str], ...] = ()) -> Manifest:
    return Manifest(2, 7, entries, sizes, ties, PROBE, Tolerance(1e-4), canary=CANARY, path="/somewhere")


def test_a_digest_is_of_the_bytes_that_go_over_the_wire() -> None:
    assert tensor_digest(torch.tensor([1.0, -2.0])) == xxhash.xxh3_64_hexdigest(np.array([1, -2], dtype="<f4").tobytes())
    assert tensor_digest(torch.tensor([[1, 2], [3, 4]]).t()) == xxhash.xxh3_64_hexdigest(
        np.array([1, 3, 2, 4], "<i8").tobytes()
    )
    # bfloat16 1.0 is 0x3f80, −2.0 is 0xc000
    assert tensor_digest(torch.tensor([1.0, -2.0], dtype=torch.bfloat16)) == xxhash.xxh3_64_hexdigest(b"\x80\x3f\x00\xc0")
    assert tensor_digest(torch.tensor(True)) == xxhash.xxh3_64_hexdigest(b"\x01")
    assert tensor_digest(torch.zeros(0, 3)) == xxhash.xxh3_64_hexdigest(b"")
    assert tensor_digest(torch.ones(2, requires_grad=True)) == tensor_digest(torch.ones(2))


@pytest.mark.parametrize("bit", [0, 7, 15])
def test_a_digest_sees_one_bit(bit: int) -> None:
    tensor = torch.arange(100).to(torch.bfloat16)
    before = tensor_digest(tensor)
    tensor.view(torch.int16)[41] ^= 1 << bit if bit < 15 else -(2**15)
    assert tensor_digest(tensor) != before


def test_a_manifest_survives_its_encoding() -> None:
    sent = manifest(entry("a", (2, 3)), entry("b", (), offset=32, dtype="int64"), ties=(("head", "a"),))
    got = decode_manifest(encode_manifest(sent))
    assert (got.epoch, got.version, got.tolerance, got.path) == (2, 7, Tolerance(1e-4), "/somewhere")
    assert got.canary is not None
    assert (got.canary.seed, got.canary.scales, got.canary.tolerance) == (5, {"a": (0.5, 0.25)}, Tolerance(0.5))
    np.testing.assert_array_equal(got.canary.probe.logprobs[0], CANARY_PROBE.logprobs[0])
    assert (got.entries, got.bucket_bytes, got.ties) == (sent.entries, (256,), (("head", "a"),))
    assert got.probe.temperature == 0.7
    np.testing.assert_array_equal(got.probe.sequences[0], PROBE.sequences[0])
    np.testing.assert_array_equal(got.probe.logprobs[0], PROBE.logprobs[0])


@pytest.mark.parametrize("data", [b"", b"\xc1", b"garbage", msgpack.packb({"schema": 2}), msgpack.packb([1, 2])])
def test_what_is_not_a_manifest_is_refused(data: bytes) -> None:
    with pytest.raises(ManifestMismatch, match="not a manifest"):
        decode_manifest(data)


def test_an_unknown_schema_is_refused_by_number() -> None:
    body = msgpack.unpackb(encode_manifest(manifest(entry("a", (1,)))))
    with pytest.raises(ManifestMismatch, match="schema 9"):
        decode_manifest(msgpack.packb({**body, "schema": 9}))


@pytest.mark.parametrize(
    ("entries", "message"),
    [
        ((entry("a", (60,), offset=32),), "do not fit"),  # 240 bytes from 32 end at 272 of 256
        ((entry("a", (4,)), entry("b", (4,), offset=8)), "aligned"),
        ((entry("a", (8,)), entry("b", (4,), offset=16)), "overlap"),
        ((entry("a", (4,), bucket=1),), "bucket 1"),
        ((entry("a", (4,), dtype="complex64"),), "complex64"),
        ((entry("a", (4,)), entry("a", (4,), offset=16)), "twice"),
    ],
)
def test_an_impossible_layout_is_refused(entries: tuple[TensorEntry, ...], message: str) -> None:
    with pytest.raises(ManifestMismatch, match=message):
        check_layout(manifest(*entries))


def test_a_tie_needs_an_owner_that_is_sent() -> None:
    check_layout(manifest(entry("a", (4,)), ties=(("b", "a"),)))
    with pytest.raises(ManifestMismatch, match="head"):
        check_layout(manifest(entry("a", (4,)), ties=(("head", "z"),)))


def test_every_name_is_accounted_for() -> None:
    sent = manifest(
        entry("embed.weight", (4, 2)), entry("norm.weight", (4,), offset=32), ties=(("head.weight", "embed.weight"),)
    )
    check_names(sent, {"embed.weight": (4, 2), "head.weight": (4, 2), "norm.weight": (4,)})
    check_names(sent, {"embed.weight": (4, 2), "norm.weight": (4,)})  # an engine that knows the tied tensor by one name
    with pytest.raises(ManifestMismatch, match=r"not sent: norm\.bias \(nearest: norm\.weight\)"):
        check_names(sent, {"embed.weight": (4, 2), "norm.weight": (4,), "norm.bias": (4,)})
    with pytest.raises(ManifestMismatch, match=r"unknown here: norm\.weight \(nearest: norm\.weights\)"):
        check_names(replace(sent, ties=()), {"embed.weight": (4, 2), "norm.weights": (4,)})
    with pytest.raises(ManifestMismatch, match=r"norm\.weight \[3\] here, \[4\] sent"):
        check_names(sent, {"embed.weight": (4, 2), "norm.weight": (3,)})
    with pytest.raises(ManifestMismatch, match=r"head\.weight \[5, 2\] here"):
        check_names(sent, {"embed.weight": (4, 2), "norm.weight": (4,), "head.weight": (5, 2)})
