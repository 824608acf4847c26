"""Role processes: how one is described, started, watched and ended with everything that it started itself."""

from __future__ import annotations

import os
import signal
import subprocess
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from async_rl.errors import RoleFailed
from async_rl.leash import leashed

TAIL_BYTES = 16_384
OWN_ERROR = "error: "  # how our commands end when they fail on purpose
UNFORESEEN = "error: unexpected"
ALLOCATOR: Mapping[str, str] = {
    "MALLOC_MMAP_THRESHOLD_": str(64 * 2**20),
    "MALLOC_TRIM_THRESHOLD_": str(256 * 2**20),
    "MALLOC_ARENA_MAX": "1",
}
"""glibc keeps blocks of up to 64 MiB instead of giving them back at every batch: fresh pages cost more than filling them.
And it keeps them once: steps run in changing threads; an arena for each would hold the largest step it ever ran."""


@dataclass(frozen=True, slots=True)
class RoleSpec:
    """One role process of a run."""

    name: str
    """Unique in the run, e.g. `rollout-0`; its output goes to logs/<name>.out."""
    command: tuple[str, ...]
    env: Mapping[str, str] = field(default_factory=dict)
    """Added to the supervisor's own environment."""
    leads: bool = False
    """The run is over when every leading role has ended well (the trainer's ranks)."""
    unit: str = ""
    """Roles of one unit fail and start together (the trainer's ranks). Empty: a unit of its own."""
    kind: str = ""
    """The kind of worker that others of its kind can stand in for (rollout, reward). Empty: the run cannot go on without it."""
    worker_id: str = ""
    """Under which it holds a lease; empty if it holds none."""


class RoleProcess:
    """A started role, in a session of its own so that a signal to its group reaches all that it started."""

    def __init__(self, spec: RoleSpec, logs_dir: Path) -> None:
        self.spec = spec
        self.output_path = logs_dir / f"{spec.name}.out"
        self._output_start = self.output_path.stat().st_size if self.output_path.exists() else 0
        with self.output_path.open("ab") as output:
            self._process = subprocess.Popen(
                leashed(spec.command),
                env={**os.environ, **spec.env},
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )

    @property
    def pid(self) -> int:
        return self._process.pid

    def exit_code(self) -> int | None:
        """None while it runs; 128 + n if signal n ended it. What an ended role left behind in its group is killed."""
        if self._process.returncode is None and self._process.poll() is not None:
            self.signal_group(signal.SIGKILL)  # now, while the group's number cannot belong to somebody else
        code = self._process.returncode
        return code if code is None or code >= 0 else 128 - code

    def signal_group(self, signum: signal.Signals) -> None:
        """Send a signal to the role and all that it started; a group that is gone is fine."""
        try:
            os.killpg(self._process.pid, signum)
        except (ProcessLookupError, PermissionError):  # macOS answers EPERM for a group of zombies
            return

    def how_it_ended(self) -> str:
        """`exit code 3`, or `killed by SIGKILL`."""
        code = self.exit_code() or 0
        return f"exit code {code}" if code <= 128 else f"killed by {signal_name(code - 128)}"

    def wait(self, timeout_s: float) -> int | None:
        """Exit code, or None if it still runs after `timeout_s`."""
        deadline = time.monotonic() + timeout_s
        while (code := self.exit_code()) is None and time.monotonic() < deadline:
            time.sleep(0.01)
        return code

    def last_lines(self, count: int = 20) -> Sequence[str]:
        """The last lines that this start of the role printed."""
        with self.output_path.open("rb") as output:
            size = output.seek(0, os.SEEK_END)
            output.seek(max(self._output_start, size - TAIL_BYTES))
            return output.read().decode(errors="replace").rstrip().splitlines()[-count:]


def role_failed(role: RoleProcess, how: str | None = None) -> RoleFailed:
    """The error that says which role failed and why: its own `error: …` if it ended with one, else its last lines.

    how: what happened, if not its end by itself.
    """
    how = how or role.how_it_ended()
    lines = role.last_lines()
    start = next((index for index in reversed(range(len(lines))) if lines[index].startswith(OWN_ERROR)), None)
    if start is not None and not lines[start].startswith(UNFORESEEN):
        reason = "\n".join([lines[start].removeprefix(OWN_ERROR), *lines[start + 1 :]])
        message = f"{role.spec.name} failed ({how}, output in {role.output_path}): {reason}"
    else:
        said = "\n".join(f"  {line}" for line in lines) if lines else "  (it printed nothing)"
        message = f"{role.spec.name} failed ({how}); the end of {role.output_path}:\n{said}"
    return RoleFailed(message, role_exit_code=role.exit_code() or 1, summary=f"{role.spec.name} failed ({how})")


def signal_name(signum: int) -> str:
    try:
        return signal.Signals(signum).name
    except ValueError:
        return f"signal {signum}"
