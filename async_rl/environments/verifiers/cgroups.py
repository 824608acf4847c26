"""A bound on the memory and the processes of a whole sandbox, where the host lets us make control groups (v1 or v2)."""

from __future__ import annotations

import itertools
import os
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

_ROOT = Path("/sys/fs/cgroup")
_numbers = itertools.count()


@dataclass(frozen=True, slots=True)
class ControlGroup:
    """The directories of one group (v1: one per controller)."""

    directories: tuple[Path, ...]

    @property
    def procs(self) -> Sequence[str]:
        """Files that a process writes 0 to, to join."""
        return [str(directory / "cgroup.procs") for directory in self.directories]

    def hit_memory_limit(self) -> bool:
        """Whether something in it was killed for memory."""
        for directory in self.directories:
            for name, key in (("memory.events", "oom_kill"), ("memory.oom_control", "oom_kill")):
                with suppress(OSError, ValueError):
                    counts = dict(line.split() for line in (directory / name).read_text().splitlines())
                    if int(counts.get(key, 0)) > 0:
                        return True
        return False

    def remove(self, deadline_s: float = 2.0) -> None:
        """Remove it once it is empty: what is killed needs a moment to leave."""
        end = time.monotonic() + deadline_s
        for directory in self.directories:
            while True:
                try:
                    directory.rmdir()
                    break
                except FileNotFoundError:
                    break
                except OSError:
                    if time.monotonic() > end:
                        break
                    time.sleep(0.005)


def make_group(*, memory_bytes: int, max_processes: int) -> ControlGroup | None:
    """A fresh group with these bounds, or None if this host or this user has none to give."""
    name = f"async-rl-{os.getpid()}-{next(_numbers)}"
    limits = {"memory": ("memory.limit_in_bytes", memory_bytes), "pids": ("pids.max", max_processes)}
    if (_ROOT / "cgroup.controllers").exists():
        limits = {"": ("memory.max", memory_bytes)}
    made: list[Path] = []
    try:
        for controller, (file, value) in limits.items():
            directory = _ROOT / controller / name
            directory.mkdir()
            made.append(directory)
            (directory / file).write_text(str(value))
            if not controller:
                (directory / "pids.max").write_text(str(max_processes))
                with suppress(OSError):
                    (directory / "memory.swap.max").write_text("0")
            elif controller == "memory":
                with suppress(OSError):
                    (directory / "memory.memsw.limit_in_bytes").write_text(str(memory_bytes))
    except OSError:
        for directory in made:
            with suppress(OSError):
                directory.rmdir()
        return None
    return ControlGroup(tuple(made))
