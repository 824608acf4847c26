"""Which workers hold a lease, as a thread beside the supervisor last read it from the run's server."""

from __future__ import annotations

import asyncio
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Protocol

from protocol.errors import ProtocolError
from protocol.redis_streams import RedisStreams
from protocol.streams import RunState

ANSWER_S = 2.0


@dataclass(frozen=True, slots=True)
class LeaseView:
    """What is known now. Times are of `time.monotonic`."""

    answering_since: float | None = None
    """Since when the server has answered without a gap; None if it does not."""
    seen: Mapping[str, float] = field(default_factory=dict)
    """Worker id → when its lease was last there."""
    held: Mapping[str, str] = field(default_factory=dict)
    """Worker id → role, of the leases in the last answer."""
    answered_at: float = float("-inf")
    """When that answer was asked for."""
    is_over: bool = False
    """Whether it said that the run has ended: then workers go home."""

    def of_role(self, role: str) -> frozenset[str]:
        """Workers of a role that hold a lease."""
        return frozenset(worker_id for worker_id, its_role in self.held.items() if its_role == role)


class Leases(Protocol):
    """Where the supervisor looks."""

    @property
    def view(self) -> LeaseView: ...

    def give_up(self, worker_id: str) -> None: ...


class NoLeases:
    """Knows nothing, so nothing is judged by its lease."""

    @property
    def view(self) -> LeaseView:
        return LeaseView()

    def give_up(self, worker_id: str) -> None:
        del worker_id


class LeaseWatch:
    """Asks every `every_s` seconds, from `start` to `stop`. A server that is away is asked again."""

    def __init__(
        self, url: str, run_id: str, *, every_s: float, gap_s: float, now: Callable[[], float] = time.monotonic
    ) -> None:
        self._url = url
        self._run_id = run_id
        self._every_s = every_s
        self._gap_s = gap_s
        self._now = now
        self._view = LeaseView()
        self._answered_at = float("-inf")
        self._gone: deque[str] = deque()
        self._wake = threading.Event()
        self._stopping = False
        self._thread = threading.Thread(target=self._watch, name="lease-watch", daemon=True)

    @property
    def view(self) -> LeaseView:
        return self._view

    def __enter__(self) -> LeaseWatch:
        self._thread.start()
        return self

    def __exit__(self, *error: object) -> None:
        self._stopping = True
        self._wake.set()
        self._thread.join(2 * ANSWER_S)

    def give_up(self, worker_id: str) -> None:
        """Let go of the lease of a worker whose process is known to be dead: its work moves now, not later."""
        self._gone.append(worker_id)
        self._wake.set()

    def _watch(self) -> None:
        asyncio.run(self._ask_repeatedly())

    async def _ask_repeatedly(self) -> None:
        streams = RedisStreams(self._url, self._run_id, timeout_s=ANSWER_S, retry_s=0.0)
        try:
            while not self._stopping:
                await self._ask(streams)
                await asyncio.to_thread(self._wake.wait, self._every_s)
                self._wake.clear()
        finally:
            await streams.close()

    async def _ask(self, streams: RedisStreams) -> None:
        try:
            while self._gone:
                await streams.leave(self._gone[0])
                self._gone.popleft()
            asked_at = self._now()
            workers = await streams.workers()
            is_over = (await streams.counters()).state is RunState.ENDED
        except ProtocolError:
            self._view = LeaseView(None, self._view.seen, {})
            return
        now, view = self._now(), self._view
        # After a gap (the server was away, or this process stood still) everybody gets the time to renew a lease first.
        continues = view.answering_since is not None and now - self._answered_at <= self._gap_s
        held = {worker.worker_id: worker.role for worker in workers}
        since = view.answering_since if continues else now
        seen = {**view.seen, **dict.fromkeys(held, now)}
        self._view = LeaseView(since, seen, held, answered_at=asked_at, is_over=is_over)
        self._answered_at = now
