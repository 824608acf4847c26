"""Copies by several threads are the copies of one."""

from __future__ import annotations

import threading
from collections.abc import Iterator

import pytest
import torch

from async_rl.errors import ManifestMismatch
from async_rl.weights import copies
from async_rl.weights.copies import Copies
from async_rl.weights.send_buffer import SendBuffer


@pytest.fixture(autouse=True)
def one_torch_thread(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(copies, "PIECE", 8)
    monkeypatch.setattr(copies, "MAX_PENDING", 3)
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.mark.parametrize("shape", [(), (0,), (7,), (8,), (9,), (41,), (6, 9)])
def test_every_element_arrives_in_the_wire_dtype(shape: tuple[int, ...]) -> None:
    generator = torch.Generator().manual_seed(1)
    source = torch.randn(shape, generator=generator)
    target = torch.full(shape, torch.nan, dtype=torch.bfloat16)
    with Copies(threads=3) as copying:
        copying.add(target, source)
    assert torch.equal(target, source.to(torch.bfloat16))


def test_strided_tensors_are_copied_whole() -> None:
    source = torch.arange(60.0).view(6, 10).t()
    target = torch.zeros(10, 6)
    with Copies(threads=3) as copying:
        copying.add(target, source)
    assert torch.equal(target, source)


def test_large_tensors_are_copied_by_other_threads_and_these_end() -> None:
    before = threading.active_count()
    targets = [torch.zeros(40) for _ in range(4)]
    with Copies(threads=2) as copying:
        for number, target in enumerate(targets):
            copying.add(target, torch.full((40,), float(number + 1)))
        assert threading.active_count() > before
    assert [float(target.sum()) for target in targets] == [40.0, 80.0, 120.0, 160.0]
    assert threading.active_count() == before


def test_an_error_of_a_copy_is_raised() -> None:
    class Broken(torch.Tensor):
        def copy_(self, *_: object, **__: object) -> Broken:
            raise RuntimeError("no memory")

    with pytest.raises(RuntimeError, match="no memory"), Copies(threads=2) as copying:
        copying.add(torch.zeros(40).as_subclass(Broken), torch.ones(40))


def test_a_buffer_is_filled_alike_with_one_thread_and_with_several() -> None:
    generator = torch.Generator().manual_seed(2)
    named = [(f"layer.{index}", torch.randn(3 + index, 7, generator=generator)) for index in range(9)]
    buffer = SendBuffer.copy_from(named, "bfloat16", bucket_bytes=256)
    for slot, (name, tensor) in zip(buffer.slots, named, strict=True):
        assert slot.name == name
        assert torch.equal(slot.view(buffer.buckets), tensor.to(torch.bfloat16))


def test_a_tensor_too_many_is_refused_while_copies_run() -> None:
    named = [("a", torch.ones(40)), ("b", torch.ones(40))]
    buffer = SendBuffer.copy_from(named, "float32")
    with pytest.raises(ManifestMismatch, match="c "):
        buffer.fill([*named, ("c", torch.ones(40))])
