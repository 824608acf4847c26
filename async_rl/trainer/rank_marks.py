"""How far every rank is, kept in the ranks' own rendezvous store: when all wait in a collective, it names who is missing there.

Ranks run the same commands on the same micro-batches, so they count alike. A rank that hangs stops counting; the others stop
one collective later.
"""

from __future__ import annotations

import faulthandler
import os
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from datetime import timedelta

from torch._C._distributed_c10d import PrefixStore, Store, TCPStore

STORE_TIMEOUT_S = 10.0


@dataclass(frozen=True, slots=True)
class RankMark:
    """The last sign of one rank."""

    count: int
    at_s: float  # Unix time of the rank's own clock
    what: str  # empty: it waits for a command

    @staticmethod
    def decode(data: bytes) -> RankMark:
        count, at_s, what = data.decode().split(" ", 2)
        return RankMark(int(count), float(at_s), what)

    def encode(self) -> str:
        return f"{self.count} {self.at_s:.3f} {self.what}"


class RankMarks:
    """The marks of all ranks. `note` is called by each for itself, `behind` by rank 0.

    dump_after_s: a rank other than 0 that does not move on from what it does for this long writes the stacks of its threads to
    stderr (0: never). Rank 0 does so itself, when it ends (workers.connect).
    """

    def __init__(
        self, store: Store, rank: int, world_size: int, *, dump_after_s: float = 0.0, now: Callable[[], float] = time.time
    ) -> None:
        self._store = store
        self._rank = rank
        self._world_size = world_size
        self._dump_after_s = dump_after_s if rank > 0 else 0.0
        self._now = now
        self._count = 0

    @staticmethod
    def connect(rank: int, world_size: int, *, dump_after_s: float) -> RankMarks | None:
        """Over a connection of its own to the store at MASTER_ADDR, MASTER_PORT; None for a rank that is alone."""
        if world_size == 1:
            return None
        store = TCPStore(
            os.environ["MASTER_ADDR"],
            int(os.environ["MASTER_PORT"]),
            is_master=False,
            timeout=timedelta(seconds=STORE_TIMEOUT_S),
        )
        return RankMarks(PrefixStore("async_rl/marks", store), rank, world_size, dump_after_s=dump_after_s)

    def note(self, what: str) -> None:
        """This rank does `what` now; empty: it waits."""
        if self._dump_after_s > 0:
            if what:
                faulthandler.dump_traceback_later(self._dump_after_s)
            else:
                faulthandler.cancel_dump_traceback_later()
        self._count += 1
        self._store.set(str(self._rank), RankMark(self._count, self._now(), what).encode())

    def read(self) -> Mapping[int, RankMark]:
        """Of the ranks that noted anything."""
        ranks = [rank for rank in range(self._world_size) if self._store.check([str(rank)])]
        return {rank: RankMark.decode(self._store.get(str(rank))) for rank in ranks}

    def behind(self) -> str:
        """In words: the ranks that did not come as far as the others, else where all of them stand."""
        try:
            marks = self.read()
        except RuntimeError as error:  # torch's DistError and its children
            return f"how far the ranks are is not known: {error}"
        silent = sorted(set(range(self._world_size)) - marks.keys())
        if silent:
            return f"never begun: {_names(silent)}"
        least, most = (choose(mark.count for mark in marks.values()) for choose in (min, max))
        now = self._now()
        places = ", ".join(
            f"rank {rank} ({mark.what or 'waits for a command'}, for {now - mark.at_s:.0f} s)"
            for rank, mark in sorted(marks.items())
            if mark.count == least
        )
        return f"behind the others: {places}" if least < most else f"all ranks stand at the same place: {places}"


def _names(ranks: list[int]) -> str:
    return ", ".join(f"rank {rank}" for rank in ranks)
