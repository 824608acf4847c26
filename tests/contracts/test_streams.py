"""What every implementation of `protocol.streams.Streams` must do. Runs over memory and over a real server."""

from __future__ import annotations

import asyncio
import itertools
import os
import pickle
import tempfile
import time
from collections.abc import AsyncIterator, Iterator, Sequence
from pathlib import Path
from typing import Protocol

import pytest

from async_rl.launch.embedded_redis import EmbeddedRedis
from protocol.codec import decode
from protocol.errors import CodecError, EpochFenced, MessageTooLarge, QueueRefused
from protocol.keys import trainer_consumer
from protocol.memory_streams import MemoryStreams
from protocol.redis_streams import RedisStreams
from protocol.streams import Delivery, Finished, IssuedTask, Publication, RunState, Started, Stream, Streams

_run_numbers = itertools.count()
MAX_BYTES = 2**20


class Queue(Protocol):
    """An open, empty run and what a test may do to it from outside."""

    streams: Streams

    async def lose_lease(self, worker_id: str) -> None: ...

    async def add_foreign(self, stream: Stream, payload: bytes) -> None: ...

    async def lose_entry(self, stream: Stream, entry_id: str) -> None: ...

    async def lose_everything(self) -> None: ...


class MemoryQueue:
    def __init__(self) -> None:
        self.now_s = 1000.0
        self.streams: MemoryStreams = MemoryStreams(max_message_bytes=MAX_BYTES, now=lambda: self.now_s)

    async def lose_lease(self, worker_id: str) -> None:
        lease = self.streams._leases.get(worker_id)
        if lease is not None:
            lease.expires_s = self.now_s

    async def add_foreign(self, stream: Stream, payload: bytes) -> None:
        self.streams.add_foreign(stream, payload)

    async def lose_entry(self, stream: Stream, entry_id: str) -> None:
        del self.streams._run.entries[stream][entry_id]

    async def lose_everything(self) -> None:
        self.streams.lose_everything()


class RedisQueue:
    def __init__(self, url: str) -> None:
        run_id = f"contract-{next(_run_numbers)}"
        self.streams: RedisStreams = RedisStreams(url, run_id, max_message_bytes=MAX_BYTES, retry_s=5.0, lease_s=0.0)

    async def lose_lease(self, worker_id: str) -> None:
        await self.streams.client.delete(self.streams.keys.lease(worker_id))

    async def add_foreign(self, stream: Stream, payload: bytes) -> None:
        await self.streams.client.xadd(self.streams.keys.stream(stream), {"d": payload})

    async def lose_entry(self, stream: Stream, entry_id: str) -> None:
        await self.streams.client.xdel(self.streams.keys.stream(stream), entry_id)

    async def lose_everything(self) -> None:
        keys = await self.streams.client.keys(f"arl:{{{self.streams.keys.run_id}}}:*")
        await self.streams.client.delete(*keys)
        await self.streams.open()


@pytest.fixture(scope="module")
def server() -> Iterator[EmbeddedRedis]:
    binary = os.environ.get("ASYNC_RL_TEST_REDIS_SERVER")  # another server to hold to the same contract
    with tempfile.TemporaryDirectory(prefix="arl-") as directory:
        redis = EmbeddedRedis(Path(directory) / "redis", binary=Path(binary) if binary else None)
        with redis:
            yield redis


@pytest.fixture(params=["memory", "redis"])
async def queue(request: pytest.FixtureRequest) -> AsyncIterator[Queue]:
    made: Queue = MemoryQueue() if request.param == "memory" else RedisQueue(request.getfixturevalue("server").url)
    await made.streams.open()
    yield made
    await made.streams.close()


@pytest.fixture
def streams(queue: Queue) -> Streams:
    return queue.streams


def _tasks(*names: str) -> list[IssuedTask]:
    return [IssuedTask(name, f"task {name}".encode()) for name in names]


def _publications(deliveries: Sequence[Delivery], target: Stream = Stream.GROUPS) -> list[Publication]:
    return [Publication(d.stream, d.entry_id, target, b"group of " + d.payload, d.task_id) for d in deliveries]


def _finished(deliveries: Sequence[Delivery]) -> list[Finished]:
    return [Finished(d.entry_id, d.task_id or "") for d in deliveries]


async def _issue(streams: Streams, *names: str) -> None:
    cursor = (await streams.counters()).cursor
    assert await streams.issue(cursor, _tasks(*names), next_cursor=cursor + len(names))


async def _work(streams: Streams, *names: str, worker: str = "w0") -> None:
    """Issue, read and publish `names`."""
    await _issue(streams, *names)
    taken = await streams.read(Stream.TASKS, worker, count=100, block_s=0)
    assert await streams.publish(_publications(taken)) == [True] * len(names)


def _ids(deliveries: Sequence[Delivery]) -> list[str | None]:
    return [delivery.task_id for delivery in deliveries]


# -- issue -----------------------------------------------------------------------------------------------------------
async def test_issue_moves_the_cursor_and_counts(streams: Streams) -> None:
    assert await streams.issue(0, _tasks("a", "b"), next_cursor=5)
    counters = await streams.counters()
    assert (counters.cursor, counters.issued, counters.outstanding, counters.state) == (5, 2, 2, RunState.RUNNING)
    assert await streams.outstanding() == {"a", "b"}


async def test_issue_again_from_the_same_cursor_does_nothing(streams: Streams) -> None:
    assert await streams.issue(0, _tasks("a"), next_cursor=1)
    assert not await streams.issue(0, _tasks("a"), next_cursor=1)
    assert not await streams.issue(7, _tasks("b"), next_cursor=8)
    counters = await streams.counters()
    assert (counters.cursor, counters.issued, counters.outstanding) == (1, 1, 1)
    assert (await streams.depths())[Stream.TASKS].length == 1


async def test_concurrent_issues_from_one_cursor_succeed_once(streams: Streams) -> None:
    results = await asyncio.gather(*(streams.issue(0, _tasks(f"t{i}"), next_cursor=1) for i in range(5)))
    assert sorted(results) == [False] * 4 + [True]
    assert (await streams.counters()).issued == 1


async def test_rows_without_tasks_still_move_the_cursor(streams: Streams) -> None:
    assert await streams.issue(0, [], next_cursor=3)
    counters = await streams.counters()
    assert (counters.cursor, counters.issued) == (3, 0)


async def test_exhausted_only_from_the_current_cursor(streams: Streams) -> None:
    await _issue(streams, "a")
    assert not await streams.mark_exhausted(0)
    assert (await streams.counters()).state is RunState.RUNNING
    assert await streams.mark_exhausted(1)
    assert await streams.mark_exhausted(1)
    assert (await streams.counters()).state is RunState.EXHAUSTED


