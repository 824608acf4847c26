"""The server of a run, for commands that look at it from outside: the one that runs, or one of our own for the moment."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from async_rl.config.run import RedisConfig
from async_rl.errors import QueueUnavailable
from async_rl.launch.embedded_redis import EMBEDDED, EmbeddedRedis, redis_directory, resolve_url


@contextmanager
def server_of_run(redis: RedisConfig, run_dir: Path) -> Iterator[str]:
    """The address of the run's server. An embedded one that does not run is started, with the run's data, for as long.

    Raises: RunDirError if the run's directory is being served otherwise; QueueUnavailable if the server does not start.
    """
    if redis.url != EMBEDDED:
        yield redis.url
        return
    try:
        address = resolve_url(redis, run_dir)
    except QueueUnavailable:
        with EmbeddedRedis(redis_directory(run_dir), appendfsync=redis.appendfsync) as server:
            yield server.url
    else:
        yield address


@contextmanager
def server_like(redis: RedisConfig, run_dir: Path) -> Iterator[str]:
    """The address of the server that a run in `run_dir` uses, or of an empty one started as the run would start its own."""
    try:
        address = resolve_url(redis, run_dir)
    except QueueUnavailable:
        with (
            tempfile.TemporaryDirectory(prefix="arl-") as directory,
            EmbeddedRedis(Path(directory) / "redis", appendfsync=redis.appendfsync) as server,
        ):
            yield server.url
    else:
        yield address
