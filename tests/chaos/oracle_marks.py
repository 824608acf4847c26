"""Where a trainer of the oracle is: marks in shared memory that it sets itself, and traps that end it at an exact place.

A trainer's functions are wrapped, not changed. A wrapper sets its phase's mark while the function runs; what the marks say when
the process is dead is where the kill landed. A trap says: at the n-th entry into (or exit from) a phase, the process sends
itself SIGKILL, so that kills land between any two lines that matter, too. Torch-free.
"""

from __future__ import annotations

import functools
import inspect
import mmap
import os
import signal
from collections.abc import Callable
from enum import StrEnum
from pathlib import Path
from typing import Any

import numpy as np


class Phase(StrEnum):
    """What a trainer does, the innermost first: of several that are under way, a kill counts for the first."""

    ACKNOWLEDGE = "acknowledge"
    FSYNC = "log fsync, rotate"
    APPEND = "log append"
    COMPOSE = "compose a step"
    COMPLETE = "checkpoint completion"
    COPY = "checkpoint copy"
    TIDY = "prune, compact"
    WRITE = "checkpoint write"
    STEP = "step"
    REPLAY = "replay"
    LOAD = "checkpoint load"
    ANNOUNCE = "announce, snapshot"
    END = "end of the run"
    READ = "read"  # most of the time
    START = "start"


class Place(StrEnum):
    """Where in a phase a kill is aimed at."""

    ENTRY = "entry"
    INSIDE = "inside"
    EXIT = "exit"


PHASES = tuple(Phase)
PLACES = (Place.ENTRY, Place.EXIT)


class Marks:
    """marks[rank, phase]: how often it is under way. trap[rank]: phase + 1 (0: none), place, how many more times to pass."""

    def __init__(self, path: Path, world_size: int) -> None:
        shape = (world_size, len(PHASES) + 3)
        size = shape[0] * shape[1]
        if not path.exists():
            path.write_bytes(bytes(size))
        with path.open("r+b") as file:
            self._memory = mmap.mmap(file.fileno(), size)
        everything = np.frombuffer(self._memory, dtype=np.uint8).reshape(shape)
        self._marks, self._traps = everything[:, : len(PHASES)], everything[:, len(PHASES) :]

    # -- the harness's side ------------------------------------------------------------------------------------------
    def reset(self) -> None:
        """Before a start."""
        self._marks[:] = 0
        self._traps[:] = 0

    def set_trap(self, rank: int, phase: Phase, place: Place, *, count: int) -> None:
        """Kill that rank at the count-th entry or exit."""
        self._traps[rank] = (PHASES.index(phase) + 1, PLACES.index(place), count)

    def is_in(self, rank: int, phase: Phase) -> bool:
        return bool(self._marks[rank, PHASES.index(phase)])

    def under_way(self, rank: int) -> list[Phase]:
        """Phases that the rank is (or died) in, the innermost first."""
        return [phase for index, phase in enumerate(PHASES) if self._marks[rank, index]]

    # -- the trainer's side ------------------------------------------------------------------------------------------
    def enter(self, rank: int, phase: Phase) -> None:
        self._marks[rank, PHASES.index(phase)] += 1
        self._pass(rank, phase, Place.ENTRY)

    def leave(self, rank: int, phase: Phase) -> None:
        self._pass(rank, phase, Place.EXIT)
        self._marks[rank, PHASES.index(phase)] -= 1

    def forget(self, rank: int, phase: Phase) -> None:
        """Leave a phase that came to nothing: no trap."""
        self._marks[rank, PHASES.index(phase)] -= 1

    def _pass(self, rank: int, phase: Phase, place: Place) -> None:
        wanted, where, count = (int(value) for value in self._traps[rank])
        if wanted != PHASES.index(phase) + 1 or where != PLACES.index(place):
            return
        if count <= 1:
            os.kill(os.getpid(), signal.SIGKILL)
        self._traps[rank, 2] = count - 1


def marked(
    function: Callable[..., Any], phase: Phase, marks: Marks, rank: int, *, counts: Callable[[Any], bool] = lambda result: True
) -> Callable[..., Any]:
    """`function` between marks. counts: of a result, whether the exit is worth a trap."""

    def leave(result: Any) -> None:
        if counts(result):
            marks.leave(rank, phase)
        else:
            marks.forget(rank, phase)

    if inspect.iscoroutinefunction(function):

        @functools.wraps(function)
        async def wrapped_async(*arguments: Any, **named: Any) -> Any:
            marks.enter(rank, phase)
            result = None
            try:
                result = await function(*arguments, **named)
                return result
            finally:
                leave(result)

        return wrapped_async

    @functools.wraps(function)
    def wrapped(*arguments: Any, **named: Any) -> Any:
        marks.enter(rank, phase)
        result = None
        try:
            result = function(*arguments, **named)
            return result
        finally:
            leave(result)

    return wrapped