async def test_open_again_keeps_everything(streams: Streams) -> None:
    await _issue(streams, "a")
    await streams.open()
    assert _ids(await streams.read(Stream.TASKS, "w0", count=1, block_s=0)) == ["a"]


# -- read ------------------------------------------------------------------------------------------------------------
async def test_each_entry_goes_to_one_reader_in_order(streams: Streams) -> None:
    await _issue(streams, "a", "b", "c")
    first = await streams.read(Stream.TASKS, "w0", count=2, block_s=0)
    second = await streams.read(Stream.TASKS, "w1", count=2, block_s=0)
    assert (_ids(first), _ids(second)) == (["a", "b"], ["c"])
    assert [(d.payload, d.delivery_count, d.stream) for d in first[:1]] == [(b"task a", 1, Stream.TASKS)]
    assert list(await streams.read(Stream.TASKS, "w0", count=2, block_s=0)) == []


async def test_blocking_read_of_an_empty_stream_ends_empty_and_on_time(streams: Streams) -> None:
    start = time.monotonic()
    assert list(await streams.read(Stream.TASKS, "w0", count=1, block_s=0.3)) == []
    assert 0.25 <= time.monotonic() - start < 3.0


async def test_blocking_read_wakes_for_a_new_entry(streams: Streams) -> None:
    reading = asyncio.create_task(streams.read(Stream.TASKS, "w0", count=1, block_s=20))
    await asyncio.sleep(0)
    await _issue(streams, "a")
    assert _ids(await asyncio.wait_for(reading, 10)) == ["a"]


async def test_every_waiting_reader_can_wake(streams: Streams) -> None:
    reading = [asyncio.create_task(streams.read(Stream.TASKS, f"w{i}", count=1, block_s=20)) for i in range(3)]
    await asyncio.sleep(0)
    await _issue(streams, "a", "b", "c")
    taken = [_ids(deliveries)[0] for deliveries in await asyncio.wait_for(asyncio.gather(*reading), 10)]
    assert sorted(str(name) for name in taken) == ["a", "b", "c"]


async def test_own_pending_names_what_is_held_without_delivering_it_again(streams: Streams) -> None:
    await _issue(streams, "a", "b", "c")
    await streams.read(Stream.TASKS, "w0", count=2, block_s=0)
    for _ in range(3):
        held = await streams.own_pending(Stream.TASKS, "w0")
        assert [(d.task_id, d.payload, d.delivery_count) for d in held] == [("a", b"task a", 1), ("b", b"task b", 1)]
    assert list(await streams.own_pending(Stream.TASKS, "w1")) == []


# -- publish ---------------------------------------------------------------------------------------------------------
async def test_publish_moves_a_task_to_its_group(streams: Streams) -> None:
    await _issue(streams, "a")
    taken = await streams.read(Stream.TASKS, "w0", count=1, block_s=0)
    assert await streams.publish(_publications(taken)) == [True]
    depths = await streams.depths()
    assert (depths[Stream.TASKS].length, depths[Stream.TASKS].pending, depths[Stream.GROUPS].length) == (0, 0, 1)
    [group] = await streams.read_groups(await streams.raise_epoch(0), count=5, block_s=0)
    assert (group.payload, group.task_id, group.stream) == (b"group of task a", "a", Stream.GROUPS)


async def test_publishing_twice_moves_once(streams: Streams) -> None:
    await _issue(streams, "a", "b")
    taken = await streams.read(Stream.TASKS, "w0", count=2, block_s=0)
    a, b = _publications(taken)
    assert await streams.publish([a]) == [True]
    assert await streams.publish([a, b, a, b]) == [False, True, False, False]
    assert (await streams.depths())[Stream.GROUPS].length == 2


async def test_concurrent_publications_of_one_task_move_once(streams: Streams) -> None:
    await _issue(streams, "a")
    publications = _publications(await streams.read(Stream.TASKS, "w0", count=1, block_s=0))
    results = await asyncio.gather(*(streams.publish(publications) for _ in range(6)))
    assert sorted(results) == [[False]] * 5 + [[True]]
    assert (await streams.depths())[Stream.GROUPS].length == 1


async def test_publish_after_another_worker_claimed_and_published(queue: Queue) -> None:
    streams = queue.streams
    await _issue(streams, "a")
    slow = await streams.read(Stream.TASKS, "slow", count=1, block_s=0)
    claimed = await streams.claim(Stream.TASKS, "fast", count=1)
    assert await streams.publish(_publications(claimed)) == [True]
    assert await streams.publish(_publications(slow)) == [False]
    assert (await streams.depths())[Stream.GROUPS].length == 1


async def test_the_first_publisher_wins_even_if_the_entry_was_claimed(streams: Streams) -> None:
    await _issue(streams, "a")
    slow = await streams.read(Stream.TASKS, "slow", count=1, block_s=0)
    claimed = await streams.claim(Stream.TASKS, "fast", count=1)
    assert await streams.publish(_publications(slow)) == [True]
    assert await streams.publish(_publications(claimed)) == [False]


async def test_unscored_groups_move_on_when_they_are_scored(streams: Streams) -> None:
    await _issue(streams, "a")
    taken = await streams.read(Stream.TASKS, "w0", count=1, block_s=0)
    assert await streams.publish(_publications(taken, Stream.UNSCORED)) == [True]
    unscored = await streams.read(Stream.UNSCORED, "reward-0", count=1, block_s=0)
    assert await streams.publish(_publications(unscored)) == [True]
    assert await streams.publish(_publications(unscored)) == [False]
    depths = await streams.depths()
    assert (depths[Stream.UNSCORED].length, depths[Stream.GROUPS].length) == (0, 1)
    [group] = await streams.read_groups(await streams.raise_epoch(0), count=1, block_s=0)
    assert (group.task_id, group.payload) == ("a", b"group of group of task a")


async def test_publishing_without_naming_the_task_finds_it(streams: Streams) -> None:
    await _issue(streams, "a", "b")
    a, b = await streams.read(Stream.TASKS, "w0", count=2, block_s=0)
    unnamed = [Publication(Stream.TASKS, d.entry_id, Stream.GROUPS, b"g") for d in (a, b)]
    assert await streams.publish(unnamed) == [True, True]
    assert await streams.publish(unnamed) == [False, False]
    groups = await streams.read_groups(await streams.raise_epoch(0), count=5, block_s=0)
    assert _ids(groups) == ["a", "b"]


