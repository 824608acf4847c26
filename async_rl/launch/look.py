"""Look at a run from outside: its directory, and its server if there is one to ask. Changes nothing."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from async_rl.config import RunConfig, load_config
from async_rl.config.text import environment_variable
from async_rl.errors import ProtocolError, QueueUnavailable, RunDirError
from async_rl.launch.embedded_redis import resolve_url
from async_rl.launch.run_lock import lock_holder
from async_rl.monitor.snapshot import LiveSnapshot, RunSnapshot, live_snapshot, run_snapshot
from async_rl.registry.redis_registry import RedisRegistry
from async_rl.run_dir.layout import open_run
from protocol.redis_streams import RedisStreams
from protocol.tls import TlsFiles

ANSWER_S = 2.0


def config_of_run(run_dir: Path, env: dict[str, str] | None = None) -> RunConfig:
    """The config that a run was last started with. Of `env` only the server's address is heard: its password is not written.

    Raises: RunDirError if there is no run, or it never got a config.
    """
    layout, _ = open_run(run_dir)
    if not layout.config_toml.exists():
        raise RunDirError(f"{layout.config_toml} is missing: the run was never started; replace it with --overwrite")
    variable = environment_variable("redis.url")
    heard = {variable: env[variable]} if env and variable in env else {}
    return load_config(layout.config_toml, env=heard).config


async def look(run_dir: Path, env: dict[str, str] | None = None) -> RunSnapshot:
    """A snapshot, with what the server says if it answers within ANSWER_S. Raises: RunDirError if there is no run."""
    snapshot = run_snapshot(run_dir, supervisor_pid=lock_holder(run_dir))
    try:
        config = config_of_run(run_dir, env)
        url = resolve_url(config.redis, run_dir)
    except (RunDirError, QueueUnavailable):
        return snapshot  # never started, or over: its own server went with it
    try:
        return replace(snapshot, live=await _ask(url, snapshot.identity.run_id, config.redis.tls))
    except ProtocolError as error:
        return replace(snapshot, live_error=str(error))


async def _ask(url: str, run_id: str, tls: TlsFiles) -> LiveSnapshot:
    streams = RedisStreams(url, run_id, timeout_s=ANSWER_S, retry_s=ANSWER_S, tls=tls)
    try:
        return await live_snapshot(streams, RedisRegistry(streams.client, run_id, timeout_s=ANSWER_S))
    finally:
        await streams.close()
