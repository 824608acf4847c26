"""Role processes: how one is described, started, watched and ended with everything that it started itself."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from async_rl.errors import RoleFailed

TAIL_BYTES = 16_384
OWN_ERROR = "error: "  # how our commands end when they fail on purpose
UNFORESEEN = "error: unexpected"
LEASH = Path(__file__).with_name("leash.py")


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


class RoleProcess:
    """A started role, in a session of its own so that a signal to its group reaches all that it started."""

    def __init__(self, spec: RoleSpec, logs_dir: Path) -> None:
        self.spec = spec
        self.output_path = logs_dir / f"{spec.name}.out"
        self._output_start = self.output_path.stat().st_size if self.output_path.exists() else 0
        with self.output_path.open("ab") as output:
            self._process = subprocess.Popen(
                [sys.executable, "-I", "-S", str(LEASH), str(os.getpid()), *spec.command],
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


class RoleSet:
    """All roles of a run: started together, ended together."""

    def __init__(self, specs: Sequence[RoleSpec], logs_dir: Path) -> None:
        self._specs = tuple(specs)
        self._logs_dir = logs_dir
        self.processes: list[RoleProcess] = []

    def start(self) -> None:
        """Start every role; on an error the caller ends those that run (`end`)."""
        for spec in self._specs:
            self.processes.append(RoleProcess(spec, self._logs_dir))

    def failed(self) -> RoleProcess | None:
        """A role that ended with an error, if there is one."""
        return next((role for role in self.processes if role.exit_code() not in (None, 0)), None)

    def all_ended(self) -> bool:
        return all(role.exit_code() is not None for role in self.processes)

    def leaders_ended(self) -> bool:
        """Every leading role has ended well; the others are about to."""
        leaders = [role for role in self.processes if role.spec.leads]
        return bool(leaders) and all(role.exit_code() == 0 for role in leaders)

    def terminate(self) -> None:
        for role in self.processes:
            if role.exit_code() is None:
                role.signal_group(signal.SIGTERM)

    def kill(self) -> None:
        """End what still runs, whatever it does with its signals."""
        running = [role for role in self.processes if role.exit_code() is None]
        for role in running:
            role.signal_group(signal.SIGKILL)
        for role in running:
            role.wait(5.0)


def role_failed(role: RoleProcess) -> RoleFailed:
    """The error that says which role failed and why: its own `error: …` if it ended with one, else its last lines."""
    code = role.exit_code() or 1
    how = f"exit code {code}" if code <= 128 else f"killed by {signal_name(code - 128)}"
    lines = role.last_lines()
    start = next((index for index in reversed(range(len(lines))) if lines[index].startswith(OWN_ERROR)), None)
    if start is not None and not lines[start].startswith(UNFORESEEN):
        reason = "\n".join([lines[start].removeprefix(OWN_ERROR), *lines[start + 1 :]])
        message = f"{role.spec.name} failed ({how}, output in {role.output_path}): {reason}"
    else:
        said = "\n".join(f"  {line}" for line in lines) if lines else "  (it printed nothing)"
        message = f"{role.spec.name} failed ({how}); the end of {role.output_path}:\n{said}"
    return RoleFailed(message, role_exit_code=code)


def signal_name(signum: int) -> str:
    try:
        return signal.Signals(signum).name
    except ValueError:
        return f"signal {signum}"
