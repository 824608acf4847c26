"""One supervisor per run directory."""

from __future__ import annotations

import fcntl
import os
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from async_rl.errors import RunDirError


def lock_path(run_dir: Path) -> Path:
    """Beside the run directory, so that replacing the directory does not replace the lock."""
    return run_dir.parent / f".{run_dir.name}.lock"


@contextmanager
def run_lock(run_dir: Path) -> Iterator[None]:
    """Hold the run directory; the kernel lets go of it when this process ends, however it ends.

    Raises: RunDirError if another supervisor holds it, or its parent cannot be written.
    """
    path = lock_path(run_dir)
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
    except OSError as error:
        raise RunDirError(f"run_dir={run_dir} cannot be made: {error.strerror}; name another --run_dir") from error
    try:
        if not _try_lock(descriptor):
            holder = os.pread(descriptor, 32, 0).decode(errors="replace").strip() or "unknown"
            raise RunDirError(f"run_dir={run_dir} is in use by process {holder}; stop it with Ctrl-C or name another --run_dir")
        os.ftruncate(descriptor, 0)
        os.pwrite(descriptor, str(os.getpid()).encode(), 0)
        yield  # the file stays: unlinking it would let two later supervisors lock two different files of this name
    finally:
        os.close(descriptor)


def _try_lock(descriptor: int) -> bool:
    """A few tries: `lock_holder` of somebody who looks holds the lock for a moment."""
    for _ in range(5):
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            time.sleep(0.02)
        else:
            return True
    return False


def lock_holder(run_dir: Path) -> int | None:
    """Process that supervises the run now; None if there is none."""
    try:
        descriptor = os.open(lock_path(run_dir), os.O_RDONLY | os.O_CLOEXEC)
    except OSError:
        return None
    try:
        fcntl.flock(descriptor, fcntl.LOCK_SH | fcntl.LOCK_NB)
        return None
    except BlockingIOError:
        text = os.pread(descriptor, 32, 0).decode(errors="replace").strip()
        return int(text) if text.isdecimal() else None
    finally:
        os.close(descriptor)
