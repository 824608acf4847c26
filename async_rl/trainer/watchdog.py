"""Which rank waits for which, in which collective: said when a collective takes too long, before anything times out.

Every rank has a thread that writes what its training thread does to the store where the ranks met: the command, how far it is
in it, since when, and the collective that it is in, read off its stack. A rank that waits for longer than the limit reads what
the others wrote. Ranks run the same commands on the same micro-batches, so they count alike, and who counted less is behind. A
rank that is stopped or dead writes nothing any more, and that is said too.
"""

from __future__ import annotations

import faulthandler
import json
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from types import FrameType

from torch._C._distributed_c10d import Store

from async_rl.logs import Event, get_logger

WRITE_EVERY_S = 1.0
SILENT_AFTER_S = 5.0
WAITING_FOR_COMMAND = "wait for rank 0's next command"
COLLECTIVES = frozenset(
    {
        "all_gather",
        "all_gather_into_tensor",
        "all_gather_tensor",
        "all_reduce",
        "barrier",
        "broadcast",
        "foreach_all_gather",
        "foreach_reduce",
        "gather",
        "reduce_scatter_tensor",
        "scatter",
        "wait_tensor",
    }
)
"""Functions of torch.distributed by whose name a collective is told."""
OURS = "async_rl"


@dataclass(frozen=True, slots=True)
class RankState:
    """What one rank does, as it wrote it. Times are Unix seconds."""

    rank: int
    command: str
    since_s: float
    collective: str
    place: str
    written_s: float
    marks: int = 0
    """Signs of progress so far: commands begun and ended, micro-batches done."""


@dataclass(slots=True)
class _Now:
    command: str = "start"
    since_s: float = field(default_factory=time.time)
    thread: int | None = None


class Watchdog:
    """One rank's watcher. `doing` and `mark` say what the calling thread does; `report` says what every rank does.

    limit_s: a wait in one collective of so long is reported. dump_after_s: a rank other than 0 that does not move on for this
    long writes the stacks of its threads to stderr (0: never); rank 0 does so itself, when it ends.
    """

    def __init__(
        self,
        store: Store,
        rank: int,
        world_size: int,
        *,
        limit_s: float,
        dump_after_s: float = 0.0,
        clock: Callable[[], float] = time.time,
        frames: Callable[[int], FrameType | None] = lambda thread: sys._current_frames().get(thread),
    ) -> None:
        self._store = store
        self._rank = rank
        self._world_size = world_size
        self._limit_s = limit_s
        self._dump_after_s = dump_after_s if rank > 0 else 0.0
        self._clock = clock
        self._frames = frames
        self._now = _Now(since_s=clock())
        self._marks = 0
        self._stopped = threading.Event()
        self._said_at: float | None = None

    def start(self) -> Watchdog:
        threading.Thread(target=self._run, name="watchdog", daemon=True).start()
        return self

    def stop(self) -> None:
        self._stopped.set()

    @contextmanager
    def doing(self, command: str) -> Iterator[None]:
        """Until the block ends, this thread runs `command`, which every rank runs together."""
        waits = command == WAITING_FOR_COMMAND  # rank 0 waits for nobody's command: count alike
        self._now = _Now(command, self._clock(), threading.get_ident())
        self._said_at = None
        self._count(0 if waits else 1, dump=not waits)
        try:
            yield
        finally:
            self._now = _Now(f"between commands, after {command}", self._clock(), None)
            self._count(0 if waits else 1, dump=False)

    def mark(self, where: str) -> None:
        """Progress within the command: `where` it is now, in words."""
        self._now = _Now(where, self._clock(), threading.get_ident())
        self._count(1, dump=True)

    def look(self) -> str | None:
        """Write this rank's state; a report if it has waited too long since the last one."""
        now, state = self._clock(), self.state()
        self._store.set(str(self._rank), json.dumps(asdict(state)))
        waited_s = now - max(state.since_s, self._said_at or state.since_s)
        if self._now.thread is None or not state.collective or waited_s < self._limit_s:
            return None
        self._said_at = now
        return self.report()

    def state(self) -> RankState:
        """What this rank does now."""
        now = self._now
        frame = None if now.thread is None else self._frames(now.thread)
        collective, place = describe(frame)
        return RankState(self._rank, now.command, now.since_s, collective, place, self._clock(), self._marks)

    def report(self) -> str:
        """What every rank does, this one first; who is behind or silent is named as the one that is waited for.

        Never raises: a store that is gone, with rank 0, is what it says then.
        """
        try:
            states: dict[int, RankState | None] = {rank: self._read(rank) for rank in range(self._world_size)}
        except RuntimeError as error:  # torch's store errors have no class of their own
            return f"what the other ranks do is not known: rank 0 and its store are gone ({first_line(error)})"
        mine = states[self._rank] = self.state()
        return explain(mine, states, self._clock())

    def _read(self, rank: int) -> RankState | None:
        key = str(rank)
        if not self._store.check([key]):
            return None
        return RankState(**json.loads(self._store.get(key)))

    def _count(self, marks: int, *, dump: bool) -> None:
        self._marks += marks
        if self._dump_after_s > 0:
            if dump:
                faulthandler.dump_traceback_later(self._dump_after_s)
            else:
                faulthandler.cancel_dump_traceback_later()

    def _run(self) -> None:
        log = get_logger()
        while not self._stopped.wait(WRITE_EVERY_S):
            try:
                report = self.look()
            except RuntimeError as error:
                if self._now.thread is None:
                    return  # this rank has nothing more to do, and rank 0 took the store with it
                gone = f"rank 0 and its store are gone: {first_line(error)}"
                log.warning(Event.RANKS_STUCK, rank=self._rank, report=gone)
                return
            if report is not None:
                log.error(Event.RANKS_STUCK, rank=self._rank, report=report)


