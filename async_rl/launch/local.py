"""Run everything on this machine: make the run directory, start the server and every role, watch, end all of it."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from urllib.parse import urlsplit, urlunsplit

from rich.console import Console

from async_rl.config import RunConfig, check, dump_toml
from async_rl.errors import DataError, QueueUnavailable, RoleFailed
from async_rl.launch.embedded_redis import EMBEDDED, EmbeddedRedis
from async_rl.launch.role_table import free_port, role_table
from async_rl.launch.run_lock import run_lock
from async_rl.launch.supervisor import Patience, StopRequest, Supervisor, catch_stop_signals
from async_rl.logs import Event
from async_rl.monitor.metrics_file import MetricsHistory
from async_rl.monitor.roles import Display, Silent
from async_rl.monitor.terminal import progress_display
from async_rl.run_dir.files import JsonLinesWriter
from async_rl.run_dir.layout import RunIdentity, RunLayout, create_run, open_run, write_atomic

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
    require_model(config)
    with run_lock(config.run_dir), catch_stop_signals() as stop:
        layout, identity = prepare(config, resume=resume, overwrite=overwrite)
        display = run_display(config, layout, identity) if console else Silent()
        return supervise(config, layout, identity, stop, display=display, resumed=resume)


def require_model(config: RunConfig) -> None:
    """Say at once, without torch, what every role would say later. Raises: DataError."""
    path = config.model.path
    if not (path / "config.json").is_file():
        what = "has no config.json" if path.is_dir() else "does not exist"
        raise DataError(f"model.path={path} {what}; give the directory of a Hugging Face causal LM with its tokenizer")


def prepare(config: RunConfig, *, resume: bool, overwrite: bool) -> tuple[RunLayout, RunIdentity]:
    """Make or open the run directory and write the resolved config to it. Raises: RunDirError."""
    layout, identity = open_run(config.run_dir) if resume else create_run(config.run_dir, overwrite=overwrite)
    write_config(config, layout)
    return layout, identity


def write_config(config: RunConfig, layout: RunLayout) -> None:
    """Write config.toml for the roles, without the server's password: that goes by environment."""
    redis = config.redis.model_copy(update={"url": without_password(config.redis.url)})
    write_atomic(layout.config_toml, dump_toml(config.model_copy(update={"redis": redis})).encode())


def without_password(url: str) -> str:
    """The address with its user but no password."""
    parts = urlsplit(url)
    if parts.password is None:
        return url
    user, _, host = parts.netloc.rpartition("@")
    name = user.partition(":")[0]
    return urlunsplit(parts._replace(netloc=f"{name}@{host}" if name else host))


def supervise(
    config: RunConfig,
    layout: RunLayout,
    identity: RunIdentity,
    stop: StopRequest,
    *,
    display: Display,
    resumed: bool = False,
    patience: Patience = Patience(),
) -> RunResult:
    """Start the server and the roles of a prepared run, and see them to their end."""
    started = time.monotonic()
    events = _Events(layout, identity)
    events.write(Event.RUN_RESUMED if resumed else Event.RUN_STARTED)
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
            f"the embedded Redis server ended (see {server.directory}/redis.log); what it acknowledged is kept: use --resume"
        )


def run_display(config: RunConfig, layout: RunLayout, identity: RunIdentity, *, console: Console | None = None) -> Display:
    """What shows a run on a terminal."""
    return progress_display(
        layout,
        title=f"{identity.run_id}  {config.run_dir}",
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