async def test_one_call_may_publish_to_several_streams(streams: Streams) -> None:
    await _issue(streams, "a", "b", "c")
    a, b, c = await streams.read(Stream.TASKS, "w0", count=3, block_s=0)
    mixed = [*_publications([a]), *_publications([b], Stream.UNSCORED), *_publications([c])]
    assert await streams.publish(mixed) == [True, True, True]
    depths = await streams.depths()
    assert (depths[Stream.UNSCORED].length, depths[Stream.GROUPS].length) == (1, 2)


async def test_a_task_whose_group_is_in_the_log_is_not_published_again(queue: Queue) -> None:
    streams = queue.streams
    await _issue(streams, "a")
    taken = await streams.read(Stream.TASKS, "w0", count=1, block_s=0)
    await streams.finish(await streams.raise_epoch(0), [Finished("1-1", "a")])
    assert await streams.publish(_publications(taken)) == [False]
    depths = await streams.depths()
    assert (depths[Stream.TASKS].length, depths[Stream.GROUPS].length) == (0, 0)


async def test_a_message_above_the_cap_is_refused_where_it_is_made(streams: Streams) -> None:
    with pytest.raises(MessageTooLarge, match=r"task big has 1048577 bytes.*max_message_bytes=1048576"):
        await streams.issue(0, [IssuedTask("big", bytes(MAX_BYTES + 1))], next_cursor=1)
    assert await streams.issue(0, [IssuedTask("cap", bytes(MAX_BYTES))], next_cursor=1)
    [taken] = await streams.read(Stream.TASKS, "w0", count=1, block_s=0)
    too_large = Publication(Stream.TASKS, taken.entry_id, Stream.GROUPS, bytes(MAX_BYTES + 1))
    with pytest.raises(MessageTooLarge, match="1048577"):
        await streams.publish([Publication(Stream.TASKS, taken.entry_id, Stream.GROUPS, b"small"), too_large])
    with pytest.raises(MessageTooLarge, match="1048577"):
        await streams.reissue([IssuedTask("cap", bytes(MAX_BYTES + 1))])
    # Nothing of the refused call was done, and the stream is still usable.
    assert await streams.publish([Publication(Stream.TASKS, taken.entry_id, Stream.GROUPS, bytes(MAX_BYTES))]) == [True]
    [group] = await streams.read_groups(await streams.raise_epoch(0), count=1, block_s=0)
    assert len(group.payload) == MAX_BYTES


# -- leases ----------------------------------------------------------------------------------------------------------
async def test_work_moves_only_when_the_lease_is_gone(queue: Queue) -> None:
    streams = queue.streams
    await streams.heartbeat("w0", "rollout", ttl_s=60)
    await _issue(streams, "a")
    await streams.read(Stream.TASKS, "w0", count=1, block_s=0)
    assert list(await streams.claim(Stream.TASKS, "w1", count=1)) == []
    await streams.heartbeat("w0", "rollout", ttl_s=60)
    assert list(await streams.claim(Stream.TASKS, "w1", count=1)) == []
    await queue.lose_lease("w0")
    [claimed] = await streams.claim(Stream.TASKS, "w1", count=1)
    assert (claimed.task_id, claimed.payload, claimed.delivery_count) == ("a", b"task a", 2)
    assert list(await streams.own_pending(Stream.TASKS, "w0")) == []
    assert _ids(await streams.own_pending(Stream.TASKS, "w1")) == ["a"]


async def test_nobody_claims_from_itself(streams: Streams) -> None:
    await _issue(streams, "a")
    await streams.read(Stream.TASKS, "w0", count=1, block_s=0)
    assert list(await streams.claim(Stream.TASKS, "w0", count=1)) == []


async def test_concurrent_claims_share_without_overlap(queue: Queue) -> None:
    streams = queue.streams
    names = [f"t{i}" for i in range(20)]
    await _issue(streams, *names)
    await streams.read(Stream.TASKS, "gone", count=20, block_s=0)
    for worker in ("w0", "w1", "w2", "w3"):
        await streams.heartbeat(worker, "rollout", ttl_s=60)
    shares = await asyncio.gather(*(streams.claim(Stream.TASKS, f"w{i}", count=6) for i in range(4)))
    claimed = [name for share in shares for name in _ids(share)]
    assert sorted(str(name) for name in claimed) == sorted(names)


async def test_a_leaver_gives_its_work_up_at_once_and_all_of_it_is_done(streams: Streams) -> None:
    await streams.heartbeat("leaver", "rollout", ttl_s=60)
    await streams.heartbeat("stayer", "rollout", ttl_s=60)
    await _issue(streams, "a", "b", "c", "d", "e")
    held = await streams.read(Stream.TASKS, "leaver", count=5, block_s=0)
    await streams.publish(_publications(held[:2]))
    await streams.leave("leaver")
    claimed = await streams.claim(Stream.TASKS, "stayer", count=5)
    assert _ids(claimed) == ["c", "d", "e"]
    assert await streams.publish(_publications(claimed)) == [True] * 3
    groups = await streams.read_groups(await streams.raise_epoch(0), count=9, block_s=0)
    assert sorted(str(name) for name in _ids(groups)) == ["a", "b", "c", "d", "e"]


async def test_leaving_twice_or_without_a_lease_is_fine(streams: Streams) -> None:
    await streams.leave("nobody")
    await streams.heartbeat("w0", "rollout", ttl_s=60)
    await streams.leave("w0")
    await streams.leave("w0")
    assert list(await streams.workers()) == []


async def test_workers_lists_live_leases_with_their_latest_info(queue: Queue) -> None:
    streams = queue.streams
    await streams.heartbeat("w0", "rollout", ttl_s=60, info={"version": "3"})
    await streams.heartbeat("w1", "reward", ttl_s=30)
    await streams.heartbeat("w0", "rollout", ttl_s=50, info={"version": "4"})
    workers = {worker.worker_id: worker for worker in await streams.workers()}
    assert set(workers) == {"w0", "w1"}
    assert (workers["w0"].role, dict(workers["w0"].info)) == ("rollout", {"version": "4"})
    assert 45 < workers["w0"].expires_in_s <= 50
    assert (workers["w1"].role, dict(workers["w1"].info)) == ("reward", {})
    await queue.lose_lease("w0")
    assert [worker.worker_id for worker in await streams.workers()] == ["w1"]


async def test_a_lapsed_worker_that_comes_back_is_a_worker_again(queue: Queue) -> None:
    await queue.streams.heartbeat("w0", "rollout", ttl_s=60)
    await queue.lose_lease("w0")
    await queue.streams.heartbeat("w0", "rollout", ttl_s=60)
    assert [worker.worker_id for worker in await queue.streams.workers()] == ["w0"]


