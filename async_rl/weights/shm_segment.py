"""Segments of shared memory, as files of a memory file system that processes of one host map.

A segment is named `arl-{run id}.{process}.{number}`. Its maker removes it when it closes; whoever starts, ends or cleans the
run removes what a killed maker left (`remove_segments`). A removed segment stays readable for those who have mapped it.
"""

from __future__ import annotations

import errno
import mmap
import os
import shutil
from collections.abc import Sequence
from pathlib import Path

import torch

from async_rl.errors import ConfigError, ManifestMismatch
from async_rl.run_dir.segments_of_run import segment_name, segments_of_run


class Segment:
    """One mapped segment. `memory`: uint8 [num_bytes]; what a reader writes there reaches nobody."""

    def __init__(self, path: Path, num_bytes: int, *, create: bool = False, write: bool = False) -> None:
        """Raises: OSError."""
        self.path = path
        flags = os.O_RDWR if create or write else os.O_RDONLY
        descriptor = os.open(path, flags | (os.O_CREAT | os.O_EXCL if create else 0) | os.O_CLOEXEC, 0o600)
        try:
            if create:
                _reserve(descriptor, num_bytes)
            elif os.fstat(descriptor).st_size != num_bytes:
                raise OSError(errno.EINVAL, f"it has {os.fstat(descriptor).st_size} bytes, not {num_bytes}")
            # A private mapping is writable for torch, and shows what the maker wrote as long as nothing is written here.
            access = mmap.ACCESS_WRITE if create or write else mmap.ACCESS_COPY
            self._map = mmap.mmap(descriptor, num_bytes, access=access)
        except OSError:
            if create:
                path.unlink(missing_ok=True)
            raise
        finally:
            os.close(descriptor)
        self.memory = torch.frombuffer(self._map, dtype=torch.uint8)

    def buckets(self, sizes: Sequence[int]) -> tuple[torch.Tensor, ...]:
        """The segment cut into buckets, one after the other."""
        return torch.split(self.memory, list(sizes))


def _reserve(descriptor: int, num_bytes: int) -> None:
    """All pages now: without it a full file system kills the writer by a signal, in the middle of a snapshot."""
    if hasattr(os, "posix_fallocate"):
        os.posix_fallocate(descriptor, 0, num_bytes)
    else:
        os.ftruncate(descriptor, num_bytes)


class SegmentMemory:
    """BufferMemory in segments of `directory`, named after `run_id`. Removes what an earlier maker of the run left."""

    def __init__(self, directory: Path, run_id: str) -> None:
        self._directory = directory
        self._run_id = run_id
        self._made: list[Path] = []
        self._count = 0
        remove_segments(directory, run_id)

    def allocate(self, sizes: Sequence[int]) -> tuple[tuple[torch.Tensor, ...], str]:
        """Raises: ConfigError, naming what is needed and what is free, if the file system is too small."""
        path = self._directory / segment_name(self._run_id, os.getpid(), self._count)
        self._count += 1
        needed = sum(sizes)
        try:
            segment = Segment(path, needed, create=True)
        except OSError as error:
            raise ConfigError(_too_small(self._directory, needed, error)) from error
        self._made.append(path)
        return segment.buckets(sizes), str(path)

    def close(self) -> None:
        while self._made:
            self._made.pop().unlink(missing_ok=True)


class SegmentReader:
    """Maps segments that others made, and keeps the newest few mapped."""

    KEPT = 4

    def __init__(self, *, write: bool = False) -> None:
        self._write = write
        self._mapped: dict[str, Segment] = {}

    def buckets(self, path: str, sizes: Sequence[int]) -> tuple[torch.Tensor, ...]:
        """Raises: ManifestMismatch if there is no such segment here."""
        segment = self._mapped.pop(path, None)
        if segment is None or segment.memory.numel() != sum(sizes):
            try:
                segment = Segment(Path(path), sum(sizes), write=self._write)
            except OSError as error:
                raise ManifestMismatch(
                    f"shared memory {path} cannot be mapped here: {error.strerror}; weights.backend='shm' needs trainer and "
                    f"engines on one host, with the same weights.shm_dir (containers: the same ipc namespace, or a shared "
                    f"volume); else use weights.backend='gloo'"
                ) from error
        self._mapped[path] = segment
        while len(self._mapped) > self.KEPT:
            del self._mapped[next(iter(self._mapped))]
        return segment.buckets(sizes)

    def close(self) -> None:
        self._mapped.clear()


def remove_segments(directory: Path, run_id: str) -> Sequence[Path]:
    """Remove every segment of a run; returns what there was."""
    found = segments_of_run(directory, run_id)
    for path in found:
        path.unlink(missing_ok=True)
    return found


def _too_small(directory: Path, needed: int, error: OSError) -> str:
    free = shutil.disk_usage(directory).free if directory.is_dir() else 0
    return (
        f"weights.backend='shm' needs {needed:,} bytes of shared memory for one version (two or three are held), and "
        f"weights.shm_dir={str(directory)!r} has {free:,} free ({error.strerror}); make it larger (docker run --shm-size, "
        f"compose shm_size, a Kubernetes emptyDir with medium Memory), name another memory file system with "
        f"weights.shm_dir, or use weights.backend='gloo'"
    )
