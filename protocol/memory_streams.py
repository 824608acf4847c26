"""`Streams` inside one process: the same promises as `redis_streams` (one contract suite), for tests and single-process runs.

One object is the whole queue; every role of the process shares it. Single-threaded asyncio: each method runs without a
suspension point between check and effect, so each is atomic, as its Lua script is.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Iterable, Mapping, Sequence

from protocol.errors import EpochFenced, QueueRefused
from protocol.keys import trainer_consumer
from protocol.memory_run import Entry, Lease, Run, delivery, is_older
from protocol.streams import (
    SUSPECT_DELIVERIES,
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


class MemoryStreams:
    """See `protocol.streams.Streams` for what each method promises."""

    def __init__(
        self, *, max_message_bytes: int = 256 * 2**20, now: Callable[[], float] = time.monotonic, lease_s: float = 0.0
    ) -> None:
        self._max_message_bytes = max_message_bytes
        self._now = now
        self._lease_s = lease_s
        self._renewed_s: float | None = None  # when a lease was last renewed, and since when without a gap
        self._renewed_since_s = 0.0
        self._run = Run()
        self._leases: dict[str, Lease] = {}
        self._num_entries = 0
        self._server = 1
        self._arrival = asyncio.Event()

    async def open(self) -> None:
        if self._run.state is RunState.NEW:
            self._run.state = RunState.RUNNING

    async def close(self) -> None:
        pass

    async def server_id(self) -> str:
        return f"memory-{self._server}"

    def lose_everything(self) -> None:
        """What an emptied server looks like: the run's streams, counters and epoch are gone."""
        self._run = Run(RunState.RUNNING)

    def restart(self) -> None:
        """What a restarted server looks like: a new id, everything else kept."""
        self._server += 1

    # -- coordinator ---------------------------------------------------------------------------------------------
    async def issue(self, cursor: int, tasks: Sequence[IssuedTask], *, next_cursor: int) -> bool:
        for task in tasks:
            check_size(task.payload, self._max_message_bytes, f"task {task.task_id}")
        run = self._run
        if run.state is RunState.ENDED or run.cursor != cursor:
            return False
        for task in tasks:
            self._add(Stream.TASKS, task.task_id, task.payload)
        run.cursor = next_cursor
        run.issued += len(tasks)
        return True

    async def mark_exhausted(self, cursor: int) -> bool:
        if self._run.state is RunState.RUNNING and self._run.cursor == cursor:
            self._run.state = RunState.EXHAUSTED
        return self._run.state is RunState.EXHAUSTED

    async def reissue(self, tasks: Sequence[IssuedTask]) -> int:
        if self._run.state is RunState.ENDED:
            return 0
        num_added = 0
        for task in tasks:
            check_size(task.payload, self._max_message_bytes, f"task {task.task_id}")
            place = self._run.outstanding.get(task.task_id)
            if place is not None and place[1] not in self._run.entries[place[0]]:
                self._add(Stream.TASKS, task.task_id, task.payload)
                num_added += 1
        return num_added

    async def readmit(self, tasks: Sequence[IssuedTask]) -> int:
        if self._run.state is RunState.ENDED:
            return 0
        missing = [task for task in tasks if task.task_id not in self._run.outstanding]
        for task in missing:
            check_size(task.payload, self._max_message_bytes, f"task {task.task_id}")
            self._add(Stream.TASKS, task.task_id, task.payload)
        return len(missing)

    async def mended(self, lost_from: int, lost_below: int) -> None:
        if self._run.lost == (lost_from, lost_below):
            self._run.lost = None

    async def counters(self) -> Counters:
        run = self._run
        lost = run.lost or (0, 0)
        return Counters(run.state, run.epoch, run.cursor, run.issued, run.discarded, len(run.outstanding), *lost)

    async def outstanding(self) -> frozenset[str]:
        return frozenset(self._run.outstanding)

    # -- every worker --------------------------------------------------------------------------------------------
    async def heartbeat(self, worker_id: str, role: str, *, ttl_s: float, info: Mapping[str, str] | None = None) -> None:
        now = self._now()
        if self._renewed_s is None or now - self._renewed_s > ttl_s / 2:
            self._renewed_since_s = now
        self._renewed_s = now
        self._leases[worker_id] = Lease(role, dict(info or {}), now + ttl_s)

    async def leave(self, worker_id: str) -> None:
        self._leases.pop(worker_id, None)

    async def workers(self) -> Sequence[WorkerLease]:
        now = self._now()
        return [
            WorkerLease(worker_id, lease.role, lease.expires_s - now, dict(lease.info))
            for worker_id, lease in sorted(self._leases.items())
            if lease.expires_s > now
        ]

    async def read(self, stream: Stream, worker_id: str, *, count: int, block_s: float) -> Sequence[Delivery]:
        taken = self._read_new(stream, worker_id, count)
        if taken or block_s <= 0:
            return taken
        try:
            async with asyncio.timeout(block_s):
                while not taken:
                    await self._arrival.wait()
                    taken = self._read_new(stream, worker_id, count)
        except TimeoutError:
            pass
        return taken

    async def claim(self, stream: Stream, worker_id: str, *, count: int) -> Sequence[Delivery]:
        if self._lease_s > 0 and self._renewed_s is not None:
            now = self._now()
            if now - self._renewed_s > self._lease_s / 2 or now - self._renewed_since_s < self._lease_s:
                return []  # everybody is to have the chance to renew first
        entries = self._run.entries[stream].values()
        may_take_suspect = not any(e.consumer == worker_id and e.delivery_count > SUSPECT_DELIVERIES for e in entries)
        claimed: list[Delivery] = []
        for entry in self._held_by_gone(entries, worker_id):
            if entry.delivery_count >= SUSPECT_DELIVERIES:
                if may_take_suspect and not claimed:
                    return [self._deliver(stream, entry, worker_id)]
            elif len(claimed) < count:
                claimed.append(self._deliver(stream, entry, worker_id))
        return claimed

    async def own_pending(self, stream: Stream, worker_id: str) -> Sequence[Delivery]:
        return [delivery(stream, e) for e in self._run.entries[stream].values() if e.consumer == worker_id]

    async def note_started(self, worker_id: str, versions: Mapping[str, int | None]) -> None:
        for task_id, version in versions.items():
            if version is None:
                self._run.started.pop(task_id, None)
            elif task_id in self._run.outstanding:
                self._run.started[task_id] = Started(worker_id, version)

    async def publish(self, publications: Sequence[Publication]) -> Sequence[bool]:
        for publication in publications:
            check_size(publication.payload, self._max_message_bytes, f"group for {publication.target.value}")
        return [self._publish(publication) for publication in publications]

    async def bury(self, delivery: Delivery, *, task_id: str | None, reason: str) -> bool:
        entry = self._run.entries[delivery.stream].get(delivery.entry_id)
        if entry is None or entry.consumer is None:
            return False
        del self._run.entries[delivery.stream][delivery.entry_id]
        task_id, reason = entry.task_id or task_id, short_reason(reason)
        dead = self._append(Stream.DEAD, task_id, entry.payload or delivery.payload)
        dead.delivery_count = entry.delivery_count
        self._run.deaths[dead.entry_id] = (reason, delivery.stream)
        if task_id in self._run.outstanding:
            self._run.outstanding[task_id] = (Stream.DEAD, dead.entry_id)
            self._run.newly_dead[task_id] = reason
        return True

    # -- trainer -------------------------------------------------------------------------------------------------
    async def raise_epoch(self, at_least: int) -> int:
        self._run.epoch = max(self._run.epoch + 1, at_least)
        return self._run.epoch

    async def take_over(self, epoch: int, *, count: int) -> Sequence[Delivery]:
        self._fence(epoch)
        taken: list[Delivery] = []
        for entry in self._run.entries[Stream.GROUPS].values():
            if len(taken) < count and entry.consumer is not None and is_older(entry.consumer, epoch):
                taken.append(self._deliver(Stream.GROUPS, entry, trainer_consumer(epoch)))
        return taken

    async def read_groups(self, epoch: int, *, count: int, block_s: float) -> Sequence[Delivery]:
        self._fence(epoch)
        deliveries = await self.read(Stream.GROUPS, trainer_consumer(epoch), count=count, block_s=block_s)
        self._fence(epoch)
        return deliveries

    async def finish(self, epoch: int, finished: Sequence[Finished]) -> None:
        self._fence(epoch)
        for group in finished:
            self._run.entries[Stream.GROUPS].pop(group.entry_id, None)
            self._run.outstanding.pop(group.task_id, None)
            self._run.newly_dead.pop(group.task_id, None)
            self._run.started.pop(group.task_id, None)

    async def in_flight(self) -> Mapping[str, Started]:
        run, now = self._run, self._now()
        alive = {name for name, lease in self._leases.items() if lease.expires_s > now}
        placed = ((task_id, run.outstanding[task_id][0], started) for task_id, started in run.started.items())
        return {
            task_id: started
            for task_id, stream, started in placed
            if stream in (Stream.UNSCORED, Stream.GROUPS) or (stream is Stream.TASKS and started.worker_id in alive)
        }

    async def newly_dead(self, epoch: int) -> Mapping[str, str]:
        self._fence(epoch)
        return dict(self._run.newly_dead)

    async def finish_dead(self, epoch: int, task_ids: Sequence[str]) -> None:
        self._fence(epoch)
        for task_id in task_ids:
            self._run.outstanding.pop(task_id, None)
            self._run.newly_dead.pop(task_id, None)
            self._run.started.pop(task_id, None)

    async def report(self, epoch: int, *, discarded: int) -> None:
        self._fence(epoch)
        self._run.discarded = discarded

    async def end_run(self, epoch: int) -> frozenset[str]:
        self._fence(epoch)
        self._run.state = RunState.ENDED
        return frozenset(self._run.outstanding)

    async def clear(self, epoch: int) -> None:
        self._fence(epoch)
        if self._run.state is not RunState.ENDED:
            raise QueueRefused("clear empties the streams of an ended run; this one has not ended: call end_run first")
        for stream in (Stream.TASKS, Stream.UNSCORED, Stream.GROUPS):
            self._run.entries[stream].clear()
        self._run.outstanding.clear()
        self._run.newly_dead.clear()
        self._run.started.clear()

    async def restore(self, epoch: int, *, cursor: int, issued: int, first: int = 0) -> bool:
        self._fence(epoch)
        run = self._run
        if run.cursor >= cursor:
            return False
        lost_from = max(run.cursor, first)
        if run.lost is not None:
            lost_from = min(lost_from, run.lost[0])
        run.cursor, run.issued = cursor, max(run.issued, issued)
        if lost_from < cursor:
            run.lost = (lost_from, cursor)
        return True

    async def reopen(self, epoch: int) -> None:
        self._fence(epoch)
        if self._run.state is RunState.ENDED:
            self._run.state = RunState.RUNNING

    # -- people and monitors -------------------------------------------------------------------------------------
    async def depths(self) -> Mapping[Stream, StreamDepth]:
        now = self._now()
        depths: dict[Stream, StreamDepth] = {}
        for stream, entries in self._run.entries.items():
            oldest = min((entry.added_s for entry in entries.values()), default=None)
            num_pending = sum(entry.consumer is not None for entry in entries.values())
            depths[stream] = StreamDepth(len(entries), num_pending, None if oldest is None else now - oldest)
        return depths

    async def dead_entries(self, *, count: int) -> Sequence[DeadEntry]:
        return [self._dead_entry(entry) for entry in [*self._run.entries[Stream.DEAD].values()][:count]]

    async def dead_entry(self, entry_id: str) -> DeadEntry | None:
        entry = self._run.entries[Stream.DEAD].get(entry_id)
        return None if entry is None else self._dead_entry(entry)

    async def requeue(self, entry_id: str, *, repeat: IssuedTask, anew: bytes | None = None) -> str | None:
        check_size(repeat.payload, self._max_message_bytes, f"task {repeat.task_id}")
        check_size(anew or b"", self._max_message_bytes, f"task {entry_id}")
        run = self._run
        entry = run.entries[Stream.DEAD].get(entry_id)
        if entry is None or entry.task_id is None or run.state is RunState.ENDED:
            return None
        task_id, target, payload = entry.task_id, run.deaths[entry_id][1], entry.payload
        if task_id not in run.newly_dead:
            if repeat.task_id in run.outstanding:
                return None
            task_id, target, payload = repeat.task_id, Stream.TASKS, repeat.payload
            run.issued += 1
        elif anew is not None:
            target, payload = Stream.TASKS, anew
        self._add(target, task_id, payload)
        run.newly_dead.pop(task_id, None)
        run.started.pop(task_id, None)
        del run.entries[Stream.DEAD][entry_id]
        return task_id

    async def drop_dead(self, entry_id: str) -> bool:
        return self._run.entries[Stream.DEAD].pop(entry_id, None) is not None

    # -- inside --------------------------------------------------------------------------------------------------
    def add_foreign(self, stream: Stream, payload: bytes) -> str:
        """An entry that no role of ours wrote (for tests); its id."""
        return self._append(stream, None, payload).entry_id

    def _append(self, stream: Stream, task_id: str | None, payload: bytes) -> Entry:
        self._num_entries += 1
        entry = Entry(f"{self._num_entries}-0", task_id, payload, self._now())
        self._run.entries[stream][entry.entry_id] = entry
        self._arrival.set()
        self._arrival = asyncio.Event()  # whoever waits holds the old one, and wakes
        return entry

    def _add(self, stream: Stream, task_id: str, payload: bytes) -> None:
        self._run.outstanding[task_id] = (stream, self._append(stream, task_id, payload).entry_id)

    def _dead_entry(self, entry: Entry) -> DeadEntry:
        reason, source = self._run.deaths[entry.entry_id]
        age_s, recorded = self._now() - entry.added_s, entry.task_id not in self._run.newly_dead
        return DeadEntry(entry.entry_id, entry.task_id, entry.payload, reason, entry.delivery_count, source, age_s, recorded)

    def _publish(self, publication: Publication) -> bool:
        entry = self._run.entries[publication.source].get(publication.entry_id)
        if self._run.state is RunState.ENDED or entry is None or entry.consumer is None:
            return False
        del self._run.entries[publication.source][publication.entry_id]
        if entry.task_id is None or self._run.outstanding.get(entry.task_id) != (publication.source, publication.entry_id):
            return False  # its group is in the log already, or its task is elsewhere
        self._add(publication.target, entry.task_id, publication.payload)
        return True

    def _read_new(self, stream: Stream, worker_id: str, count: int) -> list[Delivery]:
        new = [entry for entry in self._run.entries[stream].values() if entry.consumer is None][:count]
        return [self._deliver(stream, entry, worker_id) for entry in new]

    def _held_by_gone(self, entries: Iterable[Entry], worker_id: str) -> Iterable[Entry]:
        alive = {name for name, lease in self._leases.items() if lease.expires_s > self._now()} | {worker_id, None}
        return [entry for entry in entries if entry.consumer not in alive]

    def _deliver(self, stream: Stream, entry: Entry, worker_id: str) -> Delivery:
        entry.consumer = worker_id
        entry.delivery_count += 1
        return delivery(stream, entry)

    def _fence(self, epoch: int) -> None:
        if self._run.epoch > epoch:
            raise EpochFenced(
                f"trainer of epoch {epoch} is fenced: epoch {self._run.epoch} has started; this process must stop"
            )
        self._run.epoch = epoch
