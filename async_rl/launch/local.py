"""Run everything on this machine: make the run directory, start the server and every role, watch, end all of it."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from enum import StrEnum
from pathlib import Path

from rich.console import Console

from async_rl.config import RunConfig, check
from async_rl.config.run import LaunchConfig
from async_rl.errors import QueueUnavailable
from async_rl.launch.embedded_redis import EMBEDDED, EmbeddedRedis
from async_rl.launch.inputs import require_inputs
from async_rl.launch.lease_watch import LeaseWatch
from async_rl.launch.prepare import Fork, PreparedRun, prepare
from async_rl.launch.restarts import FailureHistory, RestartPolicy
from async_rl.launch.role_table import free_port, role_table
from async_rl.launch.run_lock import run_lock
from async_rl.launch.supervisor import Patience, StopRequest, Supervisor, catch_stop_signals
from async_rl.logs import Event
from async_rl.monitor.metrics_file import MetricsHistory
from async_rl.monitor.notices import Notices
from async_rl.monitor.roles import Display, Silent
from async_rl.monitor.terminal import progress_display
from async_rl.run_dir.files import JsonLinesWriter
from async_rl.run_dir.layout import RunIdentity, RunLayout
from async_rl.run_dir.segments_of_run import segments_of_run
from protocol.redis_streams import require_server

SERVER_TRIES = 3
SERVER_BACKOFF_S = 0.05
SERVER = "redis"
FAILURES = frozenset({Event.ROLE_FAILED, Event.ROLE_GIVEN_UP, Event.RUN_FAILED})


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


def run(
    config: RunConfig, *, resume: bool = False, overwrite: bool = False, fork: Fork | None = None, console: bool = True
) -> RunResult:
    """Train as `config` says, with every role a process of this machine, and return when all of them have ended.

    resume: go on with the run in config.run_dir. overwrite: replace it. Without either an existing run is refused.
    fork: begin a new run from that checkpoint of another one.
    SIGINT and SIGTERM stop the run (the trainer writes a checkpoint first); the result then says INTERRUPTED.
    Raises: ConfigError, DataError, RunDirError before anything starts; RoleFailed; QueueUnavailable, QueueRefused.
    """
    check(config)
    require_inputs(config)
    if config.redis.url != EMBEDDED:
        redis = config.redis
        asyncio.run(require_server(redis.url, timeout_s=redis.timeout_s, retry_s=redis.timeout_s, tls=redis.tls))
    with run_lock(config.run_dir), catch_stop_signals() as stop:
        prepared = prepare(config, resume=resume, overwrite=overwrite, fork=fork)
        display = run_display(config, prepared) if console else Silent()
        return supervise(config, prepared, stop, display=display)


def supervise(config: RunConfig, prepared: PreparedRun, stop: StopRequest, *, display: Display) -> RunResult:
    """Start the server and the roles of a prepared run, keep them up, and see them to their end."""
    started = time.monotonic()
    layout, identity = prepared.layout, prepared.identity
    events = _Events(layout, identity)
    events.write(Event.RUN_RESUMED if prepared.resumed else Event.RUN_STARTED)
    for change in prepared.changes:
        display.note(f"changed since the last start: {change}")
    try:
        with _server(config, layout, events, display) as (redis_url, keep_up):
            signum = _run_roles(config, prepared, redis_url, keep_up, stop, display, events)
    except BaseException as error:
        events.write(Event.RUN_FAILED, error=str(error).splitlines()[0] if str(error) else type(error).__name__)
        raise
    finally:
        display.close()
        for left_by_a_kill in segments_of_run(config.weights.shm_dir, identity.run_id):
            left_by_a_kill.unlink(missing_ok=True)
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


def _run_roles(
    config: RunConfig,
    prepared: PreparedRun,
    redis_url: str,
    keep_up: Callable[[], None],
    stop: StopRequest,
    display: Display,
    events: _Events,
) -> int | None:
    """See the roles to their end, which a signal may bring (its number)."""
    layout, lease_s = prepared.layout, config.redis.lease_s
    notices = Notices(layout.events_jsonl)

    def check() -> None:
        keep_up()
        for line in notices.new():
            display.note(line)

    with LeaseWatch(redis_url, prepared.identity.run_id, every_s=min(1.0, lease_s / 4), gap_s=max(2.0, lease_s / 2)) as leases:
        supervisor = Supervisor(
            lambda: role_table(config, layout, redis_url=redis_url, master_port=free_port()),
            layout.logs_dir,
            policy=restart_policy(config.launch),
            floors=worker_floors(config),
            leases=leases,
            display=display,
            patience=patience_of(config),
            check=check,
            on_event=events.write,
        )
        return supervisor.run(stop)


def restart_policy(launch: LaunchConfig) -> RestartPolicy:
    return RestartPolicy(launch.max_restarts, launch.restart_window_s, launch.backoff_s, launch.max_backoff_s)


def patience_of(config: RunConfig) -> Patience:
    launch, lease_s = config.launch, config.redis.lease_s
    evaluation = config.evaluation
    return Patience(
        finish_s=0.0 if evaluation.every_steps is None else evaluation.finish_s,
        stop_s=launch.stop_s,
        lease_s=lease_s,
        hang_s=launch.hang_leases * lease_s,
        start_s=launch.start_timeout_s,
        below_floor_s=launch.min_healthy_grace_s,
    )


def worker_floors(config: RunConfig) -> dict[str, int]:
    """Workers of each kind that must be healthy; of a kind that is started elsewhere, none."""
    floors = {"rollout": min(config.launch.min_healthy_workers, config.rollout.workers)}
    if config.reward.placement == "workers":
        floors["reward"] = min(1, config.reward.workers)
    return {kind: floor for kind, floor in floors.items() if floor > 0}


@contextmanager
def _server(
    config: RunConfig, layout: RunLayout, events: _Events, display: Display
) -> Iterator[tuple[str, Callable[[], None]]]:
    """The address of the run's server, and what keeps it up (ours to start only if embedded)."""
    if config.redis.url != EMBEDDED:
        yield config.redis.url, lambda: None
        return
    server = EmbeddedRedis(layout.redis_dir, appendfsync=config.redis.appendfsync)
    _start(server)
    # At once the first time: every role waits for it.
    policy = replace(restart_policy(config.launch), backoff_s=SERVER_BACKOFF_S)
    try:
        yield server.url, _ServerGuard(server, policy, events, display).keep_up
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


