"""The reward worker's loop: lease unscored groups, score their members beside each other, move them to `groups`."""

from __future__ import annotations

import asyncio
import math
import time
from collections import Counter
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TypeAlias

from msgspec.structs import replace

from async_rl.environments.base import Episode
from async_rl.environments.episodes import Decode, episode_of
from async_rl.errors import CodecError, MessageTooLarge, QueueFull
from async_rl.logs import Event, get_logger
from async_rl.run_dir.files import JsonLinesWriter
from protocol.codec import encode
from protocol.deliveries import group_of
from protocol.lease import LeaseKeeper
from protocol.messages import FinishReason, PromptTask, Reward, Trajectory, TrajectoryGroup
from protocol.patience import publish_patiently
from protocol.run_end import RunEnd
from protocol.streams import Delivery, Publication, Stream, Streams

ROLE = "reward"
READ_BLOCK_S = 1.0
METRICS_EVERY_S = 2.0
ABORTED = "aborted"

Score: TypeAlias = Callable[[Episode], Awaitable[Reward]]


@dataclass(frozen=True, slots=True)
class RewardSettings:
    """What the loop itself needs to know."""

    worker_id: str
    max_concurrent: int
    lease_s: float
    drain_s: float  # from stop() to leaving
    max_deliveries: int
    reopen_wait_s: float
    metrics_path: Path | None = None


