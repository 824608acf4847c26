"""`Streams` on a Redis or Valkey server (6.2 and newer): every move is one Lua script, see lua/ and docs/wire-protocol.md."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from itertools import groupby
from typing import Any, TypeVar

from redis.asyncio import Redis

from protocol import redis_replies as replies
from protocol.errors import EpochFenced, QueueRefused
from protocol.keys import Keys, trainer_consumer
from protocol.packing import pack
from protocol.redis_client import RedisClient
from protocol.streams import (
    GROUP_OF,
    Counters,
    DeadEntry,
    Delivery,
    Finished,
    IssuedTask,
    Publication,
    RunState,
    Started,
    Stream,
    StreamDepth,
    WorkerLease,
    check_size,
    short_reason,
)
from protocol.tls import TlsFiles

T = TypeVar("T")

_BATCH_ENTRIES = 256
_BATCH_BYTES = 8 * 2**20
"""One script call moves at most this much: the server does nothing else meanwhile."""


async def require_server(url: str, *, timeout_s: float, retry_s: float, tls: TlsFiles = TlsFiles()) -> None:
    """Look at a server before anything is started. Raises: QueueUnavailable if it does not answer, QueueRefused if it cannot be
    used safely."""
    client = RedisClient(url, timeout_s=timeout_s, retry_s=retry_s, tls=tls)
    try:
        replies.check_server(replies.info(await client.execute("INFO")), client.shown_url)
    finally:
        await client.close()


class RedisStreams:
    """See `protocol.streams.Streams` for what each method promises.

    timeout_s: longest wait for one answer. retry_s: how long a lost server is tried before QueueUnavailable; `publish` waits
    as long for a full server, everything else that a full server refuses raises QueueFull at once. lease_s: after the server
    was away nothing is claimed for this long, so that live workers can renew their leases first. tls: for rediss://.
    """

    def __init__(
        self,
        url: str,
        run_id: str,
        *,
        max_message_bytes: int = 256 * 2**20,
        timeout_s: float = 5.0,
        retry_s: float = 60.0,
        lease_s: float = 15.0,
        now: Callable[[], float] = time.monotonic,
        sleep: Callable[[float], Awaitable[None]] = asyncio.sleep,
        tls: TlsFiles = TlsFiles(),
    ) -> None:
        self.keys = Keys(run_id)
        self._max_message_bytes = max_message_bytes
        self._timeout_s = timeout_s
        self._lease_s = lease_s
        self._client = RedisClient(url, timeout_s=timeout_s, retry_s=retry_s, now=now, sleep=sleep, tls=tls)
        self._client.repair = self._create_streams

    @property
    def client(self) -> Redis:
        """The redis-py client over the same connections, for others that keep state on this server."""
        return self._client.redis

    async def open(self) -> None:
        info = replies.info(await self._client.execute("INFO", retry_s=self._timeout_s))
        replies.check_server(info, self._client.shown_url)
        await self._client.pipeline([("MULTI",), ("EXEC",)])  # without the right to, what `publish` sends would come apart
        await self._client.load_scripts()
        await self._create_streams()

    async def _create_streams(self) -> None:
        streams = [self.keys.stream(stream) for stream in GROUP_OF]
        await self._client.script("open", [self.keys.state, *streams], [*GROUP_OF.values()], retry_s=self._timeout_s)

    async def close(self) -> None:
        await self._client.close()

    async def server_id(self) -> str:
        return replies.info(await self._client.execute("INFO", "server"))["run_id"]

    # -- coordinator ---------------------------------------------------------------------------------------------
    async def issue(self, cursor: int, tasks: Sequence[IssuedTask], *, next_cursor: int) -> bool:
        self._check_tasks(tasks)
        keys = [self.keys.state, self.keys.stream(Stream.TASKS), self.keys.outstanding]
        return bool(await self._client.script("issue", keys, [cursor, next_cursor, *_flat(tasks)]))

    async def mark_exhausted(self, cursor: int) -> bool:
        return bool(await self._client.script("mark_exhausted", [self.keys.state], [cursor]))

    async def reissue(self, tasks: Sequence[IssuedTask]) -> int:
        self._check_tasks(tasks)
        keys = [self.keys.state, self.keys.outstanding, *map(self.keys.stream, Stream)]
        num_added = 0
        for batch in _batches(tasks, lambda task: len(task.payload)):
            num_added += await self._client.script("reissue", keys, _flat(batch))
        return num_added

    async def readmit(self, tasks: Sequence[IssuedTask]) -> int:
        self._check_tasks(tasks)
        keys = [self.keys.state, self.keys.stream(Stream.TASKS), self.keys.outstanding]
        num_added = 0
        for batch in _batches(tasks, lambda task: len(task.payload)):
            num_added += await self._client.script("readmit", keys, _flat(batch))
        return num_added

    async def mended(self, lost_from: int, lost_below: int) -> None:
        await self._client.script("mended", [self.keys.state], [lost_from, lost_below])

    async def counters(self) -> Counters:
        names = ("status", "epoch", "cursor", "issued", "discarded", "lost_from", "lost_below")
        values, outstanding = await self._client.pipeline([("HMGET", self.keys.state, *names), ("HLEN", self.keys.outstanding)])
        state = RunState.NEW if values[0] is None else RunState(values[0].decode())
        epoch, cursor, issued, discarded, lost_from, lost_below = (int(value or 0) for value in values[1:])
        return Counters(state, epoch, cursor, issued, discarded, int(outstanding), lost_from, lost_below)

    async def outstanding(self) -> frozenset[str]:
        return frozenset(replies.texts(await self._client.execute("HKEYS", self.keys.outstanding)))

    # -- every worker --------------------------------------------------------------------------------------------
    async def heartbeat(self, worker_id: str, role: str, *, ttl_s: float, info: Mapping[str, str] | None = None) -> None:
        value = pack({"role": role, "info": dict(info or {})})
        keys = [self.keys.lease(worker_id), self.keys.workers, self.keys.pulse]
        await self._client.script("heartbeat", keys, [max(1, round(ttl_s * 1000)), value, worker_id])

    async def leave(self, worker_id: str) -> None:
        keys = [self.keys.lease(worker_id), self.keys.workers, *map(self.keys.stream, GROUP_OF)]
        await self._client.script("leave", keys, [worker_id, *GROUP_OF.values()])

    async def workers(self) -> Sequence[WorkerLease]:
        worker_ids = sorted(replies.texts(await self._client.execute("SMEMBERS", self.keys.workers)))
        if not worker_ids:
            return []
        commands = [(command, self.keys.lease(name)) for name in worker_ids for command in ("GET", "PTTL")]
        answers = await self._client.pipeline(commands)
        alive = [(name, value, ttl) for name, value, ttl in zip(worker_ids, answers[::2], answers[1::2], strict=True) if value]
        return [replies.worker_lease(name, value, ttl) for name, value, ttl in alive]

    async def read(self, stream: Stream, worker_id: str, *, count: int, block_s: float) -> Sequence[Delivery]:
        command = self._read_command(stream, worker_id, count, block_s)
        return replies.read_deliveries(stream, await self._client.execute(*command, block_s=block_s))

    async def claim(self, stream: Stream, worker_id: str, *, count: int) -> Sequence[Delivery]:
        key, group = self.keys.stream(stream), GROUP_OF[stream]
        info, consumers = await self._client.pipeline([("INFO", "server"), ("XINFO", "CONSUMERS", key, group)])
        if float(replies.info(info)["uptime_in_seconds"]) < self._lease_s:
            return []  # the server has just come back: live workers had no chance yet to renew their leases
        others = [name for name in replies.texts(consumer[1] for consumer in consumers) if name != worker_id]
        if not others:
            return []
        keys = [key, self.keys.pulse, *map(self.keys.lease, others)]
        args = [group, worker_id, count, round(self._lease_s * 1000), *others]
        claimed = await self._client.script("claim", keys, args)
        return replies.deliveries(stream, claimed)

    async def own_pending(self, stream: Stream, worker_id: str) -> Sequence[Delivery]:
        mine: list[Delivery] = []
        start = "-"
        while True:
            args = [GROUP_OF[stream], worker_id, _BATCH_ENTRIES, start]
            batch = await self._client.script("own_pending", [self.keys.stream(stream)], args)
            mine += replies.deliveries(stream, [entry for entry in batch if entry[2]])
            if len(batch) < _BATCH_ENTRIES:
                return mine
            start = f"({batch[-1][0].decode()}"

    async def note_started(self, worker_id: str, versions: Mapping[str, int | None]) -> None:
        for batch in _batches([*versions.items()], lambda _: 0):
            args = [worker_id, *(part for task_id, version in batch for part in (task_id, "" if version is None else version))]
            await self._client.script("note_started", [self.keys.outstanding, self.keys.started], args)

    async def publish(self, publications: Sequence[Publication]) -> Sequence[bool]:
        for publication in publications:
            check_size(publication.payload, self._max_message_bytes, f"group for {publication.target.value}")
        done: list[bool] = []
        for (source, target), same in groupby(publications, lambda publication: (publication.source, publication.target)):
            for batch in _batches([*same], lambda publication: len(publication.payload)):
                task_ids = [publication.task_id for publication in batch]
                if None in task_ids:
                    task_ids = await self._task_ids(batch)
                done += await self._move(source, target, batch, [task_id or "" for task_id in task_ids])
        return done

    async def _move(
        self, source: Stream, target: Stream, batch: Sequence[Publication], task_ids: Sequence[str]
    ) -> Iterable[bool]:
        """One transaction: every group is added, then the script takes out again what should not have been."""
        source_key, target_key = self.keys.stream(source), self.keys.stream(target)
        adds = [
            ("XADD", target_key, "*", "t", task_id, "d", publication.payload)
            for task_id, publication in zip(task_ids, batch, strict=True)
        ]
        keys = [self.keys.state, self.keys.outstanding, source_key, target_key, self.keys.none]
        args = [GROUP_OF[source], source.value, target.value, *(publication.entry_id for publication in batch), *task_ids]
        *_, moved = await self._client.transaction("publish", adds, keys, args)
        return map(bool, moved)

    async def _task_ids(self, publications: Sequence[Publication]) -> list[str | None]:
        """What the source entries say; None where the entry is gone or not ours."""
        commands = [("XRANGE", self.keys.stream(p.source), p.entry_id, p.entry_id) for p in publications]
        found = await self._client.pipeline(commands)
        return [
            replies.delivery(Stream.TASKS, entries[0][0], 1, entries[0][1]).task_id if entries else None for entries in found
        ]

    async def bury(self, delivery: Delivery, *, task_id: str | None, reason: str) -> bool:
        source = delivery.stream
        keys = [self.keys.stream(source), self.keys.stream(Stream.DEAD), self.keys.outstanding, self.keys.newly_dead]
        known_id = delivery.task_id or task_id or ""
        args = [GROUP_OF[source], delivery.entry_id, known_id, delivery.payload, short_reason(reason), source.value]
        return bool(await self._client.script("bury", keys, args))

    # -- trainer -------------------------------------------------------------------------------------------------
    async def raise_epoch(self, at_least: int) -> int:
        return int(await self._client.script("raise_epoch", [self.keys.state, self.keys.none], [at_least]))

    async def take_over(self, epoch: int, *, count: int) -> Sequence[Delivery]:
        group = GROUP_OF[Stream.GROUPS]
        claimed = await self._trainer("take_over", [self.keys.stream(Stream.GROUPS)], [epoch, group, count])
        return replies.deliveries(Stream.GROUPS, claimed)

    async def read_groups(self, epoch: int, *, count: int, block_s: float) -> Sequence[Delivery]:
        command = self._read_command(Stream.GROUPS, trainer_consumer(epoch), count, block_s)
        reply, current = await self._client.pipeline([command, ("HGET", self.keys.state, "epoch")], block_s=block_s)
        if int(current or 0) > epoch:  # somebody newer has started, and will take over what this one just read
            raise EpochFenced(f"this trainer (epoch {epoch}) is fenced: epoch {int(current)} has started; it must stop")
        return replies.read_deliveries(Stream.GROUPS, reply)

    async def finish(self, epoch: int, finished: Sequence[Finished]) -> None:
        keys = [self.keys.stream(Stream.GROUPS), self.keys.outstanding, self.keys.newly_dead, self.keys.started]
        for batch in _batches(finished, lambda _: 0):
            ids = [*(group.entry_id for group in batch), *(group.task_id for group in batch)]
            await self._trainer("finish", keys, [epoch, GROUP_OF[Stream.GROUPS], *ids])

    async def in_flight(self) -> Mapping[str, Started]:
        flat = replies.texts(await self._client.script("in_flight", [self.keys.outstanding, self.keys.started], []))
        # Leases after starts: a lease that ends in between hides a task that will be started again, under a newer version.
        alive = {worker.worker_id for worker in await self.workers()} if flat else set()
        found: dict[str, Started] = {}
        for task_id, record, stream in zip(flat[::3], flat[1::3], flat[2::3], strict=True):
            version, _, worker_id = record.partition(" ")
            if stream != Stream.TASKS.value or worker_id in alive:
                found[task_id] = Started(worker_id, int(version))
        return found

    async def newly_dead(self, epoch: int) -> Mapping[str, str]:
        pairs = replies.texts(await self._trainer("newly_dead", [self.keys.newly_dead], [epoch]))
        return dict(zip(pairs[::2], pairs[1::2], strict=True))

    async def finish_dead(self, epoch: int, task_ids: Sequence[str]) -> None:
        for batch in _batches(task_ids, lambda _: 0):
            keys = [self.keys.outstanding, self.keys.newly_dead, self.keys.started]
            await self._trainer("finish_dead", keys, [epoch, *batch])

    async def report(self, epoch: int, *, discarded: int) -> None:
        await self._trainer("report", [], [epoch, discarded])

    async def end_run(self, epoch: int) -> frozenset[str]:
        return frozenset(replies.texts(await self._trainer("end_run", [self.keys.outstanding], [epoch])))

    async def clear(self, epoch: int) -> None:
        keys = [self.keys.outstanding, self.keys.newly_dead, self.keys.started, *map(self.keys.stream, GROUP_OF)]
        if not await self._trainer("clear", keys, [epoch, *GROUP_OF.values()]):
            raise QueueRefused("clear empties the streams of an ended run; this one has not ended: call end_run first")

    async def restore(self, epoch: int, *, cursor: int, issued: int, first: int = 0) -> bool:
        return bool(await self._trainer("restore", [], [epoch, cursor, issued, first]))

    async def reopen(self, epoch: int) -> None:
        await self._trainer("reopen", [], [epoch])

    # -- people and monitors -------------------------------------------------------------------------------------
    async def depths(self) -> Mapping[Stream, StreamDepth]:
        groups = [GROUP_OF.get(stream, "") for stream in Stream]
        *depths, (seconds, microseconds) = await self._client.script("depths", [*map(self.keys.stream, Stream)], groups)
        now_s = int(seconds) + int(microseconds) / 1e6
        return {
            stream: StreamDepth(int(length), int(pending), replies.age_s(oldest.decode(), now_s))
            for stream, (length, pending, oldest) in zip(Stream, depths, strict=True)
        }

    async def dead_entries(self, *, count: int) -> Sequence[DeadEntry]:
        return await self._dead("-", "+", count)

    async def dead_entry(self, entry_id: str) -> DeadEntry | None:
        found = await self._dead(entry_id, entry_id, 1)
        return found[0] if found else None

    async def _dead(self, first: str, last: str, count: int) -> list[DeadEntry]:
        commands = [
            ("XRANGE", self.keys.stream(Stream.DEAD), first, last, "COUNT", count),
            ("HKEYS", self.keys.newly_dead),
            ("TIME",),
        ]
        entries, unrecorded, (seconds, microseconds) = await self._client.pipeline(commands)
        now_s = int(seconds) + int(microseconds) / 1e6
        return [replies.dead_entry(entry_id, replies.fields(flat), frozenset(unrecorded), now_s) for entry_id, flat in entries]

    async def requeue(self, entry_id: str, *, repeat: IssuedTask, anew: bytes | None = None) -> str | None:
        self._check_tasks([repeat, IssuedTask(entry_id, anew or b"")])
        streams = map(self.keys.stream, (Stream.DEAD, Stream.TASKS, Stream.UNSCORED, Stream.GROUPS))
        dead, *targets = streams
        keys = [self.keys.state, dead, self.keys.outstanding, self.keys.newly_dead, *targets, self.keys.started]
        queued = await self._client.script("requeue", keys, [entry_id, anew or b"", repeat.task_id, repeat.payload])
        return None if queued is None else str(queued.decode())

    async def drop_dead(self, entry_id: str) -> bool:
        return bool(await self._client.execute("XDEL", self.keys.stream(Stream.DEAD), entry_id))

    # -- inside --------------------------------------------------------------------------------------------------
    async def _trainer(self, script: str, keys: Sequence[str], args: Sequence[Any]) -> Any:
        """A script that begins with the fence."""
        return await self._client.script(script, [self.keys.state, self.keys.none, *keys], args)

    def _check_tasks(self, tasks: Iterable[IssuedTask]) -> None:
        for task in tasks:
            check_size(task.payload, self._max_message_bytes, f"task {task.task_id}")

    def _read_command(self, stream: Stream, consumer: str, count: int, block_s: float) -> list[Any]:
        block = ["BLOCK", max(1, round(block_s * 1000))] if block_s > 0 else []  # BLOCK 0 would wait for ever
        return [
            "XREADGROUP",
            "GROUP",
            GROUP_OF[stream],
            consumer,
            "COUNT",
            count,
            *block,
            "STREAMS",
            self.keys.stream(stream),
            ">",
        ]


def _flat(tasks: Iterable[IssuedTask]) -> list[str | bytes]:
    return [part for task in tasks for part in (task.task_id, task.payload)]


def _batches(items: Sequence[T], size: Callable[[T], int]) -> Iterable[list[T]]:
    """Parts of `items` that one script call moves."""
    batch: list[T] = []
    num_bytes = 0
    for item in items:
        if batch and (len(batch) == _BATCH_ENTRIES or num_bytes + size(item) > _BATCH_BYTES):
            yield batch
            batch, num_bytes = [], 0
        batch.append(item)
        num_bytes += size(item)
    if batch:
        yield batch
