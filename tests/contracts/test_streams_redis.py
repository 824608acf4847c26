"""What only a real server can show: a full one, a lost reply, a restart, a dead one, one that must be refused."""

from __future__ import annotations

import asyncio
import os
import signal
import tempfile
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import TypeVar

import pytest
from redis.exceptions import OutOfMemoryError

from async_rl.launch.embedded_redis import EmbeddedRedis
from async_rl.testing.proxy import Faults, FaultyProxy
from protocol.errors import QueueFull, QueueRefused, QueueUnavailable
from protocol.keys import trainer_consumer
from protocol.redis_streams import RedisStreams
from protocol.streams import Finished, IssuedTask, Publication, RunState, Stream

T = TypeVar("T")


def _server(directory: Path) -> EmbeddedRedis:
    binary = os.environ.get("ASYNC_RL_TEST_REDIS_SERVER")
    return EmbeddedRedis(directory / "redis", binary=Path(binary) if binary else None)


@pytest.fixture
def server() -> Iterator[EmbeddedRedis]:
    """One per test: these tests change its settings and kill it."""
    with tempfile.TemporaryDirectory(prefix="arl-") as directory, _server(Path(directory)) as redis:
        yield redis


@asynccontextmanager
async def _open(
    url: str, *, run_id: str = "r", timeout_s: float = 5.0, retry_s: float = 5.0, lease_s: float = 0.0
) -> AsyncIterator[RedisStreams]:
    streams = RedisStreams(url, run_id, timeout_s=timeout_s, retry_s=retry_s, lease_s=lease_s)
    try:
        await streams.open()
        yield streams
    finally:
        await streams.close()


async def _until(condition: Callable[[], Awaitable[T]], *, within_s: float = 30.0) -> T:
    """What `condition` answers once that is true; only the server can say when, so it is asked."""
    async with asyncio.timeout(within_s):
        while True:
            if answer := await condition():
                return answer
            await asyncio.sleep(0.02)


async def _issue(streams: RedisStreams, *names: str, payload: bytes = b"task") -> None:
    cursor = (await streams.counters()).cursor
    assert await streams.issue(cursor, [IssuedTask(name, payload) for name in names], next_cursor=cursor + len(names))


async def _publish_one(streams: RedisStreams, payload: bytes, worker: str = "w0") -> None:
    [task] = await streams.read(Stream.TASKS, worker, count=1, block_s=0)
    assert await streams.publish([Publication(Stream.TASKS, task.entry_id, Stream.GROUPS, payload)]) == [True]


# -- publish ---------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("last_id", [None, "99999999999999-5", f"99999999999999-{2**64 - 3}", f"99999999999999-{2**60}"])
async def test_publish_knows_where_each_group_is_and_leaves_nothing_else_behind(
    server: EmbeddedRedis, last_id: str | None
) -> None:
    """Also where the ids of one batch do not follow each other, as when the clock ticks in between (Redis 6.2)."""
    async with _open(server.url) as streams:
        groups = streams.keys.stream(Stream.GROUPS)
        if last_id is not None:  # of an entry that has gone; new ones get higher ids
            await streams.client.xadd(groups, {"d": "x"}, id=last_id)
            await streams.client.xdel(groups, last_id)
        await _issue(streams, "a", "b", "c", "d")
        a, b, c, d = await streams.read(Stream.TASKS, "w0", count=4, block_s=0)
        await streams.publish([Publication(Stream.TASKS, b.entry_id, Stream.GROUPS, b"first group of b", "b")])
        batch = [
            Publication(Stream.TASKS, task.entry_id, Stream.GROUPS, task.payload, task.task_id) for task in (a, b, c, c, d)
        ]
        assert await streams.publish(batch) == [True, False, True, False, True]

        entries = await streams.client.xrange(groups)
        assert [(fields[b"t"], fields[b"d"]) for _, fields in entries] == [
            (b"b", b"first group of b"), (b"a", b"task"), (b"c", b"task"), (b"d", b"task")
        ]  # fmt: skip
        places = await streams.client.hgetall(streams.keys.outstanding)
        assert places == {fields[b"t"]: b"groups " + entry_id for entry_id, fields in entries}
        assert await streams.reissue([IssuedTask(name, b"task again") for name in "abcd"]) == 0
        tasks = (await streams.depths())[Stream.TASKS]
        assert (tasks.length, tasks.pending) == (0, 0)


