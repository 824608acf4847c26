"""The coordinator's loop over the in-memory queue and registry: what is issued, when, and how it ends."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import pytest

from async_rl.coordinator import loop as loop_module
from async_rl.coordinator.loop import CoordinatorLoop, CoordinatorSettings, trained_through_served
from async_rl.coordinator.prompts import PromptSource, TaskTemplate
from async_rl.registry.memory_registry import MemoryRegistry
from async_rl.registry.versions import EngineRecord, EngineStatus, RegistryState
from async_rl.run_dir.end_table import EndTable
from async_rl.run_dir.log_index import LogIndex
from async_rl.testing.environments import NumberedRows
from async_rl.testing.roles import FakeEngine, FakeTrainer, running, until
from protocol.codec import decode_task
from protocol.errors import QueueFull, QueueUnavailable
from protocol.memory_streams import MemoryStreams
from protocol.messages import task_id
from protocol.streams import IssuedTask, RunState, Stream

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

SETTINGS = CoordinatorSettings(
    worker_id="coordinator-0",
    max_lag=1,
    groups_per_step=4,
    groups_needed=None,
    lease_s=3600.0,
    push_deadline_s=60.0,
    reopen_wait_s=0.0,
)


def _source(rows: int = 1000, data_epochs: int | None = None) -> PromptSource:
    template = TaskTemplate("run", "rows", "sort_digits", run_seed=0, group_size=2, temperature=1.0, max_new_tokens=4)
    return PromptSource(NumberedRows(rows), template, shuffle=False, data_epochs=data_epochs)


@dataclass
class _Run:
    streams: MemoryStreams
    registry: MemoryRegistry
    trainer: FakeTrainer
    loops: Sequence[CoordinatorLoop]

    async def issued(self) -> int:
        return (await self.streams.counters()).issued

    async def settles_at(self, issued: int) -> None:
        """`issued` tasks come, and no more within several rounds of the loop."""

        async def reached() -> bool:
            return await self.issued() >= issued

        await until(reached)
        await asyncio.sleep(5 * loop_module.COUNTERS_POLL_S)
        assert await self.issued() == issued


@pytest.fixture(autouse=True)
def _fast_polls(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("COUNTERS_POLL_S", "SERVER_POLL_S", "RETRY_S"):
        monkeypatch.setattr(loop_module, name, 0.01)


@asynccontextmanager
async def _run(
    settings: CoordinatorSettings = SETTINGS,
    source: PromptSource | None = None,
    *,
    streams: MemoryStreams | None = None,
    engines: Sequence[str] = ("w0",),
    coordinators: int = 1,
    known: LogIndex | None = None,
) -> AsyncIterator[_Run]:
    streams = MemoryStreams() if streams is None else streams
    trainer: FakeTrainer
    registry = MemoryRegistry(lambda: trainer.epoch)
    trainer = FakeTrainer(streams, registry)
    loops = [
        CoordinatorLoop(
            streams,
            registry,
            source or _source(),
            replace(settings, worker_id=f"coordinator-{index}"),
            read_log=lambda: known or LogIndex(),
        )
        for index in range(coordinators)
    ]
    workers = [FakeEngine(streams, registry, worker_id) for worker_id in engines]
    async with running(*(loop.run() for loop in loops), *(worker.run() for worker in workers)):
        yield _Run(streams, registry, trainer, loops)


async def test_nothing_is_issued_before_a_version_is_served() -> None:
    async with _run() as run:
        await asyncio.sleep(0.05)
        assert await run.issued() == 0
        await run.trainer.start()
        await run.settles_at(8)  # (1 + 1) · 4


async def test_nothing_is_issued_without_a_healthy_engine() -> None:
    async with _run(engines=()) as run:
        await run.trainer.start()
        await asyncio.sleep(0.05)
        assert await run.issued() == 0


async def test_a_served_version_opens_admission_by_what_it_trained() -> None:
    async with _run() as run:
        await run.trainer.start()
        await run.settles_at(8)
        await run.trainer.step(4)
        await run.settles_at(12)
        await run.trainer.step(3)
        await run.settles_at(15)


async def test_a_change_of_the_registry_is_enough_no_poll_is_needed(monkeypatch: pytest.MonkeyPatch) -> None:
    async with _run() as run:
        await run.trainer.start()
        await run.settles_at(8)
        monkeypatch.setattr(loop_module, "COUNTERS_POLL_S", 3600.0)
        await asyncio.sleep(0.05)  # the loop is in its hour of waiting
        await run.trainer.step(4)

        async def twelve() -> bool:
            return await run.issued() == 12

        await until(twelve)


async def test_tasks_are_in_order_of_the_cursor_with_the_time_of_issue() -> None:
    async with _run() as run:
        await run.trainer.start()
        await run.settles_at(8)
        deliveries = await run.streams.read(Stream.TASKS, "reader", count=100, block_s=0)
    tasks = [decode_task(delivery.payload) for delivery in deliveries]
    assert [task.task_id for task in tasks] == [task_id("rows", 0, row, 0) for row in range(8)]
    assert all(task.issued_at_s > 1.7e9 for task in tasks)


async def test_limit_zero_completes_its_batch_after_a_rejected_group() -> None:
    """Batch of 2 at lag 0, two workers, one group rejected: its room comes back and the batch completes."""
    async with _run(replace(SETTINGS, max_lag=0, groups_per_step=2), engines=("w0", "w1")) as run:
        await run.trainer.start()
        await run.settles_at(2)
        await run.trainer.discard(1)
        await run.settles_at(3)
        await run.trainer.step(2)
        await run.settles_at(5)


async def test_no_more_is_issued_than_the_run_can_train() -> None:
    """One step of four groups at lag limit 1: four tasks are enough, and a discarded one is replaced."""
    async with _run(replace(SETTINGS, groups_needed=4)) as run:
        await run.trainer.start()
        await run.settles_at(4)
        await run.trainer.discard(1)
        await run.settles_at(5)


async def test_more_than_one_batch_of_calls_is_issued_in_one_go() -> None:
    async with _run(replace(SETTINGS, max_lag=9, groups_per_step=20), engines=("w0",)) as run:
        await run.trainer.start()
        await run.settles_at(200)


async def test_two_coordinators_issue_every_task_once() -> None:
    async with _run(coordinators=2) as run:
        await run.trainer.start()
        for _ in range(5):
            await run.trainer.step(4)
        await run.settles_at(28)
        taken = await run.trainer.take(8)
        ids = [*run.trainer.task_ids]
    assert len(taken) == 8
    assert sorted(ids) == sorted(task_id("rows", 0, row, 0) for row in range(28))


async def test_the_end_of_the_data_mid_batch_is_marked_and_all_tasks_end_once() -> None:
    """Ten rows in steps of four: 4 + 4 + 2."""
    async with _run(source=_source(rows=10, data_epochs=1)) as run:
        await run.trainer.start()
        await run.trainer.step(4)
        await run.trainer.step(4)

        async def exhausted() -> bool:
            return (await run.streams.counters()).state is RunState.EXHAUSTED

        await until(exhausted)
        await run.trainer.step(2)
        counters = await run.streams.counters()
    assert (counters.issued, counters.outstanding, counters.cursor) == (10, 0, 10)
    assert sorted(run.trainer.task_ids) == sorted(task_id("rows", 0, row, 0) for row in range(10))


async def test_data_that_fits_admission_exactly_is_marked_as_ended_at_once() -> None:
    """Eight rows and room for eight: the end shows although no room is left."""
    async with _run(source=_source(rows=8, data_epochs=1)) as run:
        await run.trainer.start()

        async def exhausted() -> bool:
            return (await run.streams.counters()).state is RunState.EXHAUSTED

        await until(exhausted)
        assert (await run.streams.counters()).outstanding == 8


async def _lone_loop(streams: MemoryStreams, settings: CoordinatorSettings = SETTINGS) -> CoordinatorLoop:
    return CoordinatorLoop(streams, MemoryRegistry(lambda: 0), _source(), settings)


async def test_it_leaves_when_the_run_ends() -> None:
    streams = MemoryStreams()
    loop = await _lone_loop(streams)
    running_loop = asyncio.ensure_future(loop.run())

    async def has_lease() -> bool:
        return [worker.role for worker in await streams.workers()] == ["coordinator"]

    await until(has_lease)
    await asyncio.sleep(0.05)
    await streams.end_run(await streams.raise_epoch(1))
    await asyncio.wait_for(running_loop, 10)
    assert await streams.workers() == []


async def test_stop_leaves_what_is_outstanding_in_the_queue() -> None:
    async with _run() as run:
        await run.trainer.start()
        await run.settles_at(8)
        run.loops[0].stop()

        async def left() -> bool:
            return all(worker.role != "coordinator" for worker in await run.streams.workers())

        await until(left)
        await run.trainer.step(4)
        await asyncio.sleep(0.05)
        assert await run.issued() == 8
        assert (await run.streams.counters()).outstanding == 4


async def test_a_run_that_had_ended_is_waited_for_while_a_trainer_may_open_it_again() -> None:
    streams = MemoryStreams()
    await streams.open()
    epoch = await streams.raise_epoch(1)
    await streams.end_run(epoch)
    await streams.heartbeat("trainer-0", "trainer", ttl_s=3600)
    loop = await _lone_loop(streams)
    running_loop = asyncio.ensure_future(loop.run())
    await asyncio.sleep(0.1)
    assert not running_loop.done()
    await streams.reopen(epoch)
    await asyncio.sleep(0.1)
    await streams.end_run(epoch)
    await asyncio.wait_for(running_loop, 10)


async def test_tasks_that_a_server_lost_are_issued_again_under_their_ids() -> None:
    async with _run() as run:
        await run.trainer.start()
        await run.settles_at(8)
        lost = _lose_entries(run.streams, Stream.TASKS, count=3)
        assert len(await run.streams.read(Stream.TASKS, "reader", count=100, block_s=0)) == 5
        run.streams.restart()
        again = await run.streams.read(Stream.TASKS, "reader", count=100, block_s=5)
    assert sorted(str(delivery.task_id) for delivery in again) == sorted(lost)
    assert [decode_task(delivery.payload).task_id for delivery in again] == [delivery.task_id for delivery in again]


async def test_tasks_that_were_lost_while_nobody_coordinated_are_found_at_start() -> None:
    streams = MemoryStreams()
    async with _run(streams=streams) as run:
        await run.trainer.start()
        await run.settles_at(8)
    lost = _lose_entries(streams, Stream.TASKS, count=2)
    async with _run(streams=streams):

        async def all_back() -> bool:
            return (await streams.depths())[Stream.TASKS].length == 8

        await until(all_back)
    tasks = await streams.read(Stream.TASKS, "reader", count=100, block_s=0)
    assert set(lost) < {str(task.task_id) for task in tasks}
    assert (await streams.counters()).issued == 8


async def test_an_emptied_server_gets_the_tasks_back_that_the_log_does_not_know() -> None:
    streams = MemoryStreams()
    known = LogIndex(settled=EndTable({task_id("rows", 0, row, 0): ("trained", 0) for row in (0, 3)}))
    async with _run(streams=streams, known=known) as run:
        await run.trainer.start()
        await run.settles_at(8)
        streams.lose_everything()
        await streams.restore(run.trainer.epoch, cursor=8, issued=8)

        async def mended() -> bool:
            return not (await streams.counters()).has_losses

        await until(mended)
        assert await streams.outstanding() == {task_id("rows", 0, row, 0) for row in (1, 2, 4, 5, 6, 7)}
        assert (await streams.counters()).issued == 8


async def test_a_run_is_not_exhausted_while_lost_tasks_are_missing() -> None:
    streams = MemoryStreams()
    await streams.open()
    await streams.restore(1, cursor=8, issued=8)
    async with _run(source=_source(rows=8, data_epochs=1), streams=streams) as run:
        await run.trainer.start()

        async def exhausted() -> bool:
            return (await streams.counters()).state is RunState.EXHAUSTED

        await until(exhausted)
        counters = await streams.counters()
        assert (counters.has_losses, counters.outstanding) == (False, 8)


def _lose_entries(streams: MemoryStreams, stream: Stream, *, count: int) -> list[str]:
    entries = streams._run.entries[stream]
    lost = list(entries.values())[:count]
    for entry in lost:
        del entries[entry.entry_id]
    return [str(entry.task_id) for entry in lost]


class _Troubled(MemoryStreams):
    """Refuses the first `full` issues as a full server does."""

    def __init__(self, full: int) -> None:
        super().__init__()
        self.refusals_left = full

    async def issue(self, cursor: int, tasks: Sequence[IssuedTask], *, next_cursor: int) -> bool:
        if self.refusals_left > 0:
            self.refusals_left -= 1
            raise QueueFull("no room")
        return await super().issue(cursor, tasks, next_cursor=next_cursor)


async def test_a_full_server_is_waited_for() -> None:
    async with _run(streams=_Troubled(full=3)) as run:
        await run.trainer.start()
        await run.settles_at(8)


class _AwayRegistry(MemoryRegistry):
    """Does not answer the first `away` questions."""

    away = 5

    async def state(self) -> RegistryState:
        if self.away > 0:
            self.away -= 1
            raise QueueUnavailable("away")
        return await super().state()


async def test_a_registry_that_is_away_is_waited_for() -> None:
    streams = MemoryStreams()
    trainer: FakeTrainer
    registry = _AwayRegistry(lambda: trainer.epoch)
    trainer = FakeTrainer(streams, registry)
    loop = CoordinatorLoop(streams, registry, _source(), SETTINGS)
    await streams.open()
    await trainer.start()
    async with running(loop.run()):

        async def answered() -> bool:
            return registry.away == 0 and len(await streams.workers()) == 1

        await until(answered)
        await streams.end_run(trainer.epoch)


def _state(trained_through: dict[int, int], *engines: EngineRecord) -> RegistryState:
    fields: dict[str, Any] = {"revision": 1, "epoch": 1, "announced_version": 9, "pushable_version": 9, "store_address": ""}
    return RegistryState(
        **fields,
        trained_through=trained_through,
        discarded=0,
        engines={engine.engine_id: engine for engine in engines},
        plan=None,
        confirmed={},
        failed={},
    )


def _engine(name: str, version: int | None, status: EngineStatus = EngineStatus.SERVING) -> EngineRecord:
    return EngineRecord(name, f"w-{name}", status, version, 1)


def test_admission_follows_the_oldest_version_that_a_live_worker_serves() -> None:
    state = _state(
        {7: 70, 8: 80, 9: 90}, _engine("a", 9), _engine("b", 8), _engine("c", 7), _engine("d", None, EngineStatus.JOINING)
    )
    assert trained_through_served(state, frozenset({"w-a", "w-b", "w-d"})) == 80
    assert trained_through_served(state, frozenset({"w-a", "w-b", "w-c"})) == 70
    assert trained_through_served(state, frozenset({"w-d"})) is None


def test_a_version_whose_count_is_unknown_admits_less_and_never_more() -> None:
    alive = frozenset({"w-a"})
    assert trained_through_served(_state({5: 50, 9: 90}, _engine("a", 7)), alive) == 50
    assert trained_through_served(_state({9: 90}, _engine("a", 7)), alive) == 0
