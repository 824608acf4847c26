"""The rollout worker's loop: lease tasks, sample their groups beside each other, publish what is finished.

Waits are three and named: for the first version to be served, for tasks, and for the queue to take what was sampled.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from async_rl.errors import CodecError, MessageTooLarge, NotServing, QueueFull
from async_rl.logs import Event, get_logger
from async_rl.registry.versions import VersionRegistry
from async_rl.rollout.engine import RolloutEngine
from async_rl.rollout.group import GroupRollout
from async_rl.run_dir.files import JsonLinesWriter
from protocol import event_loop
from protocol.codec import encode
from protocol.deliveries import task_of
from protocol.lease import LeaseKeeper
from protocol.messages import PromptTask, TrajectoryGroup
from protocol.patience import FULL_RETRY_S, publish_patiently
from protocol.run_end import RunEnd
from protocol.streams import Delivery, Publication, Stream, Streams

READ_BLOCK_S = 1.0
METRICS_EVERY_S = 2.0
SERVING_POLL_S = 0.05
PUBLISH_BATCH = 256


class WeightReceiver(Protocol):
    """Takes weight pushes for as long as it runs (weights.receiver.Receiver)."""

    async def run(self) -> None: ...


@dataclass(frozen=True, slots=True)
class RolloutSettings:
    """What the loop itself needs to know."""

    worker_id: str
    max_groups_in_flight: int
    lease_s: float
    drain_s: float  # from stop() to leaving
    max_deliveries: int
    reopen_wait_s: float
    unscored: bool  # publish to `unscored`, for reward workers
    metrics_path: Path | None = None
    progress_s: float = 600.0  # longest stand-still of the engine that the lease is renewed for


class RolloutLoop:
    """Runs until the run has ended, or until `stop()`; then finishes what it holds and leaves."""

    def __init__(
        self,
        streams: Streams,
        registry: VersionRegistry,
        engine: RolloutEngine,
        rollout: GroupRollout,
        receiver: WeightReceiver,
        settings: RolloutSettings,
        *,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._streams = streams
        self._registry = registry
        self._engine = engine
        self._rollout = rollout
        self._receiver = receiver
        self._settings = settings
        self._clock = clock
        self._log = get_logger()
        self._in_flight: set[asyncio.Task[None]] = set()
        self._held: set[str] = set()  # entries that are sampled or about to be published
        self._finished: asyncio.Queue[tuple[Delivery, PromptTask, TrajectoryGroup]] = asyncio.Queue()
        self._room = asyncio.Event()
        self._served = False
        self._said_invalid: set[str] = set()
        self._stopping = asyncio.Event()
        self._usage = _Usage(clock)
        self._run_end = RunEnd(streams, reopen_wait_s=settings.reopen_wait_s, clock=clock)
        self._target = Stream.UNSCORED if settings.unscored else Stream.GROUPS
        self._lease = LeaseKeeper(
            streams,
            settings.worker_id,
            "rollout",
            lease_s=settings.lease_s,
            progress_s=settings.progress_s,
            works=[engine.work],
            info=self._info,
            on_stall=lambda reason: self._log.error(Event.WORK_STALLED, reason=reason),
        )

    def stop(self) -> None:
        """Drain: take nothing new, finish and publish what is held, leave."""
        self._stopping.set()

    async def run(self) -> None:
        """Serve tasks. Raises: EngineError, DataError, QueueUnavailable; what was held stays in the queue for others."""
        worker_id = self._settings.worker_id
        await self._streams.open()
        await self._lease.renew()
        async with asyncio.TaskGroup() as background:
            helpers = [
                background.create_task(self._lease.run()),
                background.create_task(self._receiver.run()),
                background.create_task(self._publish_finished()),
                background.create_task(self._write_metrics()),
            ]
            async with asyncio.TaskGroup() as groups:
                await self._take_tasks(groups)
                await self._drain()
            await event_loop.end(helpers)
        await self._registry.leave(self._engine.engine_id)
        await self._streams.leave(worker_id)

    async def _drain(self) -> None:
        """Finish and publish what is held; what takes longer than drain_s stays in the queue, for others to claim."""
        held = set(self._in_flight)
        if self._stopping.is_set():
            self._log.info(Event.WORKER_DRAINING, groups=len(held), within_s=self._settings.drain_s)
        try:
            async with asyncio.timeout(self._settings.drain_s if self._stopping.is_set() else None):
                if held:
                    await asyncio.wait(held)
                await self._finished.join()
        except TimeoutError:
            self._log.warning(Event.WORK_LEFT, groups=len(self._held), drain_s=self._settings.drain_s)
            for task in held:
                task.cancel()

    async def _take_tasks(self, groups: asyncio.TaskGroup) -> None:
        last_claim = float("-inf")
        while not self._stopping.is_set():
            if not await self._has_room():
                continue
            count = self._settings.max_groups_in_flight - len(self._in_flight)
            deliveries = await self._streams.read(Stream.TASKS, self._settings.worker_id, count=count, block_s=READ_BLOCK_S)
            if not deliveries and await self._is_over():
                return
            for delivery in deliveries:
                self._start(groups, delivery)
            if self._clock() - last_claim >= self._settings.lease_s / 2:
                last_claim = self._clock()
                await self._take_left_over(groups)

    async def _take_left_over(self, groups: asyncio.TaskGroup) -> None:
        """What is ours although its delivery never reached us (a lost reply), and what workers that are gone held."""
        worker_id = self._settings.worker_id
        before = set(self._held)
        for delivery in await self._streams.own_pending(Stream.TASKS, worker_id):
            if delivery.entry_id not in before:
                self._start(groups, delivery)
        room = self._settings.max_groups_in_flight - len(self._in_flight)
        if room <= 0:
            return
        for delivery in await self._streams.claim(Stream.TASKS, worker_id, count=room):
            self._log.info(Event.TASK_RECLAIMED, task_id=delivery.task_id, deliveries=delivery.delivery_count)
            self._start(groups, delivery)

    async def _has_room(self) -> bool:
        """Wait, at most READ_BLOCK_S, until a first version is served and a group may start."""
        self._served = self._served or self._engine.serving_version is not None
        if self._served and len(self._in_flight) < self._settings.max_groups_in_flight:
            return True
        self._room.clear()
        try:
            async with asyncio.timeout(READ_BLOCK_S if self._served else SERVING_POLL_S):
                await self._room.wait()
        except TimeoutError:
            if await self._is_over():
                self._stopping.set()
        return False

    async def _is_over(self) -> bool:
        if not await self._run_end.is_over((await self._streams.counters()).state):
            return False
        self._log.info(Event.RUN_ENDED)
        return True

    def _start(self, groups: asyncio.TaskGroup, delivery: Delivery) -> None:
        self._usage.begin(len(self._in_flight))
        self._held.add(delivery.entry_id)
        task = groups.create_task(self._serve(delivery))
        self._in_flight.add(task)
        task.add_done_callback(self._end)

    def _end(self, task: asyncio.Task[None]) -> None:
        self._in_flight.discard(task)
        self._usage.end(len(self._in_flight))
        self._room.set()

    async def _serve(self, delivery: Delivery) -> None:
        if delivery.delivery_count > self._settings.max_deliveries:
            await self._bury(delivery, f"delivered {delivery.delivery_count} times without success")
            return
        try:
            task = task_of(delivery)
        except CodecError as error:
            await self._bury(delivery, f"unreadable task: {error}")
            return
        group = await self._sample(task)
        self._usage.count(group)
        self._say_invalid(group)
        self._finished.put_nowait((delivery, task, group))

    def _say_invalid(self, group: TrajectoryGroup) -> None:
        """Why something could not be scored: the first of each kind of error aloud, the others for whoever listens closely."""
        for member, trajectory in enumerate(group.trajectories):
            reward = trajectory.reward
            if reward is None or reward.is_valid:
                continue
            kind = reward.error_type or "unknown"
            say = self._log.debug if kind in self._said_invalid else self._log.warning
            self._said_invalid.add(kind)
            say(Event.REWARD_INVALID, task_id=group.task_id, member=member, error_type=kind, reason=reward.invalid_reason)

    async def _sample(self, task: PromptTask) -> TrajectoryGroup:
        """Sample the group; an engine whose weights were withdrawn starts it again when it serves a proven version."""
        while True:
            await self._note_started(task, self._rollout.version)
            try:
                return await self._rollout.run(task)
            except NotServing as error:
                await self._note_started(task, None)
                self._log.warning(Event.WAITING, waiting_for="a proven version", task_id=task.task_id, error=str(error))
                await self._until_served()

    async def _note_started(self, task: PromptTask, version: int | None) -> None:
        """Noted before anything is sampled: the trainer may wait for work that would be too old after its next step."""
        while True:
            try:
                return await self._streams.note_started(self._settings.worker_id, {task.task_id: version})
            except QueueFull as error:
                self._log.debug("queue.full", waiting="to begin", error=str(error))
                await asyncio.sleep(FULL_RETRY_S)

    async def _until_served(self) -> None:
        """The engine tells nobody when it serves again; it is asked."""
        while self._engine.serving_version is None:  # noqa: ASYNC110 - there is no event to wait for
            await asyncio.sleep(SERVING_POLL_S)

    async def _publish_finished(self) -> None:
        while True:
            batch = [await self._finished.get()]
            while len(batch) < PUBLISH_BATCH and not self._finished.empty():
                batch.append(self._finished.get_nowait())
            await self._publish(batch)
            for delivery, _, _ in batch:
                self._held.discard(delivery.entry_id)
                self._finished.task_done()

    async def _publish(self, batch: Sequence[tuple[Delivery, PromptTask, TrajectoryGroup]]) -> None:
        publications: list[Publication] = []
        for delivery, _, group in batch:
            target = Stream.GROUPS if group.is_scored else self._target
            publications.append(Publication(Stream.TASKS, delivery.entry_id, target, encode(group), group.task_id))
        try:
            accepted = await publish_patiently(self._streams, publications, on_full=self._say_full)
        except MessageTooLarge as error:
            if len(batch) == 1:
                await self._bury(batch[0][0], str(error))
            else:
                for one in batch:
                    await self._publish([one])
            return
        for (_, task, _), fresh in zip(batch, accepted, strict=True):
            if not fresh:
                self._usage.duplicates += 1
                self._log.info(Event.DUPLICATE_WORK, task_id=task.task_id)

    def _say_full(self, error: QueueFull) -> None:
        self._log.warning(Event.QUEUE_FULL, waiting="to publish", error=str(error))

    async def _bury(self, delivery: Delivery, reason: str) -> None:
        self._log.error(Event.TASK_DEAD, task_id=delivery.task_id, entry_id=delivery.entry_id, reason=reason)
        await self._streams.bury(delivery, task_id=delivery.task_id, reason=reason)
        self._held.discard(delivery.entry_id)

    def _info(self) -> Mapping[str, str]:
        version = self._engine.serving_version
        return {"in_flight": str(len(self._in_flight)), "serving_version": "" if version is None else str(version)}

    async def _write_metrics(self) -> None:
        if self._settings.metrics_path is None:
            return
        writer = JsonLinesWriter(self._settings.metrics_path)
        try:
            while True:
                await asyncio.sleep(METRICS_EVERY_S)
                writer.write(self._usage.snapshot())
        finally:
            writer.write(self._usage.snapshot())
            writer.close()


class _Usage:
    """Busy time (any group in flight), idle time, and what was sampled."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._started = clock()
        self._busy_since: float | None = None
        self._busy_s = 0.0
        self.duplicates = 0
        self.groups = 0
        self.tokens = 0

    def begin(self, in_flight_before: int) -> None:
        if in_flight_before == 0:
            self._busy_since = self._clock()

    def end(self, in_flight_after: int) -> None:
        if in_flight_after == 0 and self._busy_since is not None:
            self._busy_s += self._clock() - self._busy_since
            self._busy_since = None

    def count(self, group: TrajectoryGroup) -> None:
        self.groups += 1
        self.tokens += sum(trajectory.num_sampled for trajectory in group.trajectories)

    def snapshot(self) -> dict[str, float | int]:
        now = self._clock()
        busy = self._busy_s + (now - self._busy_since if self._busy_since is not None else 0.0)
        total = now - self._started
        return {
            "time_s": time.time(),
            "seconds": total,
            "busy_s": busy,
            "idle_s": total - busy,
            "groups": self.groups,
            "tokens": self.tokens,
            "duplicates": self.duplicates,
        }