async def test_publish_works_on_a_server_that_has_forgotten_every_script(server: EmbeddedRedis) -> None:
    async with _open(server.url) as streams:
        await _issue(streams, "a")
        [task] = await streams.read(Stream.TASKS, "w0", count=1, block_s=0)
        await streams.client.script_flush()
        assert await streams.publish([Publication(Stream.TASKS, task.entry_id, Stream.GROUPS, b"g", "a")]) == [True]
        assert [d.task_id for d in await streams.read_groups(await streams.raise_epoch(0), count=2, block_s=0)] == ["a"]


# -- lost replies ----------------------------------------------------------------------------------------------------
async def test_a_lost_reply_of_issue_or_publish_changes_nothing_twice(server: EmbeddedRedis) -> None:
    async with FaultyProxy(server.socket_path) as proxy, _open(f"redis://{proxy.address}") as streams:
        proxy.drop_replies_of = b"task-one"
        assert not await streams.issue(0, [IssuedTask("task-one", b"p")], next_cursor=1)  # the retry found it done
        counters = await streams.counters()
        assert (counters.cursor, counters.issued, proxy.counted.lost_replies) == (1, 1, 1)

        [task] = await streams.read(Stream.TASKS, "w0", count=1, block_s=0)
        proxy.drop_replies_of = b"group-one"
        assert await streams.publish([Publication(Stream.TASKS, task.entry_id, Stream.GROUPS, b"group-one", task.task_id)]) == [
            False
        ]
        assert ((await streams.depths())[Stream.GROUPS].length, proxy.counted.lost_replies) == (1, 2)

        epoch = await streams.raise_epoch(0)
        [group] = await streams.read_groups(epoch, count=5, block_s=0)
        proxy.drop_replies_of = b"task-one"
        await streams.finish(epoch, [Finished(group.entry_id, "task-one")])
        assert (await streams.outstanding(), proxy.counted.lost_replies) == (frozenset(), 3)


async def test_a_read_whose_reply_was_lost_is_found_among_the_own_pending(server: EmbeddedRedis) -> None:
    async with FaultyProxy(server.socket_path) as proxy, _open(f"redis://{proxy.address}") as streams:
        await _issue(streams, "a")
        proxy.drop_replies_of = b"XREADGROUP"
        assert list(await streams.read(Stream.TASKS, "w0", count=1, block_s=0)) == []
        assert [d.task_id for d in await streams.own_pending(Stream.TASKS, "w0")] == ["a"]


async def test_every_operation_goes_through_a_network_that_loses_requests_and_replies(server: EmbeddedRedis) -> None:
    """Two workers, a trainer that dedupes by id, every tenth chunk of bytes lost with its connection."""
    faults = Faults(delay_s=0.002, lose_requests=0.05, lose_replies=0.05)
    names = [f"t{number}" for number in range(150)]
    async with (
        FaultyProxy(server.socket_path, faults=faults, seed=1) as proxy,
        _open(f"redis://{proxy.address}", retry_s=60.0) as streams,
    ):
        await streams.issue(0, [IssuedTask(name, b"task") for name in names], next_cursor=len(names))
        assert (await streams.counters()).issued == len(names)
        logged: set[str] = set()

        async def work(worker: str) -> None:
            while len(logged) < len(names):
                await streams.heartbeat(worker, "rollout", ttl_s=60)
                await streams.read(Stream.TASKS, worker, count=4, block_s=0)  # what it gave may be lost on its way
                held = await streams.own_pending(Stream.TASKS, worker)
                await streams.publish([Publication(Stream.TASKS, d.entry_id, Stream.GROUPS, b"g", d.task_id) for d in held])
                await asyncio.sleep(0)

        async def train() -> None:
            epoch = await streams.raise_epoch(0)
            while len(logged) < len(names):
                await streams.read_groups(epoch, count=8, block_s=0.01)
                groups = await streams.own_pending(Stream.GROUPS, trainer_consumer(epoch))
                logged.update(str(group.task_id) for group in groups)
                await streams.finish(epoch, [Finished(group.entry_id, str(group.task_id)) for group in groups])

        async with asyncio.timeout(60):
            await asyncio.gather(work("w0"), work("w1"), train())
        depths = await streams.depths()
        assert (await streams.outstanding(), sorted(logged)) == (frozenset(), sorted(names))
        assert [depths[stream].length for stream in Stream] == [0, 0, 0, 0]
        assert min(proxy.counted.lost_requests, proxy.counted.lost_replies) > 5  # the network did lose things


