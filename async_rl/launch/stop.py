"""`async-rl stop`: end a run that goes on, whoever started its roles."""

from __future__ import annotations

import asyncio
import os
import signal
import socket
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from async_rl.errors import DeadlineExceeded, ProtocolError, QueueUnavailable, RunDirError
from async_rl.launch.embedded_redis import resolve_url
from async_rl.launch.look import ANSWER_S, config_of_run
from async_rl.launch.run_lock import lock_holder
from async_rl.run_dir.layout import open_run
from protocol.redis_streams import RedisStreams
from protocol.streams import WorkerLease

POLL_S = 0.1
MARGIN_S = 15.0
"""For what follows the roles' own time to end: the server, the report."""


@dataclass(frozen=True, slots=True)
class Stopped:
    """What was told to end, and what could not be reached from here."""

    supervisor: int | None
    roles: Sequence[WorkerLease] = ()
    elsewhere: Sequence[WorkerLease] = ()
    """Roles that hold a lease on other hosts, or do not say where they run."""

    @property
    def anything(self) -> bool:
        return self.supervisor is not None or bool(self.roles or self.elsewhere)


def stop_run(
    run_dir: Path,
    env: Mapping[str, str],
    *,
    timeout_s: float | None = None,
    now: Callable[[], float] = time.monotonic,
    sleep: Callable[[float], None] = time.sleep,
) -> Stopped:
    """Send SIGTERM to the run's supervisor, or without one to the roles of this host that hold a lease, and wait for their end.

    timeout_s: default launch.stop_s and a margin. Raises: RunDirError if there is no run, or it is not ours to stop;
    DeadlineExceeded, naming who still runs.
    """
    open_run(run_dir)
    limit_s = timeout_s if timeout_s is not None else _patience_s(run_dir)
    deadline = now() + limit_s
    supervisor = lock_holder(run_dir)
    if supervisor is not None:
        _terminate(supervisor)
        while lock_holder(run_dir) == supervisor:
            if now() > deadline:
                raise DeadlineExceeded(f"process {supervisor}, which supervises {run_dir}, has not ended within {limit_s:g} s")
            sleep(POLL_S)
        return Stopped(supervisor)
    return _stop_roles(lease_holders(run_dir, env), deadline, limit_s, now, sleep)


def lease_holders(run_dir: Path, env: Mapping[str, str]) -> Sequence[WorkerLease]:
    """Roles that hold a lease of the run now; none if its server is gone."""
    _, identity = open_run(run_dir)
    try:
        url = resolve_url(config_of_run(run_dir, dict(env)).redis, run_dir)
        return asyncio.run(_workers(url, identity.run_id))
    except (RunDirError, ProtocolError):  # never started, or over: its own server went with it
        return ()


async def _workers(url: str, run_id: str) -> Sequence[WorkerLease]:
    streams = RedisStreams(url, run_id, timeout_s=ANSWER_S, retry_s=ANSWER_S)
    try:
        return await streams.workers()
    finally:
        await streams.close()


def _stop_roles(
    workers: Sequence[WorkerLease],
    deadline: float,
    limit_s: float,
    now: Callable[[], float],
    sleep: Callable[[float], None],
) -> Stopped:
    host = socket.gethostname()
    here = [worker for worker in workers if worker.info.get("host") == host and worker.info.get("pid", "").isdecimal()]
    for worker in here:
        _terminate(int(worker.info["pid"]))
    while late := [worker for worker in here if _lives(int(worker.info["pid"]))]:
        if now() > deadline:
            names = ", ".join(f"{worker.worker_id} (process {worker.info['pid']})" for worker in late)
            raise DeadlineExceeded(f"{names} have not ended within {limit_s:g} s")
        sleep(POLL_S)
    return Stopped(None, here, [worker for worker in workers if worker not in here])


def _patience_s(run_dir: Path) -> float:
    try:
        return config_of_run(run_dir).launch.stop_s + MARGIN_S
    except (RunDirError, QueueUnavailable):
        return MARGIN_S


def _terminate(pid: int) -> None:
    try:
        os.kill(pid, signal.SIGTERM)
    except ProcessLookupError:
        return
    except PermissionError as error:
        raise RunDirError(f"process {pid} belongs to another user: ask its owner to stop the run") from error


def _lives(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return True
