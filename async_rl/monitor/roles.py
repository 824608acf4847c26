"""What a display is told about the roles of a run."""

from __future__ import annotations

import signal
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

_ENDS = {0: "done", 128 + signal.SIGTERM: "stopped", 128 + signal.SIGKILL: "killed"}


@dataclass(frozen=True, slots=True)
class RoleState:
    """One role process, now."""

    name: str
    pid: int
    exit_code: int | None  # None: running
    restarts: int = 0
    waiting: bool = False  # it will be started again
    drained: bool = False  # it was told to leave, and did

    @property
    def label(self) -> str:
        if self.waiting:
            return "restarting"
        if self.exit_code is None:
            return "running"
        if self.drained:
            return "drained"
        return _ENDS.get(self.exit_code, f"failed ({self.exit_code})")


class Display(Protocol):
    """Shows a run while it goes on."""

    def note(self, text: str) -> None:
        """Say something that stays on the screen."""
        ...

    def update(self, roles: Sequence[RoleState]) -> None:
        """Called several times a second; does what is due."""
        ...

    def close(self) -> None: ...


class Silent:
    """A display that shows nothing."""

    def note(self, text: str) -> None:
        del text

    def update(self, roles: Sequence[RoleState]) -> None:
        del roles

    def close(self) -> None:
        return