async def test_cut_connections_are_made_again_in_the_middle_of_a_blocking_read(server: EmbeddedRedis) -> None:
    async with FaultyProxy(server.socket_path) as proxy, _open(f"redis://{proxy.address}") as streams:
        reading = asyncio.create_task(streams.read(Stream.TASKS, "w0", count=1, block_s=20))
        await asyncio.sleep(0.1)
        assert proxy.cut() >= 1
        await _issue(streams, "a")
        assert [d.task_id for d in await asyncio.wait_for(reading, 10)] == ["a"]


# -- waiting ---------------------------------------------------------------------------------------------------------
async def test_a_block_longer_than_the_time_out_is_no_time_out(server: EmbeddedRedis) -> None:
    async with _open(server.url, timeout_s=0.2) as streams:
        epoch = await streams.raise_epoch(0)
        start = time.monotonic()
        empty = await asyncio.gather(
            streams.read(Stream.TASKS, "w0", count=1, block_s=1.0), streams.read_groups(epoch, count=1, block_s=1.0)
        )
        assert [list(deliveries) for deliveries in empty] == [[], []]
        assert 0.95 <= time.monotonic() - start < 5.0


async def test_a_frozen_server_is_waited_for_with_a_bound(server: EmbeddedRedis) -> None:
    async with _open(server.url, timeout_s=0.1, retry_s=0.2) as streams:
        assert server.pid is not None
        os.kill(server.pid, signal.SIGSTOP)
        try:
            start = time.monotonic()
            with pytest.raises(QueueUnavailable, match=r"did not answer XREADGROUP within 0.1 s"):
                await streams.read(Stream.TASKS, "w0", count=1, block_s=0.1)
            assert time.monotonic() - start < 3.0
        finally:
            os.kill(server.pid, signal.SIGCONT)
        await _issue(streams, "a")  # and it goes on afterwards


async def test_a_dead_server_is_waited_for_with_a_bound_and_without_sleeping_for_real(server: EmbeddedRedis) -> None:
    now, waits = [0.0], list[float]()

    async def sleep(seconds: float) -> None:
        waits.append(seconds)
        now[0] += seconds

    streams = RedisStreams(server.url, "r", retry_s=30.0, now=lambda: now[0], sleep=sleep)
    await streams.open()
    server.kill()
    with pytest.raises(QueueUnavailable, match="cannot be reached for publish"):
        await streams.publish([Publication(Stream.TASKS, "1-1", Stream.GROUPS, b"g", "a")])
    assert 25.0 < now[0] <= 30.0
    assert max(waits) <= 1.0
    await streams.close()


async def test_no_server_at_start_is_said_within_the_time_out(tmp_path: Path) -> None:
    streams = RedisStreams(f"unix://{tmp_path}/none.sock", "r", timeout_s=0.2, retry_s=60.0)
    start = time.monotonic()
    with pytest.raises(QueueUnavailable, match=r"none\.sock cannot be reached"):
        await streams.open()
    assert time.monotonic() - start < 3.0
    await streams.close()


