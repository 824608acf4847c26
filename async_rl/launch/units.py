"""Units of a run: roles that start, fail and start again together. One role each, save for the trainer's ranks."""

from __future__ import annotations

import signal
from collections.abc import Callable, Sequence
from enum import StrEnum
from pathlib import Path

from async_rl.launch.processes import RoleProcess, RoleSpec
from async_rl.launch.restarts import FailureHistory, RestartPolicy
from async_rl.monitor.roles import RoleState


class UnitState(StrEnum):
    """Where a unit stands."""

    RUNNING = "running"
    WAITING = "waiting"
    """It failed, and is due to start again at `due_at`."""
    ENDED = "ended"
    """Well: every role of it with exit code 0, or told to leave before it had begun."""
    GIVEN_UP = "given_up"


class Unit:
    """Its processes, and its failures so far. `specs` is asked anew at every start."""

    def __init__(self, name: str, specs: Callable[[], Sequence[RoleSpec]], logs_dir: Path, policy: RestartPolicy) -> None:
        self.name = name
        self._specs = specs
        self._logs_dir = logs_dir
        first = specs()
        self.kind = first[0].kind
        self.leads = any(spec.leads for spec in first)
        self.history = FailureHistory(policy)
        self.state = UnitState.WAITING
        self.processes: list[RoleProcess] = []
        self.started_at = 0.0
        self.due_at = float("-inf")
        self.starts = 0
        self.was_healthy = False
        self.fenced_at: float | None = None
        self.ended_at = float("inf")
        self.is_drained = False
        """It ended well while the run went on: it was told to leave."""

    def start(self, now: float) -> None:
        """Start every role of it; on an error those that run are `processes`, for the caller to end."""
        self.processes = []
        self.state = UnitState.RUNNING
        self.started_at = now
        self.is_drained = False
        self.starts += 1
        for spec in self._specs():
            self.processes.append(RoleProcess(spec, self._logs_dir))

    def failed(self) -> RoleProcess | None:
        """A role of it that ended with an error, if there is one. The one that was killed first comes first, if both show."""
        failed = [process for process in self.processes if process.exit_code() not in (None, 0)]
        return min(failed, key=lambda process: (process.exit_code() or 0) <= 128, default=None)

    def all_ended(self) -> bool:
        return all(process.exit_code() is not None for process in self.processes)

    def signal(self, signum: signal.Signals) -> None:
        """To every role of it that runs, and all that these started."""
        for process in self.processes:
            if process.exit_code() is None:
                process.signal_group(signum)

    def kill(self) -> None:
        """End what still runs, whatever it does with its signals."""
        running = [process for process in self.processes if process.exit_code() is None]
        for process in running:
            process.signal_group(signal.SIGKILL)
        for process in running:
            process.wait(5.0)

    def wait_until(self, due_at: float) -> None:
        self.state, self.due_at = UnitState.WAITING, due_at

    @property
    def worker_ids(self) -> Sequence[str]:
        """Of its running roles that hold leases."""
        return [p.spec.worker_id for p in self.processes if p.spec.worker_id and p.exit_code() is None]

    def role_states(self) -> Sequence[RoleState]:
        waiting = self.state is UnitState.WAITING
        restarts = max(0, self.starts - 1)
        drained = self.is_drained
        return [RoleState(p.spec.name, p.pid, p.exit_code(), restarts, waiting, drained) for p in self.processes]


def make_units(table: Callable[[], Sequence[RoleSpec]], logs_dir: Path, policy: RestartPolicy) -> Sequence[Unit]:
    """The units of a role table, in its order."""
    names = list(dict.fromkeys(_unit_of(spec) for spec in table()))
    return [Unit(name, _members(table, name), logs_dir, policy) for name in names]


def _members(table: Callable[[], Sequence[RoleSpec]], name: str) -> Callable[[], Sequence[RoleSpec]]:
    return lambda: [spec for spec in table() if _unit_of(spec) == name]


def _unit_of(spec: RoleSpec) -> str:
    return spec.unit or spec.name