class _ServerGuard:
    """Starts the embedded server again when it dies, on the same data and the same socket: its roles reconnect."""

    def __init__(self, server: EmbeddedRedis, policy: RestartPolicy, events: _Events, display: Display) -> None:
        self._server = server
        self._history = FailureHistory(policy)
        self._events = events
        self._display = display
        self._started_at = time.monotonic()
        self._due_at: float | None = None

    def keep_up(self) -> None:
        """Raises: QueueUnavailable if it fails too often."""
        if self._server.is_running:
            return
        now = time.monotonic()
        if self._due_at is None:
            self._due_at = now + self._after_failure(now)
        if now < self._due_at:
            return
        self._due_at, self._started_at = None, now
        try:
            self._server.start()
        except QueueUnavailable as error:  # seen again at the next call, as another failure
            self._display.note(str(error))
            return
        self._events.write(Event.ROLE_RESTARTED, name=SERVER, count=self._history.count)

    def _after_failure(self, now: float) -> float:
        reason = self._server.last_words()
        wait_s = self._history.fail(now, lived_s=now - self._started_at)
        self._events.write(Event.ROLE_FAILED, name=SERVER, reason=f"it ended: {reason}", count=self._history.count)
        if wait_s is None:
            raise QueueUnavailable(
                f"the embedded Redis server ended ({self._server.directory}/redis.log: {reason}), {self._history.count} times "
                f"in all (launch.max_restarts); what it acknowledged is kept: mend the cause (is the disk full?), then --resume"
            )
        self._display.note(f"the embedded Redis server ended: starting it again on its data (restart {self._history.count})")
        return wait_s


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

    def write(self, event: Event, **fields: object) -> None:
        level = "warning" if event in FAILURES else "info"
        head = {"time_s": time.time(), "level": level, "event": str(event), "run_id": self._run_id, "role": "supervisor"}
        self._writer.write({**head, **fields})