# -- a full server ---------------------------------------------------------------------------------------------------
async def test_a_full_server_refuses_what_adds_and_takes_what_drains(server: EmbeddedRedis) -> None:
    async with _open(server.url, retry_s=0.1) as streams:
        await _issue(streams, "in-groups", "buried", "held", "waiting")
        await _publish_one(streams, b"group")
        await streams.heartbeat("w0", "rollout", ttl_s=60)
        buried, held = await streams.read(Stream.TASKS, "w0", count=2, block_s=0)
        epoch = await streams.raise_epoch(0)
        await streams.client.config_set("maxmemory", 1)
        with pytest.raises(OutOfMemoryError):  # it is full
            await streams.client.set("x", "y")

        with pytest.raises(QueueFull, match="maxmemory"):
            await streams.issue(4, [IssuedTask("new", b"p")], next_cursor=5)
        with pytest.raises(QueueFull, match="maxmemory"):
            await streams.publish([Publication(Stream.TASKS, held.entry_id, Stream.GROUPS, b"g")])
        counters = await streams.counters()
        assert (counters.cursor, counters.issued, counters.outstanding) == (4, 4, 4)  # refused whole
        assert [d.task_id for d in await streams.own_pending(Stream.TASKS, "w0")] == ["buried", "held"]

        await streams.open()
        await streams.heartbeat("w0", "rollout", ttl_s=60)  # renews
        await streams.heartbeat("w1", "rollout", ttl_s=60, info={"new": "worker"})  # and creates
        assert len(await streams.workers()) == 2
        epoch = await streams.raise_epoch(epoch)
        [group] = await streams.read_groups(epoch, count=5, block_s=0)
        await streams.finish(epoch, [Finished(group.entry_id, "in-groups")])
        assert await streams.bury(buried, task_id="buried", reason="r")
        assert dict(await streams.newly_dead(epoch)) == {"buried": "r"}
        await streams.finish_dead(epoch, ["buried"])
        await streams.leave("w0")
        assert [d.task_id for d in await streams.claim(Stream.TASKS, "w1", count=1)] == ["held"]
        await streams.report(epoch, discarded=2)
        assert list(await streams.take_over(epoch, count=1)) == []
        assert await streams.end_run(epoch) == {"held", "waiting"}
        await streams.clear(epoch)
        await streams.reopen(epoch)
        counters = await streams.counters()
        assert (counters.state, counters.epoch, counters.discarded) == (RunState.RUNNING, epoch, 2)


async def test_raising_the_epoch_twice_in_a_row_on_a_full_server(server: EmbeddedRedis) -> None:
    async with _open(server.url) as streams:
        await streams.client.config_set("maxmemory", 1)
        assert [await streams.raise_epoch(0), await streams.raise_epoch(7)] == [1, 7]


async def test_a_publisher_waits_while_the_server_is_full_and_loses_nothing(server: EmbeddedRedis) -> None:
    """Fifty groups of 200 kB through a server of 5 MB while nobody reads; then the trainer comes."""
    async with _open(server.url, retry_s=60.0) as streams:
        names = [f"t{i}" for i in range(50)]
        await _issue(streams, *names)
        tasks = await streams.read(Stream.TASKS, "w0", count=50, block_s=0)
        base = int((await streams.client.info("memory"))["used_memory"])
        await streams.client.config_set("maxmemory", base + 5 * 2**20)

        async def publish_all() -> list[bool]:
            done: list[bool] = []
            for task in tasks:
                done += await streams.publish([Publication(Stream.TASKS, task.entry_id, Stream.GROUPS, os.urandom(200_000))])
            return done

        publishing = asyncio.create_task(publish_all())

        async def is_stuck() -> bool:
            before = (await streams.depths())[Stream.GROUPS].length
            await asyncio.sleep(0.2)
            return 0 < before == (await streams.depths())[Stream.GROUPS].length

        await _until(is_stuck)
        stuck_at = (await streams.depths())[Stream.GROUPS].length
        assert 10 < stuck_at < 35
        assert not publishing.done()

        epoch, seen = await streams.raise_epoch(0), list[str]()
        async with asyncio.timeout(60):
            while len(seen) < 50:
                groups = await streams.read_groups(epoch, count=10, block_s=0.2)
                await streams.finish(epoch, [Finished(group.entry_id, str(group.task_id)) for group in groups])
                seen += [str(group.task_id) for group in groups]
        assert await publishing == [True] * 50
        assert sorted(seen) == sorted(names)
        assert int((await streams.client.info("memory"))["used_memory"]) < base + 3 * 2**20  # flat after the acks


