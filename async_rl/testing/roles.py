"""The other roles as a coordinator sees them: an engine that takes every push, a worker and a trainer without a model."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager, suppress
from typing import TypeVar

from async_rl.registry.versions import Announcement, ProofReport, PushStatus, VersionRegistry
from protocol.errors import QueueUnavailable
from protocol.streams import Delivery, Finished, Publication, Stream, Streams

T = TypeVar("T")
PROOF = ProofReport(parity_max_abs=0.0, parity_mean_abs=0.0, parity_tokens=1)


async def until(condition: Callable[[], Awaitable[T]], *, within_s: float = 30.0) -> T:
    """What `condition` answers once that is true; it is asked again at every turn of the event loop."""
    async with asyncio.timeout(within_s):
        while True:
            if answer := await condition():
                return answer
            await asyncio.sleep(0.001)


@asynccontextmanager
async def running(*loops: Awaitable[None]) -> AsyncIterator[None]:
    """Run `loops` for the duration of the block; what they raise is raised here."""
    async with asyncio.TaskGroup() as tasks:
        started = [tasks.create_task(_awaited(loop)) for loop in loops]
        yield
        for one in started:
            one.cancel()


async def _awaited(loop: Awaitable[None]) -> None:
    await loop


class FakeEngine:
    """An engine of worker `worker_id` that confirms every push at once, without weights."""

    def __init__(self, streams: Streams, registry: VersionRegistry, worker_id: str, *, lease_s: float = 3600.0) -> None:
        self._streams = streams
        self._registry = registry
        self.worker_id = worker_id
        self.engine_id = f"engine-{worker_id}"
        self._lease_s = lease_s

    async def run(self) -> None:
        """Hold a lease and serve what is pushed, until cancelled. A server that is away is waited for."""
        await self.renew()
        await self._registry.join(self.engine_id, self.worker_id)
        while True:
            with suppress(QueueUnavailable):
                await self._serve()
                continue
            await asyncio.sleep(0.05)

    async def renew(self) -> None:
        await self._streams.heartbeat(self.worker_id, "rollout", ttl_s=self._lease_s)

    async def _serve(self) -> None:
        state = await self._registry.state()
        plan = state.plan
        asked = plan is not None and plan.status is PushStatus.PLANNED and self.engine_id in plan.participants
        if plan is not None and asked and self.engine_id not in state.confirmed:
            await self._registry.ready(self.engine_id, plan)
            await self._registry.confirm(self.engine_id, plan.epoch, plan.version, PROOF)
        else:
            await self._registry.wait_change(state.revision, timeout_s=1.0)


class FakeTrainer:
    """Counts as a trainer does, and trains nothing."""

    def __init__(self, streams: Streams, registry: VersionRegistry) -> None:
        self._streams = streams
        self._registry = registry
        self.epoch = 0
        self.version = 0
        self.trained = 0
        self.discarded = 0
        self.task_ids: list[str] = []

    async def start(self) -> None:
        """Raise the epoch and announce version 0."""
        self.epoch = await self._streams.raise_epoch(self.epoch + 1)
        await self.announce()

    async def announce(self) -> None:
        await self._registry.announce(Announcement(self.epoch, self.version, self.trained, self.discarded, b"manifest"))

    async def take(self, count: int) -> list[Delivery]:
        """The next `count` tasks, done by a worker at once, in the log and finished."""
        taken: list[Delivery] = []
        while len(taken) < count:
            tasks = await self._streams.read(Stream.TASKS, "worker", count=count - len(taken), block_s=5.0)
            if not tasks:
                raise AssertionError(f"only {len(taken)} of {count} tasks came")
            await self._streams.publish(
                [Publication(Stream.TASKS, t.entry_id, Stream.GROUPS, b"group", t.task_id) for t in tasks]
            )
            taken += tasks
        groups = await self._streams.read_groups(self.epoch, count=count, block_s=5.0)
        await self._streams.finish(self.epoch, [Finished(group.entry_id, str(group.task_id)) for group in groups])
        self.task_ids += [str(group.task_id) for group in groups]
        return taken

    async def step(self, count: int) -> None:
        """Train `count` groups: a version more."""
        await self.take(count)
        self.version += 1
        self.trained += count
        await self.announce()

    async def discard(self, count: int) -> None:
        """Take `count` groups and end them untrained."""
        await self.take(count)
        self.discarded += count
        await self._streams.report(self.epoch, discarded=self.discarded)