# -- poison ----------------------------------------------------------------------------------------------------------
async def test_delivery_counts_are_true_and_suspects_come_alone(streams: Streams) -> None:
    await _issue(streams, "poison", "a", "b", "c")
    await streams.read(Stream.TASKS, "w1", count=4, block_s=0)  # w1 dies: all were delivered once
    second = await streams.claim(Stream.TASKS, "w2", count=4)
    assert [(d.task_id, d.delivery_count) for d in second] == [("poison", 2), ("a", 2), ("b", 2), ("c", 2)]
    third = await streams.claim(Stream.TASKS, "w3", count=4)  # w2 died too: from now on, one at a time
    assert [(d.task_id, d.delivery_count) for d in third] == [("poison", 3)]
    assert list(await streams.claim(Stream.TASKS, "w3", count=4)) == []  # it holds a suspect already
    fourth = await streams.claim(Stream.TASKS, "w4", count=4)  # nobody has a lease: the first in line is w2's or w3's
    assert len(fourth) == 1


async def test_poison_is_buried_and_its_neighbours_are_done(queue: Queue) -> None:
    """One entry kills every worker that touches it; ten good ones stand behind it; the limit is five deliveries."""
    streams = queue.streams
    limit, good = 5, [f"good{i}" for i in range(10)]
    await _issue(streams, "poison", *good)
    published: list[str] = []
    for life in range(40):
        worker = f"w{life}"
        await streams.heartbeat(worker, "rollout", ttl_s=60)
        while True:
            taken = [*await streams.read(Stream.TASKS, worker, count=4, block_s=0)]
            taken = taken or [*await streams.claim(Stream.TASKS, worker, count=4)]
            died = False
            for delivery in taken:
                if delivery.delivery_count > limit:
                    assert delivery.task_id == "poison"
                    assert await streams.bury(delivery, task_id=delivery.task_id, reason="delivered too often")
                elif delivery.task_id == "poison":
                    died = True
                    break
                elif await streams.publish(_publications([delivery])) == [True]:
                    published.append(str(delivery.task_id))
            if died or not taken:
                break
        await queue.lose_lease(worker)
        if not died:
            break
    assert sorted(published) == sorted(good)
    [dead] = await streams.dead_entries(count=10)
    assert (dead.task_id, dead.delivery_count, dead.payload, dead.reason) == (
        "poison",
        6,
        b"task poison",
        "delivered too often",
    )


async def test_a_dead_task_stays_outstanding_until_its_end_is_in_the_log(streams: Streams) -> None:
    await _issue(streams, "a", "b")
    a, b = await streams.read(Stream.TASKS, "w0", count=2, block_s=0)
    assert await streams.bury(a, task_id="a", reason="kills its worker")
    assert not await streams.bury(a, task_id="a", reason="again")
    assert await streams.publish(_publications([a])) == [False]
    epoch = await streams.raise_epoch(0)
    assert dict(await streams.newly_dead(epoch)) == {"a": "kills its worker"}
    assert await streams.outstanding() == {"a", "b"}
    assert await streams.reissue(_tasks("a")) == 0  # dead is somewhere: a person looks
    await streams.finish_dead(epoch, ["a"])
    await streams.finish_dead(epoch, ["a"])
    assert dict(await streams.newly_dead(epoch)) == {}
    assert await streams.outstanding() == {"b"}
    assert len(await streams.dead_entries(count=10)) == 1  # the payload is kept
    assert await streams.publish(_publications([b])) == [True]


async def test_a_reason_that_quotes_a_bad_message_is_kept_short(streams: Streams) -> None:
    await _issue(streams, "a")
    [a] = await streams.read(Stream.TASKS, "w0", count=1, block_s=0)
    await streams.bury(a, task_id="a", reason="bad: " + "x" * 100_000)
    [dead] = await streams.dead_entries(count=1)
    assert dead.reason.startswith("bad: xxx")
    assert "100005 characters" in dead.reason
    assert len(dead.reason) < 2100


async def test_what_nobody_holds_cannot_be_buried(streams: Streams) -> None:
    await _issue(streams, "a")
    [a] = await streams.read(Stream.TASKS, "w0", count=1, block_s=0)
    await streams.publish(_publications([a]))
    assert not await streams.bury(a, task_id="a", reason="late")
    assert list(await streams.dead_entries(count=1)) == []


@pytest.mark.parametrize("stream", [Stream.TASKS, Stream.UNSCORED, Stream.GROUPS])
async def test_a_foreign_pickle_is_delivered_refused_and_buried(queue: Queue, stream: Stream, tmp_path: Path) -> None:
    class Explodes:
        def __reduce__(self) -> tuple[object, ...]:
            return (Path.touch, (tmp_path / "executed",))

    streams = queue.streams
    await queue.add_foreign(stream, pickle.dumps({"task": Explodes()}))
    if stream is Stream.GROUPS:
        [foreign] = await streams.read_groups(await streams.raise_epoch(0), count=1, block_s=0)
    else:
        [foreign] = await streams.read(stream, "w0", count=1, block_s=0)
    assert foreign.task_id is None
    with pytest.raises(CodecError, match="pickle"):
        decode(foreign.payload)
    assert not (tmp_path / "executed").exists()
    assert await streams.bury(foreign, task_id=None, reason="unreadable")
    assert (await streams.depths())[stream].length == 0
    assert [dead.reason for dead in await streams.dead_entries(count=1)] == ["unreadable"]


async def test_an_unreadable_group_ends_its_task_although_the_payload_does_not_name_it(streams: Streams) -> None:
    await _issue(streams, "a")
    [taken] = await streams.read(Stream.TASKS, "w0", count=1, block_s=0)
    await streams.publish([Publication(Stream.TASKS, taken.entry_id, Stream.GROUPS, b"\xc1 cut short")])
    epoch = await streams.raise_epoch(0)
    [group] = await streams.read_groups(epoch, count=1, block_s=0)
    assert await streams.bury(group, task_id=None, reason="unreadable")
    assert dict(await streams.newly_dead(epoch)) == {"a": "unreadable"}


# -- the dead, and what a person does with them ------------------------------------------------------------------------
REPEAT = IssuedTask("a:1", b"task a again")


async def _bury_one(streams: Streams, name: str = "a", *, source: Stream = Stream.TASKS) -> str:
    """Issue `name`, let it die in `source`; the id of its entry in `dead`."""
    await _issue(streams, name)
    [held] = await streams.read(Stream.TASKS, "w0", count=1, block_s=0)
    if source is not Stream.TASKS:
        await streams.publish(_publications([held], Stream.UNSCORED))
        [held] = await streams.read(Stream.UNSCORED, "w0", count=1, block_s=0)
    assert await streams.bury(held, task_id=name, reason=f"{name} failed")
    return (await streams.dead_entries(count=10))[-1].entry_id