async def test_trimming_a_stream_with_held_entries_loses_two_and_keeps_one(server: EmbeddedRedis) -> None:
    async with _open(server.url) as streams:
        await _issue(streams, "a", "b", "c")
        await streams.read(Stream.TASKS, "c1", count=3, block_s=0)
        await streams.client.xtrim(streams.keys.stream(Stream.TASKS), maxlen=1, approximate=False)
        claimed = await streams.claim(Stream.TASKS, "c2", count=5)  # c1 never had a lease
        assert [d.task_id for d in claimed] == ["c"]
        assert await streams.publish([Publication(Stream.TASKS, claimed[0].entry_id, Stream.GROUPS, b"g", "c")]) == [True]
        depth = (await streams.depths())[Stream.TASKS]
        assert (depth.length, depth.pending) == (0, 0)
        assert await streams.reissue([IssuedTask(name, b"task") for name in ("a", "b", "c")]) == 2


# -- restarts --------------------------------------------------------------------------------------------------------
async def test_a_killed_server_comes_back_with_everything_acknowledged(server: EmbeddedRedis) -> None:
    async with _open(server.url, retry_s=20.0) as streams:
        await _issue(streams, "published", "held", "waiting")
        await _publish_one(streams, b"group")
        await streams.read(Stream.TASKS, "w0", count=1, block_s=0)
        epoch = await streams.raise_epoch(6)
        await streams.read_groups(epoch, count=1, block_s=0)
        before = await streams.server_id()

        server.kill()
        reading = asyncio.create_task(streams.read(Stream.TASKS, "w1", count=5, block_s=0.2))  # retries until it is back
        await asyncio.to_thread(server.start)

        assert [d.task_id for d in await reading] == ["waiting"]
        assert await streams.server_id() != before
        assert (await streams.counters()).epoch == 6
        assert await streams.outstanding() == {"published", "held", "waiting"}
        assert [(d.task_id, d.delivery_count) for d in await streams.own_pending(Stream.TASKS, "w0")] == [("held", 1)]
        assert [d.task_id for d in await streams.own_pending(Stream.GROUPS, trainer_consumer(epoch))] == ["published"]


async def test_after_a_restart_live_workers_have_time_to_renew_before_anything_is_claimed(server: EmbeddedRedis) -> None:
    async with _open(server.url, lease_s=3600.0) as careful, _open(server.url, lease_s=0.0) as careless:
        await _issue(careful, "a")
        await careful.read(Stream.TASKS, "w0", count=1, block_s=0)
        assert list(await careful.claim(Stream.TASKS, "w1", count=1)) == []  # this server is younger than a lease
        assert len(await careless.claim(Stream.TASKS, "w1", count=1)) == 1


async def test_a_server_away_for_longer_than_a_lease_costs_nobody_their_work(server: EmbeddedRedis) -> None:
    """Stopped, not restarted: its uptime says nothing, and every lease has lapsed when it wakes."""
    lease_s = 0.6
    async with _open(server.url, lease_s=lease_s) as streams:
        await _issue(streams, "a")
        await streams.heartbeat("w0", "rollout", ttl_s=lease_s)
        await streams.read(Stream.TASKS, "w0", count=1, block_s=0)
        await streams.heartbeat("w1", "rollout", ttl_s=lease_s)
        assert server.pid is not None
        os.kill(server.pid, signal.SIGSTOP)
        await asyncio.sleep(1.5 * lease_s)
        os.kill(server.pid, signal.SIGCONT)
        assert list(await streams.claim(Stream.TASKS, "w1", count=1)) == []  # w1 is the first to be back
        await streams.heartbeat("w1", "rollout", ttl_s=lease_s)
        assert list(await streams.claim(Stream.TASKS, "w1", count=1)) == []
        await streams.heartbeat("w0", "rollout", ttl_s=lease_s)  # w0 renews within its chance

        async def w1_gets_it() -> bool:
            await streams.heartbeat("w1", "rollout", ttl_s=lease_s)
            return bool(await streams.claim(Stream.TASKS, "w1", count=1))

        deadline = time.monotonic() + lease_s + 0.3
        while time.monotonic() < deadline:  # past the grace, w0 alive
            await streams.heartbeat("w0", "rollout", ttl_s=lease_s)
            assert not await w1_gets_it()
            await asyncio.sleep(lease_s / 6)
        assert await _until(w1_gets_it, within_s=10)  # w0 is silent from here on


