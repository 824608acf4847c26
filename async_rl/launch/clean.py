"""`async-rl clean`: remove what a run that does not go on left behind and nobody reads any more."""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

from async_rl.config.trainer import WeightsConfig
from async_rl.errors import ConfigError, RunDirError
from async_rl.launch.look import config_of_run
from async_rl.launch.run_lock import lock_holder, lock_path
from async_rl.launch.stop import lease_holders
from async_rl.run_dir.layout import RunLayout, open_run
from async_rl.run_dir.segments_of_run import segments_of_run

PARTIAL_PATTERNS = (".*.tmp", "checkpoints/*.tmp", "intake/.*.tmp", ".*.partial", "*.partial")
SERVER_FILES = ("redis.sock", "redis.url", "redis.pid", "redis.lock")


def clean_run(run_dir: Path, env: Mapping[str, str], *, everything: bool = False) -> Sequence[Path]:
    """Remove sockets of dead servers, half-written checkpoints and files, weights in transit and their shared memory; returns
    what was removed.

    What resuming, replaying or auditing the run needs stays, unless `everything`: then the run directory goes.
    Raises: RunDirError if there is no run, or any role of it still lives.
    """
    layout, identity = open_run(run_dir)
    _require_dead(run_dir, env)
    removed = [*leftovers(layout), *segments_of_run(_shm_dir(run_dir), identity.run_id)]
    if everything:
        removed += [layout.root, lock_path(run_dir)]
    for path in removed:
        if path.is_dir() and not path.is_symlink():
            shutil.rmtree(path, ignore_errors=True)
        else:
            path.unlink(missing_ok=True)
    return removed


def leftovers(layout: RunLayout) -> Iterator[Path]:
    """What a run leaves when it is killed."""
    for pattern in PARTIAL_PATTERNS:
        yield from sorted(layout.root.glob(pattern))
    yield from (path for name in SERVER_FILES if (path := layout.redis_dir / name).exists() or path.is_symlink())
    if layout.weights_dir.exists():
        yield layout.weights_dir
    # Links to directories whose names are too long for a socket; a supervisor that was killed leaves its own.
    for link in Path(tempfile.gettempdir()).glob("arl-*/d"):
        if link.is_symlink() and link.readlink() == layout.redis_dir.absolute():
            yield link.parent


def _shm_dir(run_dir: Path) -> Path:
    try:
        return config_of_run(run_dir).weights.shm_dir
    except (RunDirError, ConfigError):  # never started, or by another version
        return WeightsConfig().shm_dir


def _require_dead(run_dir: Path, env: Mapping[str, str]) -> None:
    if (supervisor := lock_holder(run_dir)) is not None:
        raise RunDirError(f"run_dir={run_dir} is in use by process {supervisor}: end it first with `async-rl stop {run_dir}`")
    if alive := lease_holders(run_dir, env):
        names = ", ".join(worker.worker_id for worker in alive)
        raise RunDirError(f"{names} still work for run_dir={run_dir}: end them first with `async-rl stop {run_dir}`")
