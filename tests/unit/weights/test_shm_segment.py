"""Segments of shared memory: what readers see, what is left, and what is said when there is too little."""

from __future__ import annotations

import errno
import os
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest
import torch

from async_rl.errors import ConfigError, ManifestMismatch, WeightPushError
from async_rl.registry.versions import PushPlan
from async_rl.run_dir.segments_of_run import segments_of_run
from async_rl.testing.push_targets import TinyPolicy, tiny_probe
from async_rl.weights.manifest import Manifest, Tolerance
from async_rl.weights.send_buffer import SendBuffer, SendBufferPool, named_weights
from async_rl.weights.shm_backend import ShmReceiver, ShmSender
from async_rl.weights.shm_segment import Segment, SegmentMemory, SegmentReader, remove_segments

PLAN = PushPlan(1, 1, 1, ("a",), "", 30.0, 0.0)


def published(pool: SendBufferPool, model: TinyPolicy) -> tuple[Manifest, SendBuffer]:
    named, ties, buffers = named_weights(model)
    buffer = pool.copy_from(named, ties=ties, buffer_names=buffers)
    manifest = buffer.manifest(epoch=1, version=1, probe=tiny_probe(model), tolerance=Tolerance(1e-4))
    return ShmSender().prepare(manifest, buffer), buffer


def test_a_receiver_sees_what_was_written_and_what_it_writes_reaches_nobody(tmp_path: Path) -> None:
    pool = SendBufferPool("bfloat16", 2**16, SegmentMemory(tmp_path, "r"))
    model = TinyPolicy(1)
    manifest, _ = published(pool, model)
    assert Path(manifest.path).parent == tmp_path
    mine, theirs = ShmReceiver(), ShmReceiver()
    tensors = mine.receive(PLAN, "a", manifest)
    assert torch.equal(tensors["embed.weight"], model.embed.weight.to(torch.bfloat16))
    tensors["embed.weight"].zero_()
    assert torch.equal(theirs.receive(PLAN, "b", manifest)["embed.weight"], model.embed.weight.to(torch.bfloat16))


def test_a_segment_is_filled_again_after_its_release_and_its_readers_see_the_new_version(tmp_path: Path) -> None:
    pool = SendBufferPool("float32", 2**16, SegmentMemory(tmp_path, "r"))
    receiver = ShmReceiver()
    _, first = published(pool, TinyPolicy(1))
    manifest, _ = published(pool, TinyPolicy(2))
    receiver.receive(PLAN, "a", manifest)
    first.release()
    again, third = published(pool, TinyPolicy(3))
    assert third.location == first.location
    assert len(segments_of_run(tmp_path, "r")) == 2
    assert torch.equal(receiver.receive(PLAN, "a", again)["mix.bias"], TinyPolicy(3).mix.bias)


def test_closing_removes_the_segments_and_who_has_mapped_one_reads_on(tmp_path: Path) -> None:
    pool = SendBufferPool("float32", 2**16, SegmentMemory(tmp_path, "r"))
    manifest, _ = published(pool, TinyPolicy(1))
    receiver = ShmReceiver()
    tensors = receiver.receive(PLAN, "a", manifest)
    pool.close()
    assert list(tmp_path.iterdir()) == []
    assert torch.equal(tensors["mix.bias"], TinyPolicy(1).mix.bias)
    receiver.close()
    with pytest.raises(ManifestMismatch, match="on one host"):
        ShmReceiver().receive(PLAN, "a", manifest)


def test_a_maker_that_was_killed_leaves_segments_that_the_next_one_removes_and_no_others(tmp_path: Path) -> None:
    program = """
        import os, signal
        from pathlib import Path
        from async_rl.weights.shm_segment import SegmentMemory
        SegmentMemory(Path({0!r}), "r").allocate([64])
        os.kill(os.getpid(), signal.SIGKILL)
    """
    subprocess.run([sys.executable, "-c", textwrap.dedent(program.format(str(tmp_path)))], check=False, timeout=60)
    (tmp_path / "arl-r2.1.0").write_text("of another run")
    assert len(segments_of_run(tmp_path, "r")) == 1
    SegmentMemory(tmp_path, "r")
    assert [path.name for path in tmp_path.iterdir()] == ["arl-r2.1.0"]


def test_every_segment_of_a_run_can_be_removed_from_outside(tmp_path: Path) -> None:
    memory = SegmentMemory(tmp_path, "r")
    paths = [Path(memory.allocate([16])[1]) for _ in range(2)]
    assert sorted(remove_segments(tmp_path, "r")) == sorted(paths)
    assert not segments_of_run(tmp_path, "r")
    assert not segments_of_run(tmp_path / "missing", "r")


def test_too_little_shared_memory_is_said_with_what_is_needed_and_what_to_do(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(descriptor: int, offset: int, num_bytes: int) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(os, "posix_fallocate", full)
    with pytest.raises(ConfigError, match=r"needs 4,096 bytes .* free .*--shm-size.*weights\.backend='gloo'"):
        SegmentMemory(tmp_path, "r").allocate([4096])
    assert list(tmp_path.iterdir()) == []
    with pytest.raises(ConfigError, match="0 free"):
        SegmentMemory(tmp_path / "missing", "r").allocate([4096])


def test_a_segment_of_another_size_is_no_match(tmp_path: Path) -> None:
    Segment(tmp_path / "s", 64, create=True)
    with pytest.raises(ManifestMismatch, match="64 bytes, not 32"):
        SegmentReader().buckets(str(tmp_path / "s"), [32])


def test_a_buffer_in_private_memory_cannot_be_announced() -> None:
    with pytest.raises(WeightPushError, match="not in shared memory"):
        published(SendBufferPool("float32", 2**16), TinyPolicy(1))