async def test_dead_entries_say_what_died_where_why_and_since_when(streams: Streams) -> None:
    first = await _bury_one(streams, "a")
    await _bury_one(streams, "b", source=Stream.UNSCORED)
    a, b = await streams.dead_entries(count=10)
    assert (a.task_id, a.reason, a.source, a.payload) == ("a", "a failed", Stream.TASKS, b"task a")
    assert (b.task_id, b.reason, b.source, b.payload) == ("b", "b failed", Stream.UNSCORED, b"group of task b")
    assert (a.delivery_count, a.is_recorded) == (1, False)
    assert 0 <= a.age_s < 30
    same = await streams.dead_entry(first)
    assert same is not None
    assert (same.task_id, same.entry_id, same.reason) == ("a", first, "a failed")
    assert await streams.dead_entry("99-99") is None
    epoch = await streams.raise_epoch(0)
    await streams.finish_dead(epoch, ["a"])
    assert [dead.is_recorded for dead in await streams.dead_entries(count=10)] == [True, False]
    assert len(await streams.dead_entries(count=1)) == 1


@pytest.mark.parametrize("source", [Stream.TASKS, Stream.UNSCORED])
async def test_a_dead_task_goes_back_under_its_own_id_before_its_end_is_in_the_log(streams: Streams, source: Stream) -> None:
    entry_id = await _bury_one(streams, source=source)
    before = await streams.counters()
    assert await streams.requeue(entry_id, repeat=REPEAT) == "a"
    assert await streams.requeue(entry_id, repeat=REPEAT) is None
    assert list(await streams.dead_entries(count=9)) == []
    assert dict(await streams.newly_dead(await streams.raise_epoch(0))) == {}
    assert ((await streams.counters()).issued, await streams.outstanding()) == (before.issued, {"a"})
    [again] = await streams.read(source, "w1", count=9, block_s=0)
    assert (again.task_id, again.delivery_count) == ("a", 1)
    assert again.payload == (b"task a" if source is Stream.TASKS else b"group of task a")
    assert await streams.publish(_publications([again])) == [True]


async def test_bytes_that_cannot_be_read_go_back_as_a_task_made_anew(streams: Streams) -> None:
    entry_id = await _bury_one(streams, source=Stream.UNSCORED)
    assert await streams.requeue(entry_id, repeat=REPEAT, anew=b"task a made anew") == "a"
    [again] = await streams.read(Stream.TASKS, "w1", count=9, block_s=0)
    assert (again.task_id, again.payload) == ("a", b"task a made anew")


async def test_a_dead_task_whose_end_is_in_the_log_comes_back_as_another_task(streams: Streams) -> None:
    entry_id = await _bury_one(streams)
    epoch = await streams.raise_epoch(0)
    await streams.finish_dead(epoch, ["a"])
    assert await streams.requeue(entry_id, repeat=REPEAT) == "a:1"
    assert await streams.requeue(entry_id, repeat=REPEAT) is None
    assert list(await streams.dead_entries(count=9)) == []
    assert ((await streams.counters()).issued, await streams.outstanding()) == (2, {"a:1"})
    [again] = await streams.read(Stream.TASKS, "w1", count=9, block_s=0)
    assert (again.task_id, again.payload) == ("a:1", b"task a again")
    assert await streams.publish(_publications([again])) == [True]


async def test_an_end_that_is_recorded_while_its_entry_goes_back_stands(streams: Streams) -> None:
    """The trainer had read `newly_dead` before: its record wins, and what is done for the task leaves nothing behind."""
    entry_id = await _bury_one(streams)
    epoch = await streams.raise_epoch(0)
    deaths = await streams.newly_dead(epoch)
    assert await streams.requeue(entry_id, repeat=REPEAT) == "a"
    await streams.finish_dead(epoch, list(deaths))
    [again] = await streams.read(Stream.TASKS, "w1", count=9, block_s=0)
    assert await streams.publish(_publications([again])) == [False]
    depths = await streams.depths()
    assert [depths[stream].length for stream in Stream] == [0, 0, 0, 0]
    assert await streams.outstanding() == frozenset()


async def test_what_cannot_be_requeued_stays_where_it_is(queue: Queue) -> None:
    streams = queue.streams
    await queue.add_foreign(Stream.TASKS, b"not ours")
    [foreign] = await streams.read(Stream.TASKS, "w0", count=1, block_s=0)
    await streams.bury(foreign, task_id=None, reason="unreadable")
    [dead] = await streams.dead_entries(count=9)
    assert dead.task_id is None
    assert await streams.requeue(dead.entry_id, repeat=REPEAT) is None
    entry_id = await _bury_one(streams)
    epoch = await streams.raise_epoch(0)
    await streams.finish_dead(epoch, ["a"])
    await _issue(streams, REPEAT.task_id)
    assert await streams.requeue(entry_id, repeat=REPEAT) is None  # that repeat is out already
    await streams.end_run(epoch)
    assert await streams.requeue(entry_id, repeat=IssuedTask("a:2", b"p")) is None
    assert len(await streams.dead_entries(count=9)) == 2
    with pytest.raises(MessageTooLarge):
        await streams.requeue(entry_id, repeat=IssuedTask("a:2", bytes(MAX_BYTES + 1)))


async def test_dropping_a_dead_entry_keeps_its_tasks_end(streams: Streams) -> None:
    entry_id = await _bury_one(streams)
    assert await streams.drop_dead(entry_id)
    assert not await streams.drop_dead(entry_id)
    epoch = await streams.raise_epoch(0)
    assert dict(await streams.newly_dead(epoch)) == {"a": "a failed"}
    await streams.finish_dead(epoch, ["a"])
    assert await streams.outstanding() == frozenset()


# -- trainer ---------------------------------------------------------------------------------------------------------
async def test_epochs_grow_and_never_fall_below_what_the_log_knows(streams: Streams) -> None:
    assert await streams.raise_epoch(0) == 1
    assert await streams.raise_epoch(0) == 2
    assert await streams.raise_epoch(9) == 9
    assert await streams.raise_epoch(4) == 10
    assert (await streams.counters()).epoch == 10


