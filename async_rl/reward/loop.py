"""The reward worker's loop: lease unscored groups, score their members beside each other, move them to `groups`."""

from __future__ import annotations

import asyncio
import math
import time
from collections import Counter
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TypeAlias

from msgspec.structs import replace

from async_rl.environments.base import Episode
from async_rl.environments.episodes import Decode, episode_of
from async_rl.errors import CodecError, MessageTooLarge, QueueFull
from async_rl.logs import Event, get_logger
from async_rl.run_dir.files import JsonLinesWriter
from protocol import event_loop
from protocol.codec import encode
from protocol.deliveries import group_of
from protocol.lease import LeaseKeeper
from protocol.messages import FinishReason, Reward, TrajectoryGroup
from protocol.patience import publish_patiently
from protocol.run_end import RunEnd
from protocol.streams import Delivery, Publication, Stream, Streams

ROLE = "reward"
READ_BLOCK_S = 1.0
METRICS_EVERY_S = 2.0
ABORTED = "aborted"

Score: TypeAlias = Callable[[Episode], Awaitable[Reward]]
ScoreGroup: TypeAlias = Callable[[Sequence[Episode], Sequence[Reward]], Awaitable[Sequence[Reward]]]


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

    score, score_group: never raise for a verifier's sake (see `ScoringPool`); the second sees the members that the first has
    scored. decode: token ids to text.
    """

    def __init__(
        self,
        streams: Streams,
        score: Score,
        decode: Decode,
        settings: RewardSettings,
        *,
        score_group: ScoreGroup | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._streams = streams
        self._score = score
        self._score_group = score_group
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
            await event_loop.end(helpers)
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
        await self._publish(delivery, await self._scored(group))

    async def _scored(self, group: TrajectoryGroup) -> TrajectoryGroup:
        """The group with a reward for every member that had none: each alone first, then all of them together."""
        members = [index for index, trajectory in enumerate(group.trajectories) if trajectory.reward is None]
        sampled = [index for index in members if group.trajectories[index].finish_reason is not FinishReason.ABORTED]
        episodes = [episode_of(group.task, group.trajectories[index], index, self._decode) for index in sampled]
        started = self._clock()
        alone = await asyncio.gather(*(self._timed(episode) for episode in episodes))
        rewards = [reward for reward, _ in alone]
        if self._score_group is not None and episodes:
            rewards = list(await self._score_group(episodes, rewards))
        results = {index: Reward.invalid("sampling was aborted", ABORTED) for index in members}
        results.update(zip(sampled, rewards, strict=True))
        seconds = dict(zip(sampled, (taken for _, taken in alone), strict=True))
        self._figures.group_s.add(self._clock() - started)
        trajectories = list(group.trajectories)
        for index, reward in results.items():
            self._note(group, index, reward, seconds.get(index, 0.0))
            timings = replace(trajectories[index].timings, reward_s=seconds.get(index, 0.0))
            trajectories[index] = replace(trajectories[index], reward=reward, timings=timings)
        return replace(group, trajectories=tuple(trajectories))

    async def _timed(self, episode: Episode) -> tuple[Reward, float]:
        started = self._clock()
        return await self._score(episode), self._clock() - started

    def _note(self, group: TrajectoryGroup, index: int, reward: Reward, seconds: float) -> None:
        self._figures.count(reward, seconds)
        if not reward.is_valid:
            self._log.warning(
                Event.REWARD_INVALID,
                task_id=group.task_id,
                member=index,
                error_type=reward.error_type,
                reason=reward.invalid_reason,
            )

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


class _Latencies:
    """Seconds: how many, their sum, the longest, and a histogram in powers of two from 1 ms (quantiles to a factor of 2)."""

    def __init__(self) -> None:
        self.count = 0
        self._sum_s = 0.0
        self._longest_s = 0.0
        self._buckets: Counter[int] = Counter()

    def add(self, seconds: float) -> None:
        self.count += 1
        self._sum_s += seconds
        self._longest_s = max(self._longest_s, seconds)
        self._buckets[max(0, math.ceil(math.log2(max(seconds, 1e-9) / 1e-3)))] += 1

    def snapshot(self) -> dict[str, float]:
        mean = self._sum_s / self.count if self.count else 0.0
        quantiles = {f"p{round(share * 100)}_s": self._quantile(share) for share in (0.5, 0.99)}
        return {"count": self.count, "mean_s": mean, **quantiles, "max_s": self._longest_s}

    def _quantile(self, share: float) -> float:
        """Upper bound of the bucket that holds it, and never more than the longest."""
        seen = 0
        for bucket in sorted(self._buckets):
            seen += self._buckets[bucket]
            if seen >= share * self.count:
                return min(float(2.0**bucket * 1e-3), self._longest_s)
        return 0.0


class _Figures:
    """What was scored and how long it took, and what could not be, by kind of error."""

    def __init__(self, started: float) -> None:
        self._started = started
        self.groups = 0
        self.duplicates = 0
        self.group_s = _Latencies()
        self._rewards = 0
        self._invalid: Counter[str] = Counter()
        self._valid_s = _Latencies()
        self._invalid_s: dict[str, _Latencies] = {}

    def count(self, reward: Reward, seconds: float) -> None:
        self._rewards += 1
        if reward.is_valid:
            self._valid_s.add(seconds)
            return
        kind = reward.error_type or "unknown"
        self._invalid[kind] += 1
        self._invalid_s.setdefault(kind, _Latencies()).add(seconds)

    def snapshot(self, now: float) -> dict[str, object]:
        return {
            "time_s": time.time(),
            "seconds": now - self._started,
            "groups": self.groups,
            "rewards": self._rewards,
            "invalid": dict(self._invalid),
            "duplicates": self.duplicates,
            "latency": {"valid": self._valid_s.snapshot(), "group": self.group_s.snapshot()},
            "latency_invalid": {kind: latencies.snapshot() for kind, latencies in self._invalid_s.items()},
        }