class RewardLoop:
    """Runs until the run has ended, or until `stop()`; then finishes what it holds and leaves.

    score: never raises for a verifier's sake (see `score_episode`, `ScoringPool.score`). decode: token ids to text.
    """

    def __init__(
        self,
        streams: Streams,
        score: Score,
        decode: Decode,
        settings: RewardSettings,
        *,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._streams = streams
        self._score = score
        self._decode = decode
        self._settings = settings
        self._clock = clock
        self._log = get_logger()
        self._end = RunEnd(streams, reopen_wait_s=settings.reopen_wait_s, clock=clock)
        self._held: dict[str, asyncio.Task[None]] = {}
        self._room = asyncio.Event()
        self._stopping = asyncio.Event()
        self._figures = _Figures(clock())
        # Scores have time-outs of their own, and no thread of this process makes them: the loop itself is what could hang.
        self._lease = LeaseKeeper(
            streams,
            settings.worker_id,
            ROLE,
            lease_s=settings.lease_s,
            progress_s=math.inf,
            info=lambda: {"in_flight": str(len(self._held))},
        )

    def stop(self) -> None:
        """Drain: take nothing new, score and publish what is held, leave."""
        self._stopping.set()
        self._room.set()

    async def run(self) -> None:
        """Score. Raises: QueueUnavailable after redis.retry_s; what was held stays in the queue for others."""
        await self._streams.open()
        await self._lease.renew()
        async with asyncio.TaskGroup() as background:
            helpers = [background.create_task(self._lease.run()), background.create_task(self._write_metrics())]
            async with asyncio.TaskGroup() as groups:
                await self._take_groups(groups)
                await self._drain()
            for helper in helpers:
                helper.cancel()
        await self._streams.leave(self._settings.worker_id)

    async def _drain(self) -> None:
        """Finish and publish what is held; what takes longer than drain_s stays in the queue, for others to claim."""
        held = set(self._held.values())
        if not held:
            return
        if self._stopping.is_set():
            self._log.info(Event.WORKER_DRAINING, groups=len(held), within_s=self._settings.drain_s)
        _, late = await asyncio.wait(held, timeout=self._settings.drain_s if self._stopping.is_set() else None)
        if late:
            self._log.warning(Event.WORK_LEFT, groups=len(late), drain_s=self._settings.drain_s)
        for task in late:
            task.cancel()

    # -- taking ------------------------------------------------------------------------------------------------------
    async def _take_groups(self, groups: asyncio.TaskGroup) -> None:
        last_claim = float("-inf")
        while not self._stopping.is_set():
            room = self._settings.max_concurrent - len(self._held)
            if room <= 0:
                self._room.clear()
                await self._room.wait()
                continue
            deliveries = await self._streams.read(Stream.UNSCORED, self._settings.worker_id, count=room, block_s=READ_BLOCK_S)
            for delivery in deliveries:
                self._start(groups, delivery)
            if not deliveries and await self._end.is_over((await self._streams.counters()).state):
                self._log.info(Event.RUN_ENDED)
                return
            if self._clock() - last_claim >= self._settings.lease_s / 2:
                last_claim = self._clock()
                await self._take_left_over(groups)

    async def _take_left_over(self, groups: asyncio.TaskGroup) -> None:
        """What workers that are gone held, and what is ours although its delivery never reached us (a lost reply)."""
        worker_id = self._settings.worker_id
        before = set(self._held)
        mine = await self._streams.own_pending(Stream.UNSCORED, worker_id)
        for delivery in mine:
            if delivery.entry_id not in before:
                self._start(groups, delivery)
        room = self._settings.max_concurrent - len(self._held)
        if room <= 0:
            return
        for delivery in await self._streams.claim(Stream.UNSCORED, worker_id, count=room):
            self._log.info(Event.TASK_RECLAIMED, task_id=delivery.task_id, deliveries=delivery.delivery_count)
            self._start(groups, delivery)

    def _start(self, groups: asyncio.TaskGroup, delivery: Delivery) -> None:
        if delivery.entry_id in self._held:
            return
        task = groups.create_task(self._serve(delivery))
        self._held[delivery.entry_id] = task
        task.add_done_callback(lambda _: self._release(delivery.entry_id))

    def _release(self, entry_id: str) -> None:
        self._held.pop(entry_id, None)
        self._room.set()

    # -- scoring -----------------------------------------------------------------------------------------------------
    async def _serve(self, delivery: Delivery) -> None:
        if delivery.delivery_count > self._settings.max_deliveries:
            await self._bury(delivery, f"delivered {delivery.delivery_count} times without success")
            return
        try:
            group = group_of(delivery)
        except CodecError as error:
            await self._bury(delivery, f"unreadable group: {error}")
            return
        trajectories = await asyncio.gather(
            *(self._scored(group.task, index, trajectory) for index, trajectory in enumerate(group.trajectories))
        )
        await self._publish(delivery, replace(group, trajectories=tuple(trajectories)))

    async def _scored(self, task: PromptTask, index: int, trajectory: Trajectory) -> Trajectory:
        if trajectory.reward is not None:
            return trajectory
        started = self._clock()
        reward = await self._reward(task, index, trajectory)
        self._figures.count(reward)
        if not reward.is_valid:
            self._log.warning(
                Event.REWARD_INVALID,
                task_id=task.task_id,
                member=index,
                error_type=reward.error_type,
                reason=reward.invalid_reason,
            )
        timings = replace(trajectory.timings, reward_s=self._clock() - started)
        return replace(trajectory, reward=reward, timings=timings)

    async def _reward(self, task: PromptTask, index: int, trajectory: Trajectory) -> Reward:
        if trajectory.finish_reason is FinishReason.ABORTED:
            return Reward.invalid("sampling was aborted", ABORTED)
        return await self._score(episode_of(task, trajectory, index, self._decode))

    async def _publish(self, delivery: Delivery, group: TrajectoryGroup) -> None:
        publication = Publication(Stream.UNSCORED, delivery.entry_id, Stream.GROUPS, encode(group), delivery.task_id)
        try:
            (fresh,) = await publish_patiently(self._streams, [publication], on_full=self._say_full)
        except MessageTooLarge as error:
            await self._bury(delivery, str(error))
            return
        self._figures.groups += 1
        if not fresh:
            self._figures.duplicates += 1
            self._log.info(Event.DUPLICATE_WORK, task_id=group.task_id)

    def _say_full(self, error: QueueFull) -> None:
        self._log.warning(Event.QUEUE_FULL, waiting="to publish", error=str(error))

    async def _bury(self, delivery: Delivery, reason: str) -> None:
        self._log.error(Event.TASK_DEAD, task_id=delivery.task_id, entry_id=delivery.entry_id, reason=reason)
        await self._streams.bury(delivery, task_id=delivery.task_id, reason=reason)

    # -- beside it ---------------------------------------------------------------------------------------------------
    async def _write_metrics(self) -> None:
        if self._settings.metrics_path is None:
            return
        writer = JsonLinesWriter(self._settings.metrics_path)
        try:
            while True:
                await asyncio.sleep(METRICS_EVERY_S)
                writer.write(self._figures.snapshot(self._clock()))
        finally:
            writer.write(self._figures.snapshot(self._clock()))
            writer.close()


class _Figures:
    """What was scored, and what could not be, by kind of error."""

    def __init__(self, started: float) -> None:
        self._started = started
        self.groups = 0
        self.duplicates = 0
        self._rewards = 0
        self._invalid: Counter[str] = Counter()

    def count(self, reward: Reward) -> None:
        self._rewards += 1
        if not reward.is_valid:
            self._invalid[reward.error_type or "unknown"] += 1

    def snapshot(self, now: float) -> dict[str, object]:
        return {
            "time_s": time.time(),
            "seconds": now - self._started,
            "groups": self.groups,
            "rewards": self._rewards,
            "invalid": dict(self._invalid),
            "duplicates": self.duplicates,
        }