async def test_a_lease_runs_out_by_itself(server: EmbeddedRedis) -> None:
    async with _open(server.url) as streams:
        await _issue(streams, "a")
        await streams.read(Stream.TASKS, "w0", count=1, block_s=0)
        await streams.heartbeat("w0", "rollout", ttl_s=0.3)
        await streams.heartbeat("w0", "rollout", ttl_s=0.3)
        assert list(await streams.claim(Stream.TASKS, "w1", count=1)) == []
        claimed = await _until(lambda: streams.claim(Stream.TASKS, "w1", count=1))
        assert [d.delivery_count for d in claimed] == [2]
        assert list(await streams.workers()) == []


async def test_the_consumer_of_a_leaver_goes_only_after_its_work_has_moved(server: EmbeddedRedis) -> None:
    async with _open(server.url) as streams:

        async def consumers() -> set[bytes]:
            return {row["name"] for row in await streams.client.xinfo_consumers(streams.keys.stream(Stream.TASKS), "rollout")}

        await _issue(streams, "a", "b")
        await streams.heartbeat("w0", "rollout", ttl_s=60)
        await streams.heartbeat("w1", "rollout", ttl_s=60)
        await streams.read(Stream.TASKS, "w0", count=2, block_s=0)
        await streams.leave("w0")
        assert b"w0" in await consumers()
        assert len(await streams.claim(Stream.TASKS, "w1", count=1)) == 1
        assert b"w0" in await consumers()
        assert len(await streams.claim(Stream.TASKS, "w1", count=1)) == 1
        assert await consumers() == {b"w1"}


async def test_flushed_scripts_are_loaded_again(server: EmbeddedRedis) -> None:
    async with _open(server.url) as streams:
        await streams.client.script_flush()
        await _issue(streams, "a")
        assert (await streams.counters()).issued == 1


async def test_an_emptied_server_gets_its_streams_back(server: EmbeddedRedis) -> None:
    async with _open(server.url) as streams:
        await _issue(streams, "a")
        await streams.client.flushall()
        assert list(await streams.read(Stream.TASKS, "w0", count=1, block_s=0)) == []
        assert list(await streams.claim(Stream.TASKS, "w0", count=1)) == []
        assert await streams.issue(0, [IssuedTask("a", b"p")], next_cursor=1)


async def test_two_runs_on_one_server_do_not_see_each_other(server: EmbeddedRedis) -> None:
    async with _open(server.url, run_id="one") as one, _open(server.url, run_id="two") as two:
        await _issue(one, "a")
        assert list(await two.read(Stream.TASKS, "w0", count=1, block_s=0)) == []
        assert (await two.counters()).cursor == 0
        keys = {bytes(key) for key in await one.client.keys("*")}
        assert keys
        assert all(key.startswith((b"arl:{one}:", b"arl:{two}:")) for key in keys)


async def test_nothing_is_new_before_open(server: EmbeddedRedis) -> None:
    streams = RedisStreams(server.url, "never-opened")
    assert (await streams.counters()).state is RunState.NEW
    await streams.close()


# -- refusals --------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("policy", ["allkeys-lru", "volatile-ttl", "allkeys-random"])
async def test_an_evicting_server_is_refused_with_the_remedy(server: EmbeddedRedis, policy: str) -> None:
    async with _open(server.url) as streams:
        await streams.client.config_set("maxmemory-policy", policy)
        with pytest.raises(QueueRefused, match=rf"maxmemory-policy={policy}.*set it to noeviction"):
            await streams.open()


async def test_a_wrong_password_is_refused_at_once_and_not_shown(server: EmbeddedRedis) -> None:
    async with _open(server.url) as streams:
        await streams.client.config_set("requirepass", "right")
        stranger = RedisStreams(f"unix://:secret@{server.socket_path}", "r", retry_s=60.0)
        with pytest.raises(QueueRefused, match=r"user, password and ACL") as refused:
            await stranger.open()
        assert "secret" not in str(refused.value)
        await stranger.close()


@pytest.mark.parametrize("url", ["http://127.0.0.1:6379", "localhost:6379", ""])
def test_an_address_that_is_none_is_refused(url: str) -> None:
    with pytest.raises(QueueRefused, match="use redis://, rediss:// or unix://"):
        RedisStreams(url, "r")