def explain(mine: RankState, states: dict[int, RankState | None], now: float) -> str:
    """Name whom `mine` waits for: ranks that are silent, are behind, or are outside the collective."""
    lines = [_headline(mine, states, now)]
    lines += [f"  rank {rank}: {_line(state, now)}" for rank, state in sorted(states.items())]
    return "\n".join(lines)


def _headline(mine: RankState, states: dict[int, RankState | None], now: float) -> str:
    for_s = f"{now - mine.since_s:.0f} s"
    if not mine.collective:
        return f"rank {mine.rank} waits for no other: it is in no collective, for {for_s} in {mine.command}"
    waited_for = [rank for rank, state in states.items() if rank != mine.rank and _holds_up(mine, state, now)]
    whom = f"rank {', '.join(map(str, waited_for))}" if waited_for else "no rank in particular: all are in it"
    return f"rank {mine.rank} waits since {for_s} in {mine.collective} ({mine.command}) for {whom}"


def _holds_up(mine: RankState, other: RankState | None, now: float) -> bool:
    if other is None or now - other.written_s > SILENT_AFTER_S:
        return True
    return other.marks < mine.marks or not other.collective or other.command != mine.command


def _line(state: RankState | None, now: float) -> str:
    if state is None:
        return "has never written"
    silent_s = now - state.written_s
    silence = f", silent for {silent_s:.0f} s: stopped or dead" if silent_s > SILENT_AFTER_S else ""
    what = f"in {state.collective}" if state.collective else "in no collective"
    return f"{state.command} for {now - state.since_s:.0f} s, {what}, at {state.place or 'nowhere of ours'}{silence}"


def describe(frame: FrameType | None) -> tuple[str, str]:
    """The collective that a stack is in (or empty), and the innermost line of ours: (`all_reduce`, `step.py:88 train_step`)."""
    collective, place = "", ""
    for code, line in _stack(frame):
        if not collective and "torch/distributed" in code[0] and code[1] in COLLECTIVES:
            collective = code[1]
        if not place and f"/{OURS}/" in code[0]:
            place = f"{code[0].rpartition('/')[2]}:{line} {code[1]}"
    return collective, place


def _stack(frame: FrameType | None) -> Sequence[tuple[tuple[str, str], int]]:
    """Innermost first: ((file, function), line)."""
    found = []
    while frame is not None:
        found.append(((frame.f_code.co_filename, frame.f_code.co_name), frame.f_lineno))
        frame = frame.f_back
    return found


COLLECTIVE_ERRORS = ("gloo/", "Connection closed by peer", "Timed out waiting", "Connection reset by peer", "NCCL")
"""What torch's errors of a collective say; most have no class of their own."""


def is_of_collective(error: RuntimeError) -> bool:
    return any(sign in str(error) for sign in COLLECTIVE_ERRORS)


def stuck(name: str, error: RuntimeError, watchdog: Watchdog) -> str:
    return f"the ranks' collective in {name!r} failed: {first_line(error)}\n{watchdog.report()}"


def first_line(error: Exception) -> str:
    """What went wrong without torch's C++ stack, which follows on lines of its own."""
    return next(iter(str(error).splitlines()), type(error).__name__)
