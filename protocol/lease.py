"""A worker's lease is renewed for as long as its work makes progress. That its event loop runs is not enough: what samples and
what trains are threads, and a thread that hangs does not stop the loop.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

from protocol.errors import WorkStalled
from protocol.streams import Streams
from protocol.whereabouts import whereabouts


@dataclass(frozen=True, slots=True)
class _Moment:
    what: str
    at_s: float


class Work:
    """One thing that a worker does at a time: `begin` it, `mark` its progress, `end` it. Between end and begin it waits, which
    is no stall.

    Whoever does the work calls these, any other thread may look. explain: more words about where it stands, asked for when it
    stalls.
    """

    def __init__(
        self,
        *,
        clock: Callable[[], float] = time.monotonic,
        explain: Callable[[], str] = lambda: "",
    ) -> None:
        self.explain = explain
        self._clock = clock
        self._began = ""
        self._moment: _Moment | None = None

    def begin(self, what: str) -> None:
        self._began = what
        self._set(what)

    def mark(self, where: str = "") -> None:
        """Progress. where: how far it is, for whoever asks what hangs."""
        self._set(f"{self._began}, {where}" if where else self._began)

    def end(self) -> None:
        self._moment = None

    @contextmanager
    def doing(self, what: str) -> Iterator[None]:
        """`begin` and `end`."""
        self.begin(what)
        try:
            yield
        finally:
            self.end()

    @property
    def what(self) -> str:
        """What is done now, and how far it is; empty: nothing."""
        moment = self._moment
        return "" if moment is None else moment.what

    @property
    def stalled_s(self) -> float:
        """Seconds since the last sign of progress; 0 while nothing is done."""
        moment = self._moment
        return 0.0 if moment is None else self._clock() - moment.at_s

    def _set(self, what: str) -> None:
        self._moment = _Moment(what, self._clock())


class LeaseKeeper:
    """Renews one worker's lease.

    progress_s: work that stands still for longer is not renewed for: others claim what the worker holds. If it moves again,
    renewing goes on. After another lease_s without progress `run` raises WorkStalled.
    on_stall: told once per stall, with what stands still and for how long. info: stored with the lease, beside host and pid.
    """

    def __init__(
        self,
        streams: Streams,
        worker_id: str,
        role: str,
        *,
        lease_s: float,
        progress_s: float,
        works: Sequence[Work] = (),
        info: Callable[[], Mapping[str, str]] = dict,
        on_stall: Callable[[str], object] = lambda reason: None,
    ) -> None:
        self._streams = streams
        self._worker_id = worker_id
        self._role = role
        self._lease_s = lease_s
        self._progress_s = progress_s
        self._works = works
        self._info = info
        self._on_stall = on_stall
        self._stalled = False

    async def renew(self) -> None:
        """Once, unless work stands still. Raises: WorkStalled; what `Streams.heartbeat` raises."""
        worst = max(self._works, key=lambda work: work.stalled_s, default=None)
        stalled_s = 0.0 if worst is None else worst.stalled_s
        if worst is None or stalled_s <= self._progress_s:
            self._stalled = False
            info = {**self._info(), **whereabouts()}
            await self._streams.heartbeat(self._worker_id, self._role, ttl_s=self._lease_s, info=info)
            return
        gone = stalled_s > self._progress_s + self._lease_s
        if self._stalled and not gone:
            return
        reason = f"no progress for {stalled_s:.0f} s (redis.progress_timeout_s={self._progress_s:g}) in: {worst.what}"
        if explained := await asyncio.to_thread(worst.explain):
            reason = f"{reason}; {explained}"
        if not self._stalled:
            self._stalled = True
            self._on_stall(reason)
        if gone:
            raise WorkStalled(f"{self._worker_id} made {reason}; its lease is gone, and others do its work")

    async def run(self) -> None:
        """Until cancelled. Raises: as `renew`."""
        while True:
            await self.renew()
            await asyncio.sleep(self._lease_s / 4)