async def test_finish_removes_the_group_and_its_task(streams: Streams) -> None:
    await _work(streams, "a", "b")
    epoch = await streams.raise_epoch(0)
    groups = await streams.read_groups(epoch, count=10, block_s=0)
    await streams.finish(epoch, _finished(groups[:1]))
    await streams.finish(epoch, _finished(groups[:1]))
    assert await streams.outstanding() == {"b"}
    depths = await streams.depths()
    assert (depths[Stream.GROUPS].length, depths[Stream.GROUPS].pending) == (1, 1)
    await streams.finish(epoch, [])


async def test_an_older_trainer_is_fenced_in_everything_it_writes(streams: Streams) -> None:
    await _work(streams, "a")
    old = await streams.raise_epoch(0)
    groups = await streams.read_groups(old, count=10, block_s=0)
    new = await streams.raise_epoch(0)
    for refused in (
        streams.read_groups(old, count=1, block_s=0),
        streams.take_over(old, count=1),
        streams.finish(old, _finished(groups)),
        streams.newly_dead(old),
        streams.finish_dead(old, ["a"]),
        streams.report(old, discarded=3),
        streams.end_run(old),
        streams.clear(old),
        streams.reopen(old),
        streams.restore(old, cursor=9, issued=9),
    ):
        with pytest.raises(EpochFenced, match=f"epoch {new}"):
            await refused
    assert await streams.outstanding() == {"a"}
    assert (await streams.counters()).discarded == 0
    assert _ids(await streams.take_over(new, count=10)) == ["a"]


async def test_an_older_trainer_that_reads_late_takes_nothing_away(streams: Streams) -> None:
    """A paused trainer may wake in a blocking read: it is fenced, and the new one takes over what it got."""
    old = await streams.raise_epoch(0)
    reading = asyncio.create_task(streams.read_groups(old, count=5, block_s=20))
    await asyncio.sleep(0.05)
    new = await streams.raise_epoch(0)
    await _work(streams, "a", "b")
    with pytest.raises(EpochFenced):
        await asyncio.wait_for(reading, 10)
    taken = [*await streams.take_over(new, count=5), *await streams.read_groups(new, count=5, block_s=0)]
    assert sorted(str(name) for name in _ids(taken)) == ["a", "b"]
    await streams.finish(new, _finished(taken))
    assert await streams.outstanding() == frozenset()


async def test_take_over_claims_in_parts_and_from_every_older_epoch(streams: Streams) -> None:
    await _work(streams, "a", "b", "c")
    for name in ("a", "b", "c"):
        epoch = await streams.raise_epoch(0)
        assert _ids(await streams.read_groups(epoch, count=1, block_s=0)) == [name]
    newest = await streams.raise_epoch(0)
    first = await streams.take_over(newest, count=2)
    second = await streams.take_over(newest, count=2)
    assert sorted(str(name) for name in _ids([*first, *second])) == ["a", "b", "c"]
    assert (len(first), len(second)) == (2, 1)
    assert list(await streams.take_over(newest, count=2)) == []
    assert len(await streams.own_pending(Stream.GROUPS, trainer_consumer(newest))) == 3


async def test_the_trainer_has_no_delivery_limit(streams: Streams) -> None:
    """Ten restarts in a row each get the whole batch again, with the true count."""
    await _work(streams, "a", "b")
    await streams.read_groups(await streams.raise_epoch(0), count=5, block_s=0)
    for restart in range(10):
        taken = await streams.take_over(await streams.raise_epoch(0), count=5)
        assert [(d.task_id, d.delivery_count) for d in taken] == [("a", restart + 2), ("b", restart + 2)]


async def test_a_trainer_whose_epoch_the_server_lost_goes_on(streams: Streams) -> None:
    await _work(streams, "a")
    groups = await streams.read_groups(5, count=1, block_s=0)  # the server knows epoch 0: the raise to 5 was lost
    await streams.finish(5, _finished(groups))
    assert (await streams.counters()).epoch == 5
    with pytest.raises(EpochFenced):
        await streams.report(4, discarded=0)


async def test_report_sets_the_absolute_count(streams: Streams) -> None:
    epoch = await streams.raise_epoch(0)
    await streams.report(epoch, discarded=4)
    await streams.report(epoch, discarded=6)
    await streams.report(epoch, discarded=6)
    assert (await streams.counters()).discarded == 6


# -- after lost writes -----------------------------------------------------------------------------------------------
async def test_reissue_adds_only_what_is_outstanding_and_nowhere(queue: Queue) -> None:
    streams = queue.streams
    await _work(streams, "in-groups")
    await _issue(streams, "lost", "in-tasks", "held")
    lost, *_ = await streams.read(Stream.TASKS, "w0", count=1, block_s=0)
    await queue.lose_entry(Stream.TASKS, lost.entry_id)
    everything = _tasks("lost", "in-tasks", "held", "in-groups", "never-issued")
    assert await streams.reissue(everything) == 1
    assert await streams.reissue(everything) == 0
    assert _ids(await streams.read(Stream.TASKS, "w1", count=9, block_s=0)) == ["in-tasks", "held", "lost"]
    assert (await streams.counters()).issued == 4  # it counts once


async def test_take_over_brings_what_was_published_first_first(streams: Streams) -> None:
    """Epoch 10 and 9 hold every other group; names of consumers sort otherwise than epochs."""
    await _work(streams, "a", "b", "c", "d")
    for epoch, name in ((9, "a"), (10, "b"), (10, "c"), (11, "d")):
        assert await streams.raise_epoch(epoch) >= epoch
        newest = (await streams.counters()).epoch
        assert _ids(await streams.read_groups(newest, count=1, block_s=0)) == [name]
    newest = await streams.raise_epoch(0)
    assert _ids(await streams.take_over(newest, count=3)) == ["a", "b", "c"]
    assert _ids(await streams.take_over(newest, count=3)) == ["d"]


async def test_an_emptied_server_gets_its_cursor_back_and_the_tasks_that_are_missing(queue: Queue) -> None:
    streams = queue.streams
    epoch = await streams.raise_epoch(0)
    await _issue(streams, "a", "b", "c")
    await queue.lose_everything()
    assert (await streams.counters()).cursor == 0
    assert await streams.restore(epoch, cursor=3, issued=3)
    assert not await streams.restore(epoch, cursor=3, issued=3)
    counters = await streams.counters()
    assert (counters.cursor, counters.issued, counters.epoch) == (3, 3, epoch)
    assert (counters.lost_from, counters.lost_below, counters.has_losses) == (0, 3, True)
    assert await streams.readmit(_tasks("a", "c")) == 2  # b is in the log
    assert await streams.readmit(_tasks("a", "c")) == 0
    await streams.mended(0, 3)
    counters = await streams.counters()
    assert (counters.has_losses, counters.issued, counters.outstanding) == (False, 3, 2)
    assert _ids(await streams.read(Stream.TASKS, "w", count=9, block_s=0)) == ["a", "c"]


