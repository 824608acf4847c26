"""Who is alive: the leases as the coordinator last read them, and what it says when a worker comes or goes."""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Mapping

from async_rl.logs import Event, get_logger
from protocol.streams import Streams, WorkerLease

FRESH_S = 0.25


class Leases:
    """Reads the workers' leases, at most every FRESH_S unless asked.

    After a server that was away for long, leases have lapsed because nobody could renew them. Whoever was alive before
    then counts as alive for one more lease: an outage is no reason to evict engines that serve.
    """

    def __init__(self, streams: Streams, *, lease_s: float, clock: Callable[[], float] = time.monotonic) -> None:
        self._streams = streams
        self._lease_s = lease_s
        self._clock = clock
        self._log = get_logger()
        self._known: dict[str, WorkerLease] = {}
        self._read_at: float | None = None
        self._grace_until = float("-inf")

    @property
    def known(self) -> Mapping[str, WorkerLease]:
        """The workers of the last read, by id."""
        return self._known

    async def alive(self, named: Collection[str] = ()) -> frozenset[str]:
        """Ids of live workers; read again when the last read is old, or does not know one of `named`."""
        stale = self._read_at is None or self._clock() - self._read_at >= FRESH_S
        if stale or any(worker_id not in self._known for worker_id in named):
            return await self.read()
        return frozenset(self._known)

    async def read(self) -> frozenset[str]:
        """Ids of live workers, from the server."""
        found = {lease.worker_id: lease for lease in await self._streams.workers()}
        now = self._clock()
        elapsed = 0.0 if self._read_at is None else now - self._read_at
        if elapsed > self._lease_s / 2:
            self._grace_until = now + self._lease_s
        if now < self._grace_until:
            found = {**self._known, **found}
        self._say_changes(found, elapsed)
        self._known, self._read_at = found, now
        return frozenset(found)

    def _say_changes(self, found: Mapping[str, WorkerLease], elapsed_s: float) -> None:
        for worker_id in found.keys() - self._known.keys():
            self._log.info(Event.WORKER_JOINED, joined=worker_id, joined_role=found[worker_id].role)
        for worker_id in self._known.keys() - found.keys():
            before = self._known[worker_id]
            if before.expires_in_s > elapsed_s + FRESH_S:  # its lease still had time: it was given up
                self._log.info(Event.WORKER_LEFT, left=worker_id, left_role=before.role)
            else:
                self._log.warning(Event.WORKER_LOST, lost=worker_id, lost_role=before.role)
