"""Watch the roles of a run until they end well, one fails, or somebody wants them to stop. Nothing is left running."""

from __future__ import annotations

import signal
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from types import FrameType

from async_rl.errors import AsyncRLError, ProtocolError, RoleFailed
from async_rl.launch.processes import RoleSet, RoleSpec, role_failed, signal_name
from async_rl.monitor.roles import Display, RoleState, Silent

STOP_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


@dataclass(frozen=True, slots=True)
class Patience:
    """How long the supervisor waits for what, in seconds."""

    poll_s: float = 0.1
    stop_s: float = 30.0
    """From SIGTERM to SIGKILL: time in which the trainer may write a checkpoint."""
    stop_lost_s: float = 5.0
    """The same when the server is gone: every role waits for it, and none can end well."""
    ending_s: float = 15.0
    """From the trainer's good end to SIGTERM for roles that have not ended by themselves."""


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
    """Collect SIGINT, SIGTERM and SIGHUP instead of dying of them (in the main thread; elsewhere nothing is caught)."""
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


class Supervisor:
    """Runs a table of roles to its end.

    `check` is called between polls and raises when something that is no role has failed (the embedded server).
    """

    def __init__(
        self,
        roles: Sequence[RoleSpec],
        logs_dir: Path,
        *,
        display: Display | None = None,
        patience: Patience = Patience(),
        check: Callable[[], None] = lambda: None,
        now: Callable[[], float] = time.monotonic,
        sleep: Callable[[float], None] = time.sleep,
    ) -> None:
        self._roles = RoleSet(roles, logs_dir)
        self._display = display or Silent()
        self._patience = patience
        self._check = check
        self._now = now
        self._sleep = sleep

    def run(self, stop: StopRequest) -> int | None:
        """Start the roles and return when they ended well (None), or were stopped by a signal (its number).

        Raises: RoleFailed with the first failing role's last lines; whatever `check` raises. Every role has ended by then.
        """
        patience_s = self._patience.stop_s
        try:
            self._roles.start()
            self._watch(stop)
            if stop.signum is None:
                self._let_end(stop)
        except (AsyncRLError, ProtocolError) as error:
            if not isinstance(error, RoleFailed):
                patience_s = self._patience.stop_lost_s
            self._display.note(f"{str(error).splitlines()[0]} Stopping the other roles …")
            raise
        finally:
            self._stop_all(stop, patience_s)
        return stop.signum

    def _watch(self, stop: StopRequest) -> None:
        """Until the leading roles have ended well, or a signal came."""
        while stop.signum is None and not self._roles.leaders_ended() and not self._roles.all_ended():
            self._poll()
        if stop.signum is None:
            self._raise_failure()  # what ended since the last poll may have ended badly
        else:
            self._display.note(f"{signal_name(stop.signum)}: stopping all roles; the trainer writes a checkpoint first …")

    def _let_end(self, stop: StopRequest) -> None:
        """The run is over: the other roles see it and end by themselves."""
        deadline = self._now() + self._patience.ending_s
        while not self._roles.all_ended() and self._now() < deadline and stop.signum is None:
            self._poll()

        if stop.signum is None:
            self._raise_failure()

    def _raise_failure(self) -> None:
        failed = self._roles.failed()
        if failed is not None:
            raise role_failed(failed)

    def _poll(self) -> None:
        self._check()
        self._raise_failure()
        self._show()
        self._sleep(self._patience.poll_s)

    def _stop_all(self, stop: StopRequest, patience_s: float) -> None:
        """SIGTERM, some patience, SIGKILL; a second Ctrl-C shortens the patience."""
        self._roles.terminate()
        deadline = self._now() + patience_s
        received = len(stop.signals)
        while not self._roles.all_ended() and self._now() < deadline and len(stop.signals) <= received:
            self._show()
            self._sleep(self._patience.poll_s)
        self._roles.kill()
        self._show()

    def _show(self) -> None:
        self._display.update([RoleState(role.spec.name, role.pid, role.exit_code()) for role in self._roles.processes])
