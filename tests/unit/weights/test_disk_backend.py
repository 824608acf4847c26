"""Weight pushes through files."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from async_rl.errors import WeightPushError
from async_rl.registry.versions import PushPlan
from async_rl.testing.push_targets import TinyPolicy, tiny_probe
from async_rl.weights.disk_backend import FILE_NAME, DiskReceiver, DiskSender
from async_rl.weights.manifest import Manifest, Tolerance
from async_rl.weights.send_buffer import SendBuffer, named_weights


def publish(sender: DiskSender, version: int, *, kept: frozenset[int] = frozenset()) -> tuple[Manifest, TinyPolicy]:
    model = TinyPolicy(version)
    named, ties, _ = named_weights(model)
    buffer = SendBuffer.copy_from(named, "bfloat16", ties=ties)
    manifest = buffer.manifest(epoch=1, version=version, probe=tiny_probe(model), tolerance=Tolerance(1e-4))
    prepared = sender.prepare(manifest, buffer)
    sender.forget(kept | {version})
    return prepared, model


def plan(version: int) -> PushPlan:
    return PushPlan(1, version, 1, ("a",), "", 30.0, 0.0)


def test_the_file_is_what_safetensors_reads(tmp_path: Path) -> None:
    manifest, model = publish(DiskSender(tmp_path), 3)
    tensors = load_file(Path(manifest.path) / FILE_NAME)
    assert set(tensors) == {"scale", "steps", "embed.weight", "mix.weight", "mix.bias"}
    assert torch.equal(tensors["embed.weight"], model.embed.weight.to(torch.bfloat16))
    assert torch.equal(tensors["scale"], torch.tensor(1.5, dtype=torch.bfloat16))
    assert torch.equal(tensors["steps"], model.steps)


def test_the_newest_two_stay_and_what_may_still_be_asked_for(tmp_path: Path) -> None:
    sender = DiskSender(tmp_path)
    for version in range(3, 9):
        publish(sender, version, kept=frozenset({4}))
    assert sorted(path.name for path in tmp_path.iterdir()) == ["v00000004-e1", "v00000007-e1", "v00000008-e1"]


def test_a_reader_that_comes_too_late_is_told_so_and_reads_the_newest_instead(tmp_path: Path) -> None:
    sender = DiskSender(tmp_path)
    old, _ = publish(sender, 3)
    for version in range(4, 9):
        newest, model = publish(sender, version)
    receiver = DiskReceiver()
    with pytest.raises(WeightPushError, match="version 3"):
        receiver.receive(plan(3), "a", old)
    assert torch.equal(receiver.receive(plan(8), "a", newest)["mix.bias"], model.mix.bias.to(torch.bfloat16))


def test_what_was_read_stays_valid_when_its_file_is_removed(tmp_path: Path) -> None:
    sender = DiskSender(tmp_path)
    old, model = publish(sender, 3)
    tensors = DiskReceiver().receive(plan(3), "a", old)
    for version in range(4, 9):
        publish(sender, version)
    assert not Path(old.path).exists()
    assert torch.equal(tensors["embed.weight"], model.embed.weight.to(torch.bfloat16))


def test_a_truncated_file_is_an_error_that_names_it(tmp_path: Path) -> None:
    manifest, _ = publish(DiskSender(tmp_path), 3)
    path = Path(manifest.path) / FILE_NAME
    path.write_bytes(path.read_bytes()[:-100])
    with pytest.raises(WeightPushError, match=FILE_NAME):
        DiskReceiver().receive(plan(3), "a", manifest)


def test_a_directory_that_cannot_be_written_is_an_error_that_names_it(tmp_path: Path) -> None:
    (tmp_path / "weights").write_text("a file is in the way")
    with pytest.raises(WeightPushError, match="version 3"):
        publish(DiskSender(tmp_path / "weights"), 3)
