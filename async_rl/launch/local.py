"""Run everything on this machine: make the run directory, start the server and every role, watch, end all of it."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path

from rich.console import Console

from async_rl.config import RunConfig, check
from async_rl.errors import QueueUnavailable, RoleFailed
from async_rl.launch.embedded_redis import EMBEDDED, EmbeddedRedis
from async_rl.launch.inputs import require_inputs
from async_rl.launch.prepare import PreparedRun, prepare
from async_rl.launch.role_table import free_port, role_table
from async_rl.launch.run_lock import run_lock
from async_rl.launch.supervisor import Patience, StopRequest, Supervisor, catch_stop_signals
from async_rl.logs import Event
from async_rl.monitor.metrics_file import MetricsHistory
from async_rl.monitor.roles import Display, Silent
from async_rl.monitor.terminal import progress_display
from async_rl.run_dir.files import JsonLinesWriter
from async_rl.run_dir.layout import RunIdentity, RunLayout

PORT_TRIES = 3
SERVER_TRIES = 3
PORT_CLASH = ("EADDRINUSE", "address already in use")


class RunEnd(StrEnum):
    """How a run on this machine came to an end without an error."""

    COMPLETED = "completed"
    INTERRUPTED = "interrupted"


@dataclass(frozen=True, slots=True)
class RunResult:
    """What `run` hands back. `steps` counts optimizer steps over all starts of the run."""

    run_dir: Path
    run_id: str
    end: RunEnd
    steps: int
    seconds: float
    exit_code: int
    """0, or 128 + the signal's number."""


def run(config: RunConfig, *, resume: bool = False, overwrite: bool = False, console: bool = True) -> RunResult:
    """Train as `config` says, with every role a process of this machine, and return when all of them have ended.

    resume: go on with the run in config.run_dir. overwrite: replace it. Without either an existing run is refused.
    SIGINT and SIGTERM stop the run (the trainer writes a checkpoint first); the result then says INTERRUPTED.
    Raises: ConfigError, DataError, RunDirError before anything starts; RoleFailed; QueueUnavailable, QueueRefused.
    """
    check(config)
    require_inputs(config)
    with run_lock(config.run_dir), catch_stop_signals() as stop:
        prepared = prepare(config, resume=resume, overwrite=overwrite)
        display = run_display(config, prepared) if console else Silent()
        return supervise(config, prepared, stop, display=display)


def supervise(
    config: RunConfig, prepared: PreparedRun, stop: StopRequest, *, display: Display, patience: Patience = Patience()
) -> RunResult:
    """Start the server and the roles of a prepared run, and see them to their end."""
    started = time.monotonic()
    layout, identity = prepared.layout, prepared.identity
    events = _Events(layout, identity)
    events.write(Event.RUN_RESUMED if prepared.resumed else Event.RUN_STARTED)
    for change in prepared.changes:
        display.note(f"changed since the last start: {change}")
    try:
        with _server(config, layout) as (redis_url, alive):
            signum = _with_free_port(config, layout, redis_url, alive, stop, display, patience)
    except BaseException as error:
        events.write(Event.RUN_FAILED, error=str(error).splitlines()[0] if str(error) else type(error).__name__)
        raise
    finally:
        display.close()
    events.write(Event.RUN_ENDED if signum is None else Event.RUN_INTERRUPTED)
    history = MetricsHistory(layout.metrics_jsonl)
    history.refresh()
    return RunResult(
        run_dir=layout.root,
        run_id=identity.run_id,
        end=RunEnd.COMPLETED if signum is None else RunEnd.INTERRUPTED,
        steps=len(history.steps),
        seconds=time.monotonic() - started,
        exit_code=0 if signum is None else 128 + signum,
    )


def _with_free_port(
    config: RunConfig,
    layout: RunLayout,
    redis_url: str,
    alive: Callable[[], None],
    stop: StopRequest,
    display: Display,
    patience: Patience,
) -> int | None:
    """Run the roles; when somebody else took the rendezvous port in the meantime, start them again on another."""
    for tries_left in reversed(range(PORT_TRIES)):
        roles = role_table(config, layout, redis_url=redis_url, master_port=free_port())
        try:
            return Supervisor(roles, layout.logs_dir, display=display, check=alive, patience=patience).run(stop)
        except RoleFailed as error:
            if tries_left == 0 or not any(sign.lower() in str(error).lower() for sign in PORT_CLASH):
                raise
            display.note("The rendezvous port was taken by another process: starting again on a new one.")
    raise AssertionError("unreachable: the last try returns or raises")


@contextmanager
def _server(config: RunConfig, layout: RunLayout) -> Iterator[tuple[str, Callable[[], None]]]:
    """The address of the run's server, and a check that it is still there (ours to start only if embedded)."""
    if config.redis.url != EMBEDDED:
        yield config.redis.url, lambda: None
        return
    server = EmbeddedRedis(layout.redis_dir, appendfsync=config.redis.appendfsync)
    _start(server)
    try:
        yield server.url, lambda: _require_running(server)
    finally:
        server.stop()


def _start(server: EmbeddedRedis) -> None:
    """A few tries: a loaded machine may kill or starve the first one."""
    for tries_left in reversed(range(SERVER_TRIES)):
        try:
            server.start()
            return
        except QueueUnavailable:
            if tries_left == 0:
                raise


def _require_running(server: EmbeddedRedis) -> None:
    if not server.is_running:
        raise QueueUnavailable(
            f"the embedded Redis server ended ({server.directory}/redis.log: {server.last_words()}); "
            f"what it acknowledged is kept: mend the cause (space on the disk?) and use --resume"
        )


def run_display(config: RunConfig, prepared: PreparedRun, *, console: Console | None = None) -> Display:
    """What shows a run on a terminal."""
    return progress_display(
        prepared.layout,
        title=f"{prepared.identity.run_id}  {config.run_dir}",
        max_steps=config.trainer.max_steps,
        max_lag=config.staleness.max_lag,
        console=console,
    )


class _Events:
    """The supervisor's own lines in events.jsonl. It configures no logging: it may live in a user's program."""

    def __init__(self, layout: RunLayout, identity: RunIdentity) -> None:
        self._writer = JsonLinesWriter(layout.events_jsonl)
        self._run_id = identity.run_id

    def write(self, event: Event, **fields: str) -> None:
        head = {"time_s": time.time(), "level": "info", "event": str(event), "run_id": self._run_id, "role": "supervisor"}
        self._writer.write({**head, **fields})