async def test_a_living_cursor_is_never_rewound_and_a_lost_tail_alone_is_mended(streams: Streams) -> None:
    epoch = await streams.raise_epoch(0)
    await _issue(streams, "a", "b")
    assert not await streams.restore(epoch, cursor=1, issued=1)
    assert not await streams.restore(epoch, cursor=2, issued=9)
    assert (await streams.counters()).issued == 2
    assert await streams.restore(epoch, cursor=5, issued=5)
    assert await streams.restore(epoch, cursor=7, issued=7)
    counters = await streams.counters()
    assert (counters.lost_from, counters.lost_below, counters.cursor, counters.issued) == (2, 7, 7, 7)
    await streams.mended(2, 5)  # of before the second loss
    assert (await streams.counters()).has_losses


async def test_what_lies_before_the_first_cursor_was_never_issued(streams: Streams) -> None:
    """A fork begins at the cursor of its origin."""
    epoch = await streams.raise_epoch(0)
    assert await streams.restore(epoch, cursor=8, issued=0, first=8)
    counters = await streams.counters()
    assert (counters.cursor, counters.issued, counters.has_losses) == (8, 0, False)


async def test_nothing_is_readmitted_into_an_ended_run(streams: Streams) -> None:
    epoch = await streams.raise_epoch(0)
    await streams.end_run(epoch)
    assert await streams.readmit(_tasks("a")) == 0
    assert (await streams.counters()).outstanding == 0


async def test_a_held_entry_that_vanished_does_not_disturb_its_holder_or_a_claimer(queue: Queue) -> None:
    """Somebody trimmed the stream: one entry is left of three."""
    streams = queue.streams
    await _issue(streams, "a", "b", "c")
    held = await streams.read(Stream.TASKS, "w0", count=3, block_s=0)
    for delivery in held[:2]:
        await queue.lose_entry(Stream.TASKS, delivery.entry_id)
    assert _ids(await streams.own_pending(Stream.TASKS, "w0")) == ["c"]
    assert _ids(await streams.claim(Stream.TASKS, "w1", count=3)) == ["c"]
    depth = (await streams.depths())[Stream.TASKS]
    assert (depth.length, depth.pending) == (1, 1)
    assert await streams.reissue(_tasks("a", "b", "c")) == 2


async def test_what_was_trimmed_away_leaves_nothing_pending_behind(queue: Queue) -> None:
    """Three read by one who dies; two vanish from the stream. One is claimed, two count as lost, none stays pending."""
    streams = queue.streams
    await _issue(streams, "a", "b", "c")
    held = await streams.read(Stream.TASKS, "w0", count=3, block_s=0)
    for delivery in held[:2]:
        await queue.lose_entry(Stream.TASKS, delivery.entry_id)
    [claimed] = await streams.claim(Stream.TASKS, "w1", count=3)
    assert await streams.publish(_publications([claimed])) == [True]
    depth = (await streams.depths())[Stream.TASKS]
    assert (depth.length, depth.pending) == (0, 0)
    assert await streams.outstanding() == {"a", "b", "c"}
    assert await streams.reissue(_tasks("a", "b", "c")) == 2  # the two that were lost


async def test_a_holder_whose_entries_were_trimmed_away_leaves_nothing_pending_either(queue: Queue) -> None:
    streams = queue.streams
    await _issue(streams, "a", "b")
    held = await streams.read(Stream.TASKS, "w0", count=2, block_s=0)
    await queue.lose_entry(Stream.TASKS, held[0].entry_id)
    assert _ids(await streams.own_pending(Stream.TASKS, "w0")) == ["b"]
    assert (await streams.depths())[Stream.TASKS].pending == 1


async def test_one_task_of_many_that_vanishes_with_its_worker_is_done_by_another(queue: Queue) -> None:
    streams = queue.streams
    names = [f"t{number}" for number in range(128)]
    await _issue(streams, *names)
    for worker in ("stays", "vanishes"):
        await streams.heartbeat(worker, "rollout", ttl_s=60)
    await streams.read(Stream.TASKS, "vanishes", count=1, block_s=0)
    rest = await streams.read(Stream.TASKS, "stays", count=200, block_s=0)
    assert await streams.publish(_publications(rest)) == [True] * 127
    assert list(await streams.claim(Stream.TASKS, "stays", count=9)) == []
    await queue.lose_lease("vanishes")
    assert await streams.publish(_publications(await streams.claim(Stream.TASKS, "stays", count=9))) == [True]
    groups = await streams.read_groups(await streams.raise_epoch(0), count=200, block_s=0)
    assert sorted(map(str, _ids(groups))) == sorted(names)


async def test_in_memory_too_nothing_is_claimed_before_everybody_had_a_lease_to_renew() -> None:
    now = [100.0]
    streams = MemoryStreams(now=lambda: now[0], lease_s=10.0)
    await streams.open()
    await _issue(streams, "a")
    for worker in ("w0", "w1"):
        await streams.heartbeat(worker, "rollout", ttl_s=10)
    await streams.read(Stream.TASKS, "w0", count=1, block_s=0)
    now[0] += 30  # away
    assert list(await streams.claim(Stream.TASKS, "w1", count=1)) == []
    await streams.heartbeat("w1", "rollout", ttl_s=10)
    for _ in range(5):
        now[0] += 1.9
        await streams.heartbeat("w1", "rollout", ttl_s=10)
        assert list(await streams.claim(Stream.TASKS, "w1", count=1)) == []
    now[0] += 1.0  # w0 did not take its chance
    assert _ids(await streams.claim(Stream.TASKS, "w1", count=1)) == ["a"]


# -- slow work -------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("renews", [True, False])
async def test_slow_work_is_done_once_if_its_lease_is_renewed_and_counts_once_if_it_is_not(queue: Queue, renews: bool) -> None:
    """It takes three leases; another worker looks for left-over work all the time."""
    streams = queue.streams
    await _issue(streams, "a")
    await streams.heartbeat("slow", "rollout", ttl_s=60)
    [mine] = await streams.read(Stream.TASKS, "slow", count=1, block_s=0)
    done_by: list[str] = []
    for _ in range(3):  # a lease passes
        await queue.lose_lease("slow")
        if renews:
            await streams.heartbeat("slow", "rollout", ttl_s=60)
        for delivery in await streams.claim(Stream.TASKS, "other", count=1):
            done_by += ["other"] * sum(await streams.publish(_publications([delivery])))
    done_by += ["slow"] * sum(await streams.publish(_publications([mine])))
    assert done_by == (["slow"] if renews else ["other"])
    assert (await streams.depths())[Stream.GROUPS].length == 1


