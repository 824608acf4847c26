"""When a role may go home: the run has ended, and nobody is about to open it again."""

from __future__ import annotations

import time
from collections.abc import Callable

from protocol.streams import RunState, Streams

TRAINER_ROLE = "trainer"


class RunEnd:
    """Judges the run's state for one role process.

    A run that ends while this process looks on is over. One that had ended before may be about to be trained further: its
    trainer opens it again once it has restored its checkpoint. That is waited for while a trainer holds a lease, and
    `reopen_wait_s` seconds at least.
    """

    def __init__(self, streams: Streams, *, reopen_wait_s: float, clock: Callable[[], float] = time.monotonic) -> None:
        self._streams = streams
        self._reopen_wait_s = reopen_wait_s
        self._clock = clock
        self._was_open = False
        self._ended_since: float | None = None

    async def is_over(self, state: RunState) -> bool:
        """Whether a run in `state`, as just read, is over for this process."""
        if state is not RunState.ENDED:
            self._was_open, self._ended_since = True, None
            return False
        if self._was_open:
            return True
        now = self._clock()
        if self._ended_since is None:
            self._ended_since = now
        if now - self._ended_since < self._reopen_wait_s:
            return False
        return all(worker.role != TRAINER_ROLE for worker in await self._streams.workers())
