"""Watch the roles of a run until they end well, one cannot be kept alive, or somebody wants them to stop.

What fails is started again: with growing waits, so often and no more (`restarts`). Nothing is left running.
"""

from __future__ import annotations

import signal
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from types import FrameType
from typing import Protocol

from async_rl.errors import FENCED, AsyncRLError, DeadlineExceeded, ProtocolError, RoleFailed
from async_rl.launch.lease_watch import Leases, NoLeases
from async_rl.launch.processes import RoleProcess, RoleSpec, role_failed, signal_name
from async_rl.launch.restarts import NEVER_HEALTHY_TRIES, RestartPolicy, is_hopeless
from async_rl.launch.units import Unit, UnitState, make_units
from async_rl.logs import Event
from async_rl.monitor.roles import Display, Silent

STOP_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1)
FINISHING = "evaluation"
"""Kind of worker that has something to do when training has ended."""
DRAINED = frozenset({128 + signal.SIGTERM, 128 + signal.SIGUSR1})
"""How a worker ends that was told to leave before it had begun."""


@dataclass(frozen=True, slots=True)
class Patience:
    """How long the supervisor waits for what, in seconds. Those of a lease: see LaunchConfig."""

    poll_s: float = 0.1
    stop_s: float = 60.0
    """From SIGTERM to SIGKILL: time in which the trainer may write a checkpoint."""
    stop_lost_s: float = 5.0
    """The same when the server is gone: every role waits for it, and none can end well."""
    ending_s: float = 15.0
    """From the trainer's good end to SIGTERM for roles that have not ended by themselves."""
    finish_s: float = 0.0
    """More time than that for the last evaluation."""
    lease_s: float = 15.0
    hang_s: float = 120.0
    start_s: float = 600.0
    below_floor_s: float = 300.0


@dataclass(slots=True)
class StopRequest:
    """Signals received while the roles ran."""

    signals: list[int] = field(default_factory=list)

    @property
    def signum(self) -> int | None:
        return self.signals[0] if self.signals else None

    def receive(self, signum: int, frame: FrameType | None) -> None:
        del frame
        self.signals.append(signum)


@contextmanager
def catch_stop_signals() -> Iterator[StopRequest]:
    """Collect STOP_SIGNALS instead of dying of them (in the main thread; elsewhere nothing is caught)."""
    request = StopRequest()
    if threading.current_thread() is not threading.main_thread():
        yield request
        return
    previous = {signum: signal.signal(signum, request.receive) for signum in STOP_SIGNALS}
    try:
        yield request
    finally:
        for signum, handler in previous.items():
            signal.signal(signum, handler)


class OnEvent(Protocol):
    """Where the supervisor's own events go."""

    def __call__(self, event: Event, **fields: object) -> None: ...


def _ignore(event: Event, **fields: object) -> None:
    del event, fields


