"""The coordinator's loop: admit tasks as versions are served, drive weight pushes, mend the queue after a lost write.

It holds no state of its own. Cursor, counters and leases are the queue's, versions are the registry's, and every task can
be made again from its cursor or its id; so it can be killed at any point, and two of them do no harm.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

from async_rl.config.run import RunConfig
from async_rl.coordinator.admission import may_issue
from async_rl.coordinator.leases import Leases
from async_rl.coordinator.pushes import PushSupervisor
from async_rl.coordinator.sources import TaskSource
from async_rl.errors import QueueFull, QueueUnavailable
from async_rl.logs import Event, get_logger
from async_rl.registry.versions import RegistryState, VersionRegistry, min_served
from async_rl.run_dir.log_index import LogIndex
from protocol.codec import encode
from protocol.lease import LeaseKeeper, Work
from protocol.messages import PromptTask
from protocol.run_end import RunEnd
from protocol.streams import Counters, IssuedTask, RunState, Streams

ROLE = "coordinator"
ISSUE_BATCH = 64
COUNTERS_POLL_S = 0.1  # discarded groups give room back without a change in the registry
SERVER_POLL_S = 1.0
RETRY_S = 0.2
SAY_WAITING_S = 10.0


@dataclass(frozen=True, slots=True)
class CoordinatorSettings:
    """What the loop itself needs to know."""

    worker_id: str
    max_lag: int
    groups_per_step: int
    groups_needed: int | None
    lease_s: float
    push_deadline_s: float
    reopen_wait_s: float
    progress_s: float = 600.0  # longest stand-still of reading prompts or the log that the lease is renewed for

    @staticmethod
    def from_config(config: RunConfig, worker_id: str, *, first_version: int = 0) -> CoordinatorSettings:
        """first_version: policy version that the run began from; a fork does not begin at 0."""
        return CoordinatorSettings(
            worker_id=worker_id,
            max_lag=config.staleness.max_lag,
            groups_per_step=config.trainer.groups_per_step,
            groups_needed=max(0, config.trainer.max_steps - first_version) * config.trainer.groups_per_step,
            lease_s=config.redis.lease_s,
            push_deadline_s=config.weights.deadline_s,
            reopen_wait_s=config.redis.retry_s,
            progress_s=config.redis.progress_timeout_s,
        )


class CoordinatorLoop:
    """Runs until the run has ended, or until `stop()`.

    read_log: what the run's intake log knows, asked only when the server lost tasks. clock: seconds, for waits and leases.
    unix_clock: stamps tasks and push plans.
    """

    def __init__(
        self,
        streams: Streams,
        registry: VersionRegistry,
        source: TaskSource,
        settings: CoordinatorSettings,
        *,
        read_log: Callable[[], LogIndex] = LogIndex,
        clock: Callable[[], float] = time.monotonic,
        unix_clock: Callable[[], float] = time.time,
    ) -> None:
        self._streams = streams
        self._registry = registry
        self._source = source
        self._settings = settings
        self._read_log = read_log
        self._clock = clock
        self._unix_clock = unix_clock
        self._log = get_logger()
        self._leases = Leases(streams, lease_s=settings.lease_s, clock=clock)
        self._pushes = PushSupervisor(registry, self._leases.read, deadline_s=settings.push_deadline_s, clock=unix_clock)
        self._end = RunEnd(streams, reopen_wait_s=settings.reopen_wait_s, clock=clock)
        self._stopping = asyncio.Event()
        self._reading, self._mending = Work(clock=clock), Work(clock=clock)
        self._lease = LeaseKeeper(
            streams,
            settings.worker_id,
            ROLE,
            lease_s=settings.lease_s,
            progress_s=settings.progress_s,
            works=[self._reading, self._mending],
            on_stall=lambda reason: self._log.error(Event.WORK_STALLED, reason=reason),
        )
        self._unserved_since: float | None = None
        self._said_unserved = False
        self._said_full = False

    def stop(self) -> None:
        """Issue nothing more, leave. What is outstanding stays in the queue."""
        self._stopping.set()

    async def run(self) -> bool:
        """Coordinate. True: the run has ended; False: `stop` was called before.

        Raises: DataError for a row that changed under us; QueueUnavailable after redis.retry_s.
        """
        await self._streams.open()
        async with asyncio.TaskGroup() as tasks:
            helpers = [tasks.create_task(work) for work in (self._lease.run(), self._pushes.run(), self._watch_server())]
            stopped = tasks.create_task(self._stopping.wait())
            issuing = tasks.create_task(self._issue_until_the_end())
            await asyncio.wait({stopped, issuing}, return_when=asyncio.FIRST_COMPLETED)
            for helper in (*helpers, stopped, issuing):
                helper.cancel()
        await self._streams.leave(self._settings.worker_id)
        return issuing.done() and not issuing.cancelled()

    # -- admission ---------------------------------------------------------------------------------------------------
    async def _issue_until_the_end(self) -> None:
        while True:
            try:
                state = await self._registry.state()
            except QueueUnavailable:
                await asyncio.sleep(RETRY_S)  # the streams' own calls say when it has been away for too long
                await self._streams.counters()
                continue
            counters = await self._streams.counters()
            if await self._end.is_over(counters.state):
                self._log.info(Event.RUN_ENDED, issued=counters.issued)
                return
            if await self._issue_once(state, counters):
                continue
            await self._wait_for_change(state.revision)

    async def _issue_once(self, state: RegistryState, counters: Counters) -> bool:
        """Issue what may be issued, at most a batch. True if something changed and there may be more to do."""
        if counters.state is not RunState.RUNNING or counters.has_losses:
            return False
        if self._source.is_end(counters.cursor):
            return await self._mark_exhausted(counters.cursor)
        served = trained_through_served(state, await self._alive(state))
        self._note_served(served)
        room = may_issue(
            counters,
            served,
            self._settings.max_lag,
            self._settings.groups_per_step,
            groups_needed=self._settings.groups_needed,
        )
        if room == 0:
            return False
        with self._reading.doing("reading prompts"):
            tasks = await asyncio.to_thread(self._tasks_from, counters.cursor, min(room, ISSUE_BATCH))
        return await self._issue(counters.cursor, tasks)

    async def _issue(self, cursor: int, tasks: Sequence[IssuedTask]) -> bool:
        """True if the tasks are out, or another coordinator was faster: read the counters again. False: the server is full."""
        try:
            fresh = await self._streams.issue(cursor, tasks, next_cursor=cursor + len(tasks))
        except QueueFull as error:
            if not self._said_full:
                self._log.warning(Event.QUEUE_FULL, waiting="to issue", error=str(error))
            self._said_full = True
            return False
        self._said_full = False
        self._log.debug("tasks.issued", cursor=cursor, count=len(tasks), fresh=fresh)
        return True

    async def _mark_exhausted(self, cursor: int) -> bool:
        if not await self._streams.mark_exhausted(cursor):
            return True  # somebody issued or ended meanwhile
        self._log.info(Event.DATA_EXHAUSTED, cursor=cursor)
        return False

    def _tasks_from(self, cursor: int, count: int) -> list[IssuedTask]:
        now = self._unix_clock()
        tasks = (self._source.task_at(cursor + offset, issued_at_s=now) for offset in range(count))
        return [_issued(task) for task in tasks if task is not None]

    async def _alive(self, state: RegistryState) -> frozenset[str]:
        return await self._leases.alive({engine.worker_id for engine in state.engines.values()})

    async def _wait_for_change(self, revision: int) -> None:
        try:
            await self._registry.wait_change(revision, timeout_s=COUNTERS_POLL_S)
        except QueueUnavailable:
            await asyncio.sleep(RETRY_S)

    def _note_served(self, served: int | None) -> None:
        """Say, once, that admission holds because no healthy engine serves."""
        if served is not None:
            self._unserved_since, self._said_unserved = None, False
            return
        now = self._clock()
        if self._unserved_since is None:
            self._unserved_since = now
        waited_s = now - self._unserved_since
        if waited_s >= SAY_WAITING_S and not self._said_unserved:
            self._said_unserved = True
            self._log.warning(Event.WAITING, waiting_for="a healthy engine that serves a version", seconds=round(waited_s, 1))

    # -- beside it ---------------------------------------------------------------------------------------------------
    async def _watch_server(self) -> None:
        """Mend the queue at start and whenever the server is another process than before: it may have lost writes."""
        server: str | None = None
        while True:
            current = await self._streams.server_id()
            if current != server:
                reissued = await self._reissue_lost()
                if server is not None:
                    self._log.warning(Event.QUEUE_BACK, server=current, before=server, reissued=reissued)
                server = current
            await self._readmit_lost()
            await asyncio.sleep(SERVER_POLL_S)

    async def _readmit_lost(self) -> None:
        """Make the tasks again that a server lost with its counters, but for those that the log knows."""
        counters = await self._streams.counters()
        if not counters.has_losses:
            return
        with self._mending.doing("reading the intake log"):
            index = await asyncio.to_thread(self._read_log)
        readmitted = 0
        try:
            for start in range(counters.lost_from, counters.lost_below, ISSUE_BATCH):
                count = min(ISSUE_BATCH, counters.lost_below - start)
                tasks = await asyncio.to_thread(self._tasks_from, start, count)
                readmitted += await self._streams.readmit([task for task in tasks if not index.knows(task.task_id)])
        except QueueFull as error:
            self._log.warning(Event.QUEUE_FULL, waiting="to readmit lost tasks", error=str(error))
            return  # the next look goes on
        await self._streams.mended(counters.lost_from, counters.lost_below)
        self._log.warning(Event.TASK_RECLAIMED, count=readmitted, reason="the server lost them", cursor=counters.cursor)

    async def _reissue_lost(self) -> int:
        """Put outstanding tasks that are in no stream back, under the same ids. Returns how many there were."""
        outstanding = sorted(await self._streams.outstanding())
        reissued = 0
        for start in range(0, len(outstanding), ISSUE_BATCH):
            batch = outstanding[start : start + ISSUE_BATCH]
            reissued += await self._streams.reissue(await asyncio.to_thread(self._tasks_of, batch))
        if reissued:
            self._log.warning(Event.TASK_RECLAIMED, count=reissued, reason="outstanding, but in no stream")
        return reissued

    def _tasks_of(self, task_ids: Iterable[str]) -> list[IssuedTask]:
        now = self._unix_clock()
        found: list[IssuedTask] = []
        for task_id in task_ids:
            task = self._source.task_of(task_id, issued_at_s=now)
            if task is None:
                self._log.error(Event.TASK_DEAD, task_id=task_id, reason="outstanding, but not of this run's data")
            else:
                found.append(_issued(task))
        return found


def trained_through_served(state: RegistryState, alive_workers: frozenset[str]) -> int | None:
    """Groups trained up to the oldest version that a healthy engine serves; None if none serves.

    A version whose count is not known any more counts as the newest known one below it: less, so fewer tasks, never more.
    """
    served = min_served(state, alive_workers)
    if served is None:
        return None
    return max((groups for version, groups in state.trained_through.items() if version <= served), default=0)


def _issued(task: PromptTask) -> IssuedTask:
    return IssuedTask(task.task_id, encode(task))
