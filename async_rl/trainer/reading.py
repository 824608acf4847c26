"""Stream to intake log: what a trainer reads beside training, and what it puts back into a server that lost it."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence

from async_rl.logs import Event, get_logger
from async_rl.trainer.intake import Intake
from async_rl.trainer.progress import Progress
from protocol.keys import trainer_consumer
from protocol.streams import Delivery, Stream, Streams

READ_COUNT = 256
READ_BLOCK_S = 1.0
LOOK_AROUND_S = 5.0  # a trainer that is never idle still finds what was left over


class Reading:
    """One incarnation's reader. `arrived` is set whenever the log has more groups; `progress` is told where the queue is."""

    def __init__(
        self,
        streams: Streams,
        intake: Intake,
        progress: Progress,
        *,
        epoch: int,
        arrived: asyncio.Event,
        now: Callable[[], float],
    ) -> None:
        self._streams = streams
        self._intake = intake
        self._progress = progress
        self._epoch = epoch
        self._arrived = arrived
        self._now = now
        self._log = get_logger()

    async def run(self) -> None:
        """Stream to log, for as long as it runs: first what older incarnations held, which was published before the rest. When
        idle, and every LOOK_AROUND_S, what was left over since, and dead tasks."""
        server = await self._streams.server_id()
        while held := await self._streams.take_over(self._epoch, count=READ_COUNT):
            if await self._intake.take_in(held):
                self._arrived.set()
        looked = self._now()
        while True:
            deliveries = await self._streams.read_groups(self._epoch, count=READ_COUNT, block_s=READ_BLOCK_S)
            if deliveries and await self._intake.take_in(deliveries):
                self._arrived.set()
            if deliveries and self._now() - looked < LOOK_AROUND_S:
                continue
            looked = self._now()
            server = await self._after_server_change(server)
            await self._bury_dead()
            left_over = await self._left_over()
            if left_over and await self._intake.take_in(left_over):
                self._arrived.set()

    async def _left_over(self) -> Sequence[Delivery]:
        """What this trainer was given but never saw (a lost reply), else what consumers of older epochs still hold."""
        mine = await self._streams.own_pending(Stream.GROUPS, trainer_consumer(self._epoch))
        return mine or await self._streams.take_over(self._epoch, count=READ_COUNT)

    async def _bury_dead(self) -> None:
        dead = await self._streams.newly_dead(self._epoch)
        if dead:
            await self._intake.record_dead(list(dead.items()))
            await self._streams.finish_dead(self._epoch, list(dead))
            await self._streams.report(self._epoch, discarded=self._intake.discarded)

    async def _after_server_change(self, server: str) -> str:
        """Say so. If the server lost its last writes, or all of them: what this trainer knows of them is put back.

        The next fenced call puts back the epoch.
        """
        current = await self._streams.server_id()
        if current != server:
            self._log.warning(Event.QUEUE_BACK, server=current, before=server)
            await self._streams.report(self._epoch, discarded=self._intake.discarded)
        await self.restore_queue()
        return current

    async def restore_queue(self) -> None:
        """Keep the queue's cursor from going back, and remember where it is."""
        progress, counters = self._progress, await self._streams.counters()
        if counters.cursor < progress.cursor:
            await self._streams.restore(
                self._epoch, cursor=progress.cursor, issued=progress.issued, first=progress.first_cursor
            )
            self._log.warning(Event.QUEUE_RESTORED, cursor=progress.cursor, found=counters.cursor, issued=progress.issued)
        else:
            progress.cursor, progress.issued = counters.cursor, max(progress.issued, counters.issued)