class Supervisor:
    """Runs a table of roles to its end.

    table: the roles; asked anew for every start, so that no start shares a worker id or a port with another.
    floors: kind of worker → how many must hold a lease. check: called between polls; keeps up what is no role (the embedded
    server), and raises when it cannot.
    """

    def __init__(
        self,
        table: Callable[[], Sequence[RoleSpec]],
        logs_dir: Path,
        *,
        policy: RestartPolicy = RestartPolicy(),
        floors: Mapping[str, int] | None = None,
        leases: Leases | None = None,
        display: Display | None = None,
        patience: Patience = Patience(),
        check: Callable[[], None] = lambda: None,
        on_event: OnEvent = _ignore,
        now: Callable[[], float] = time.monotonic,
        sleep: Callable[[float], None] = time.sleep,
    ) -> None:
        self._units = make_units(table, logs_dir, policy)
        self._floors = dict(floors or {})
        self._leases = leases or NoLeases()
        self._display = display or Silent()
        self._patience = patience
        self._check = check
        self._on_event = on_event
        self._now = now
        self._sleep = sleep
        self._below_since: dict[str, float] = {}
        self._last_given_up: dict[str, RoleFailed] = {}

    def run(self, stop: StopRequest) -> int | None:
        """Start the roles and return when they ended well (None), or were stopped by a signal (its number).

        Raises: RoleFailed with the last lines of a role that cannot be kept alive; DeadlineExceeded if too few workers live;
        whatever `check` raises. Every role has ended by then.
        """
        patience_s = self._patience.stop_s
        try:
            for unit in self._units:
                unit.start(self._now())
            self._watch(stop)
            if stop.signum is None:
                self._let_end(stop)
        except (AsyncRLError, ProtocolError) as error:
            if isinstance(error, ProtocolError):
                patience_s = self._patience.stop_lost_s
            what = error.summary if isinstance(error, RoleFailed) else "the run cannot go on"
            self._display.note(f"{what}: stopping the other roles …")  # why is said once, by who catches it
            raise
        finally:
            self._stop_all(stop, patience_s)
        return stop.signum

    # -- phases ------------------------------------------------------------------------------------------------------
    def _watch(self, stop: StopRequest) -> None:
        """Until the leading roles have ended well, or a signal came."""
        while stop.signum is None and not self._leaders_ended() and not self._all_ended():
            self._poll()
        if stop.signum is not None:
            self._display.note(f"{signal_name(stop.signum)}: stopping all roles; the trainer writes a checkpoint first …")

    def _let_end(self, stop: StopRequest) -> None:
        """The run is over: the other roles see it and end by themselves. What fails now has nothing left to do."""
        ending = [unit for unit in self._units if unit.kind != FINISHING]
        deadline = self._now() + self._patience.ending_s
        self._wait_for(ending, deadline, stop)
        self._note_failed(ending)  # now: what a signal of ours ends did not fail
        if stop.signum is None and not self._processes_ended():
            for unit in ending:
                unit.signal(signal.SIGTERM)
            self._wait_for(self._units, deadline + self._patience.finish_s, stop)
        self._note_failed([unit for unit in self._units if unit.kind == FINISHING])

    def _note_failed(self, units: Sequence[Unit]) -> None:
        for unit in units:
            if (failed := unit.failed()) is not None and unit.state is UnitState.RUNNING:
                self._on_event(Event.ROLE_FAILED, name=unit.name, reason=failed.how_it_ended(), after_the_end=True)

    def _wait_for(self, units: Sequence[Unit], deadline: float, stop: StopRequest) -> None:
        """Until they have ended, the deadline or a signal."""
        while not all(unit.all_ended() for unit in units) and self._now() < deadline and stop.signum is None:
            self._show()
            self._sleep(self._patience.poll_s)

    def _stop_all(self, stop: StopRequest, patience_s: float) -> None:
        """SIGTERM, some patience, SIGKILL; a second Ctrl-C shortens the patience."""
        for unit in self._units:
            unit.signal(signal.SIGTERM)
        deadline = self._now() + patience_s
        received = len(stop.signals)
        while not self._processes_ended() and self._now() < deadline and len(stop.signals) <= received:
            self._show()
            self._sleep(self._patience.poll_s)
        for unit in self._units:
            unit.kill()
        self._show()

    def _poll(self) -> None:
        self._check()
        for unit in self._units:
            self._attend(unit)
        self._judge_ended()
        self._require_floors()
        self._show()
        self._sleep(self._patience.poll_s)

    # -- one unit ----------------------------------------------------------------------------------------------------
    def _attend(self, unit: Unit) -> None:
        match unit.state:
            case UnitState.RUNNING:
                self._look_after(unit)
            case UnitState.WAITING if self._may_start(unit):
                unit.start(self._now())
                self._on_event(Event.ROLE_RESTARTED, name=unit.name, count=unit.starts - 1)

    def _look_after(self, unit: Unit) -> None:
        view = self._leases.view
        unit.was_healthy = unit.was_healthy or any(worker_id in view.seen for worker_id in unit.worker_ids)
        failed = unit.failed()
        if failed is not None:
            if unit.kind and failed.exit_code() in DRAINED:
                self._ended(unit)
            else:
                self._failed(unit, failed, failed.how_it_ended())
        elif unit.all_ended():
            self._ended(unit)
        elif (hung := self._hung(unit)) is not None:
            process, reason = hung
            unit.kill()
            self._failed(unit, process, reason)

    def _ended(self, unit: Unit) -> None:
        """Well: the run is over for it, or it was told to drain."""
        unit.state, unit.ended_at = UnitState.ENDED, self._now()

    def _judge_ended(self) -> None:
        """A worker that ended well while the run goes on was told to leave. If too few are left, it starts again at once.

        What is asked for after the worker's end tells whether the run was over by then, which is another reason to leave.
        """
        view = self._leases.view
        for unit in self._units:
            judged = unit.is_drained or not unit.kind or unit.state is not UnitState.ENDED
            if judged or view.answering_since is None or view.is_over or view.answered_at <= unit.ended_at:
                continue
            unit.is_drained = True
            self._on_event(Event.ROLE_DRAINED, name=unit.name)
            floor = self._floors.get(unit.kind, 0)
            if self._manned(unit.kind) < floor:
                self._display.note(f"{unit.name} drained and left; launch.min_healthy_workers={floor}: it starts again at once")
                unit.wait_until(self._now())

    def _manned(self, kind: str) -> int:
        """Workers of a kind: our own that run or will, and those started elsewhere that hold a lease."""
        own = {process.spec.worker_id for unit in self._units for process in unit.processes}
        return self._still_tried(kind) + len(self._leases.view.of_role(kind) - own)

    def _hung(self, unit: Unit) -> tuple[RoleProcess, str] | None:
        """A role whose process lives, but whose loop does not."""
        view, patience, now = self._leases.view, self._patience, self._now()
        if view.answering_since is None or patience.hang_s <= 0:
            return None
        for process in unit.processes:
            worker_id = process.spec.worker_id
            if not worker_id or process.exit_code() is not None:
                continue
            seen = view.seen.get(worker_id)
            limit_s = patience.start_s if seen is None else patience.hang_s
            silent_s = now - max(unit.started_at, view.answering_since, seen or unit.started_at)
            if silent_s > limit_s:
                return process, f"it ran, but held no lease for {silent_s:.0f} s"
        return None

    def _failed(self, unit: Unit, process: RoleProcess, reason: str) -> None:
        """Start it again later, do without it, or end the run."""
        code, now = process.exit_code(), self._now()
        error = role_failed(process, reason)
        unit.kill()  # ranks that lost one of them wait for it in a collective
        for dead in unit.processes:
            if dead.spec.worker_id:
                self._leases.give_up(dead.spec.worker_id)
        if is_hopeless(code, has_peers=bool(unit.kind)):
            raise error
        wait_s = unit.history.fail(now, lived_s=now - unit.started_at)
        self._on_event(Event.ROLE_FAILED, name=unit.name, failed=process.spec.name, reason=reason, count=unit.history.count)
        broken = self._is_broken(unit, code)
        if wait_s is None or broken:
            self._give_up(unit, error, unit.history.count)
            return
        unit.fenced_at = now if code == FENCED else None
        unit.wait_until(now + wait_s)
        what = "all ranks start" if len(unit.processes) > 1 else "it starts"
        self._display.note(f"{process.spec.name}: {reason}; {what} again in {wait_s:.1f} s (restart {unit.starts})")

    def _is_broken(self, unit: Unit, code: int | None) -> bool:
        """Whether it ends by itself at every start. Known only where leases are watched and the role should hold one."""
        watched = self._leases.view.answering_since is not None and any(p.spec.worker_id for p in unit.processes)
        by_itself = code is not None and 0 < code <= 128
        return watched and by_itself and not unit.was_healthy and unit.starts >= NEVER_HEALTHY_TRIES

    def _give_up(self, unit: Unit, error: RoleFailed, failures: int) -> None:
        if failures > 1:
            error = error.with_note(f"{unit.name} failed {failures} times (launch.max_restarts): ")
        if not unit.kind:
            raise error
        unit.state = UnitState.GIVEN_UP
        self._last_given_up[unit.kind] = error
        self._on_event(Event.ROLE_GIVEN_UP, name=unit.name, count=failures)
        ends_the_run = self._still_tried(unit.kind) < self._floors.get(unit.kind, 0)  # then the error says why
        why = "" if ends_the_run else f": {str(error).splitlines()[0]}"
        self._display.note(f"{unit.name} is given up{why}")

    def _may_start(self, unit: Unit) -> bool:
        """Due; and a trainer that was fenced comes back only when the trainer that did so is gone."""
        now = self._now()
        if now < unit.due_at:
            return False
        if unit.fenced_at is None or not (others := self._leases.view.of_role("trainer")):
            return True
        if now - unit.fenced_at > 2 * self._patience.lease_s:
            raise RoleFailed(
                f"another trainer ({', '.join(sorted(others))}) trains this run: this one was fenced; stop one of the two",
                role_exit_code=FENCED,
                summary="the trainer was fenced",
            )
        return False

    # -- all units ---------------------------------------------------------------------------------------------------
    def _require_floors(self) -> None:
        """Raises: RoleFailed if too few workers of a kind can ever be healthy; DeadlineExceeded if too few are for too long."""
        for kind, floor in self._floors.items():
            healthy = self._healthy(kind)
            if healthy is None or healthy >= floor:
                self._below_since.pop(kind, None)
                continue
            if kind in self._last_given_up and self._still_tried(kind) < floor:
                raise self._last_given_up[kind]
            now = self._now()
            below_s = now - self._below_since.setdefault(kind, now)
            grace_s, start_s = self._patience.below_floor_s, self._patience.start_s if self._is_starting(kind) else 0.0
            if below_s > grace_s + start_s:
                starting = f", and launch.start_timeout_s={start_s:g} for one that starts" if start_s else ""
                raise DeadlineExceeded(
                    f"{healthy} {kind} workers hold a lease, {floor} must (launch.min_healthy_workers), for {below_s:.0f} s "
                    f"(launch.min_healthy_grace_s={grace_s:g}{starting}); see logs/{kind}-*.out"
                )

    def _healthy(self, kind: str) -> int | None:
        """Workers of a kind that hold a lease, wherever they run; None: not known, the server does not answer."""
        if isinstance(self._leases, NoLeases):
            return sum(unit.kind == kind and unit.state is UnitState.RUNNING for unit in self._units)
        view = self._leases.view
        return None if view.answering_since is None else len(view.of_role(kind))

    def _is_starting(self, kind: str) -> bool:
        """Whether a worker of a kind runs that has not got its first lease: it may load a model for longer than the grace."""
        own = [unit for unit in self._units if unit.kind == kind and unit.state is UnitState.RUNNING]
        return any(worker_id not in self._leases.view.seen for unit in own for worker_id in unit.worker_ids)

    def _still_tried(self, kind: str) -> int:
        return sum(unit.kind == kind and unit.state in (UnitState.RUNNING, UnitState.WAITING) for unit in self._units)

    def _leaders_ended(self) -> bool:
        """Every leading role has ended well; the others are about to."""
        leaders = [unit for unit in self._units if unit.leads]
        return bool(leaders) and all(unit.state is UnitState.ENDED for unit in leaders)

    def _all_ended(self) -> bool:
        return all(unit.state in (UnitState.ENDED, UnitState.GIVEN_UP) for unit in self._units)

    def _processes_ended(self) -> bool:
        return all(unit.all_ended() for unit in self._units)

    def _show(self) -> None:
        self._display.update([state for unit in self._units for state in unit.role_states()])