# -- end -------------------------------------------------------------------------------------------------------------
async def test_end_clear_reopen(streams: Streams) -> None:
    await _work(streams, "published")
    await _issue(streams, "held", "waiting")
    held = await streams.read(Stream.TASKS, "w0", count=1, block_s=0)
    epoch = await streams.raise_epoch(0)
    with pytest.raises(QueueRefused, match="end_run"):
        await streams.clear(epoch)
    assert await streams.end_run(epoch) == {"published", "held", "waiting"}
    assert await streams.end_run(epoch) == {"published", "held", "waiting"}
    assert (await streams.counters()).state is RunState.ENDED
    # Nothing moves any more.
    assert not await streams.issue(3, _tasks("late"), next_cursor=4)
    assert await streams.publish(_publications(held)) == [False]
    assert await streams.reissue(_tasks("held")) == 0
    assert not await streams.mark_exhausted(3)
    await streams.clear(epoch)
    await streams.clear(epoch)
    assert await streams.outstanding() == frozenset()
    assert {stream: (depth.length, depth.pending) for stream, depth in (await streams.depths()).items()} == dict.fromkeys(
        Stream, (0, 0)
    )
    await streams.reopen(epoch)
    counters = await streams.counters()
    assert (counters.state, counters.cursor, counters.issued) == (RunState.RUNNING, 3, 3)
    await _issue(streams, "next")
    assert _ids(await streams.read(Stream.TASKS, "w0", count=5, block_s=0)) == ["next"]


async def test_clearing_does_not_disturb_a_waiting_reader(streams: Streams) -> None:
    reading = asyncio.create_task(streams.read(Stream.TASKS, "w0", count=1, block_s=20))
    await asyncio.sleep(0.05)
    epoch = await streams.raise_epoch(0)
    await streams.end_run(epoch)
    await streams.clear(epoch)
    await streams.reopen(epoch)
    await _issue(streams, "a")
    assert _ids(await asyncio.wait_for(reading, 10)) == ["a"]


async def test_reopening_a_running_run_changes_nothing(streams: Streams) -> None:
    await _issue(streams, "a")
    await streams.mark_exhausted(1)
    await streams.reopen(await streams.raise_epoch(0))
    assert (await streams.counters()).state is RunState.EXHAUSTED


# -- monitors --------------------------------------------------------------------------------------------------------
async def test_depths_say_what_waits_and_what_is_held(streams: Streams) -> None:
    await _issue(streams, "a", "b", "c")
    await streams.read(Stream.TASKS, "w0", count=2, block_s=0)
    depth = (await streams.depths())[Stream.TASKS]
    assert (depth.length, depth.pending) == (3, 2)
    assert depth.oldest_age_s is not None
    assert 0 <= depth.oldest_age_s < 30
    assert (await streams.depths())[Stream.GROUPS].oldest_age_s is None


async def test_large_batches_go_through_whole(streams: Streams) -> None:
    names = [f"t{i}" for i in range(700)]
    await _work(streams, *names[:100])
    await _issue(streams, *names[100:])
    taken = await streams.read(Stream.TASKS, "w0", count=1000, block_s=0)
    assert len(await streams.own_pending(Stream.TASKS, "w0")) == 600
    assert await streams.publish(_publications(taken)) == [True] * 600
    epoch = await streams.raise_epoch(0)
    groups = await streams.read_groups(epoch, count=1000, block_s=0)
    assert _ids(groups) == names
    await streams.finish(epoch, _finished(groups))
    assert (await streams.counters()).outstanding == 0


# -- in flight -------------------------------------------------------------------------------------------------------
async def test_started_work_is_in_flight_until_its_group_is_in_the_log(streams: Streams) -> None:
    await _issue(streams, "a", "b", "c")
    await streams.heartbeat("w", "rollout", ttl_s=60)
    taken = await streams.read(Stream.TASKS, "w", count=2, block_s=0)
    assert await streams.in_flight() == {}  # leased, not begun
    await streams.note_started("w", {"a": 3, "b": 4})
    assert await streams.in_flight() == {"a": Started("w", 3), "b": Started("w", 4)}
    await streams.publish([*_publications(taken[:1]), *_publications(taken[1:], Stream.UNSCORED)])
    await streams.leave("w")
    assert await streams.in_flight() == {"a": Started("w", 3), "b": Started("w", 4)}  # queued and unscored: in flight
    epoch = await streams.raise_epoch(1)
    await streams.finish(epoch, _finished(await streams.read_groups(epoch, count=10, block_s=0)))
    assert await streams.in_flight() == {"b": Started("w", 4)}


async def test_a_task_whose_worker_lost_its_lease_is_not_in_flight_until_it_is_begun_again(queue: Queue) -> None:
    streams = queue.streams
    await _issue(streams, "a")
    for worker in ("w0", "w1"):
        await streams.heartbeat(worker, "rollout", ttl_s=60)
    await streams.read(Stream.TASKS, "w0", count=1, block_s=0)
    await streams.note_started("w0", {"a": 3})
    await queue.lose_lease("w0")
    assert await streams.in_flight() == {}
    await streams.claim(Stream.TASKS, "w1", count=1)
    await streams.note_started("w1", {"a": 7})
    assert await streams.in_flight() == {"a": Started("w1", 7)}


async def test_a_stopped_or_dead_or_finished_task_is_not_in_flight(streams: Streams) -> None:
    await streams.heartbeat("w", "rollout", ttl_s=60)
    await _issue(streams, "a", "b")
    _, poison = await streams.read(Stream.TASKS, "w", count=2, block_s=0)
    await streams.note_started("w", {"a": 3, "b": 3, "never issued": 3})
    await streams.note_started("w", {"a": None})
    await streams.bury(poison, task_id="b", reason="poison")
    assert await streams.in_flight() == {}
    epoch = await streams.raise_epoch(1)
    await streams.finish_dead(epoch, ["b"])
    await streams.note_started("w", {"b": 4})  # too late: its end is in the log
    assert await streams.in_flight() == {}


async def test_nothing_is_in_flight_after_a_run_was_cleared(streams: Streams) -> None:
    await streams.heartbeat("w", "rollout", ttl_s=60)
    await _issue(streams, "a")
    await streams.read(Stream.TASKS, "w", count=1, block_s=0)
    await streams.note_started("w", {"a": 3})
    epoch = await streams.raise_epoch(1)
    await streams.end_run(epoch)
    await streams.clear(epoch)
    assert await streams.in_flight() == {}
