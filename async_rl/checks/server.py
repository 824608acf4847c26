"""`async-rl doctor` on the Redis server: may a run trust it, and is it near enough?"""

from __future__ import annotations

import secrets
import statistics
import time
from collections.abc import AsyncIterator, Callable, Iterator, Mapping
from contextlib import asynccontextmanager, suppress

from async_rl.checks.findings import Finding, fail, ok, warn
from async_rl.config.run import RedisConfig
from async_rl.errors import ProtocolError
from protocol.keys import Keys
from protocol.redis_client import RedisClient
from protocol.redis_streams import RedisStreams
from protocol.streams import Finished, IssuedTask, Publication, Stream

PINGS = 50
OLDEST_SERVER = (6, 2)
SLOW_PING_S, FAR_PING_S = 0.01, 0.25
LARGE_SKEW_S = 1.0
ALMOST_FULL, FULL = 0.8, 0.95


async def check_server(redis: RedisConfig, url: str, *, unix_clock: Callable[[], float] = time.time) -> list[Finding]:
    """Everything about the server at `url` (redis.url, with `embedded` resolved). Never raises for a server's sake."""
    async with _client(redis, url) as client:
        try:
            info = _info(await client.execute("INFO", retry_s=0.0))
        except ProtocolError as error:
            return [fail("server", "no answer", str(error))]
        try:
            found = [*_server_lines(info), *_memory(info), *await _persistence(client, info)]
            found += [await _latency(client, redis.timeout_s), await _clock(client, unix_clock)]
        except ProtocolError as error:
            return [fail("server", "answers INFO, but not what a run needs", str(error))]
        return [*found, await _moves(redis, url, client)]


@asynccontextmanager
async def _client(redis: RedisConfig, url: str) -> AsyncIterator[RedisClient]:
    client = RedisClient(url, timeout_s=redis.timeout_s, retry_s=0.0, tls=redis.tls)
    try:
        yield client
    finally:
        await client.close()


def _info(reply: bytes) -> dict[str, str]:
    lines = (line.partition(":") for line in reply.decode(errors="replace").splitlines())
    return {name: value for name, colon, value in lines if colon}


def _server_lines(info: Mapping[str, str]) -> Iterator[Finding]:
    version = info.get("redis_version", "0.0")
    name = f"Valkey {info['valkey_version']}" if "valkey_version" in info else f"Redis {version}"
    if tuple(int(part) for part in version.split(".")[:2]) < OLDEST_SERVER:
        yield fail("server version", name, "use Redis 6.2 or newer, or Valkey")
    else:
        yield ok("server version", name)
    if info.get("role", "master") != "master":
        yield fail("server role", f"replica of {info.get('master_host', '?')}", "set redis.url to the primary: a run writes")
    clients, most = int(info.get("connected_clients", 0)), int(info.get("maxclients", 0))
    if most and clients > ALMOST_FULL * most:
        yield warn("connections", f"{clients} of {most}", "raise maxclients: every role keeps a few connections")


def _memory(info: Mapping[str, str]) -> Iterator[Finding]:
    policy = info.get("maxmemory_policy", "noeviction")
    if policy == "noeviction":
        yield ok("memory policy", policy)
    else:
        advice = "CONFIG SET maxmemory-policy noeviction, and in the server's config file: eviction drops work silently"
        yield fail("memory policy", policy, advice)
    used, limit = int(info.get("used_memory", 0)), int(info.get("maxmemory", 0))
    share = used / limit if limit else 0.0
    found = f"{_megabytes(used)} used of {_megabytes(limit) if limit else 'no limit'}"
    if share > FULL:
        yield fail("memory", found, "raise maxmemory, or delete what other programs left: writers would wait at once")
    elif share > ALMOST_FULL:
        yield warn("memory", found, "raise maxmemory: at the limit writers wait")
    else:
        yield ok("memory", found)


async def _persistence(client: RedisClient, info: Mapping[str, str]) -> list[Finding]:
    if info.get("aof_enabled") != "1":
        advice = "set appendonly yes: without it a restart of the server loses what is queued"
        return [fail("persistence", "no append-only file", advice)]
    if info.get("aof_last_write_status", "ok") != "ok":
        return [fail("persistence", "the last write to the append-only file failed", "look at the server's log and its disk")]
    try:
        _, fsync = await client.execute("CONFIG", "GET", "appendfsync", retry_s=0.0)
    except (ProtocolError, ValueError):
        advice = "make sure that it is always (or everysec: a crash may lose the last second, which is then done again)"
        return [warn("persistence", "append-only file; appendfsync cannot be read here", advice)]
    found = f"append-only file, appendfsync {fsync.decode()}"
    if fsync == b"always":
        return [ok("persistence", found)]
    if fsync == b"everysec":
        return [warn("persistence", found, "always keeps what was acknowledged; with everysec a crash loses about a second")]
    return [fail("persistence", found, "set appendfsync always (or everysec): a crash would lose what the kernel still holds")]


async def _latency(client: RedisClient, timeout_s: float) -> Finding:
    taken: list[float] = []
    for _ in range(PINGS):
        started = time.perf_counter()
        await client.execute("PING", retry_s=0.0)
        taken.append(time.perf_counter() - started)
    p50, worst = statistics.median(taken), sorted(taken)[-2]
    found = f"p50 {1000 * p50:.2f} ms, second worst of {PINGS} {1000 * worst:.2f} ms"
    if p50 > min(FAR_PING_S, timeout_s / 4):
        return fail("round trip", found, "use a server near the roles, or raise redis.timeout_s")
    if p50 > SLOW_PING_S:
        return warn("round trip", found, "a server nearer to the roles would hold them up less")
    return ok("round trip", found)


async def _clock(client: RedisClient, unix_clock: Callable[[], float]) -> Finding:
    """The difference to the middle of the round trip that asked for it."""
    before = unix_clock()
    seconds, microseconds = await client.execute("TIME", retry_s=0.0)
    here = (before + unix_clock()) / 2
    skew_s = int(seconds) + int(microseconds) / 1e6 - here
    found = f"{1000 * skew_s:+.0f} ms to this machine"
    if abs(skew_s) > LARGE_SKEW_S:
        return warn("clock", found, "run NTP on both: ages and times of day in reports would be wrong (leases would not)")
    return ok("clock", found)


async def _moves(redis: RedisConfig, url: str, client: RedisClient) -> Finding:
    """One task through every move of a run, under a run id of its own, deleted afterwards: does the user's ACL allow it all?"""
    run_id = f"doctor-{secrets.token_hex(6)}"
    streams = RedisStreams(url, run_id, timeout_s=redis.timeout_s, retry_s=0.0, lease_s=0, tls=redis.tls)
    started = time.perf_counter()
    try:
        await streams.open()
        await _one_task(streams)
        seconds = time.perf_counter() - started
        return ok("queue operations", f"issue, lease, publish, read, finish, leave: {1000 * seconds:.0f} ms together")
    except ProtocolError as error:
        return fail("queue operations", "refused", f"{error}; docs/operations.md lists what an ACL user needs")
    finally:
        await streams.close()
        with suppress(ProtocolError):  # what could not be written need not be removed
            await client.execute("DEL", *_keys_of(streams.keys), retry_s=0.0)


async def _one_task(streams: RedisStreams) -> None:
    await streams.heartbeat("doctor", "doctor", ttl_s=60)
    await streams.issue(0, [IssuedTask("doctor", b"x")], next_cursor=1)
    [task] = await streams.read(Stream.TASKS, "doctor", count=1, block_s=0)
    await streams.claim(Stream.TASKS, "doctor", count=1)
    await streams.publish([Publication(Stream.TASKS, task.entry_id, Stream.GROUPS, b"y", task.task_id)])
    epoch = await streams.raise_epoch(1)
    [group] = await streams.read_groups(epoch, count=1, block_s=0)
    await streams.finish(epoch, [Finished(group.entry_id, "doctor")])
    await streams.counters()
    await streams.depths()
    await streams.leave("doctor")


def _keys_of(keys: Keys) -> list[str]:
    own = [keys.state, keys.outstanding, keys.newly_dead, keys.started, keys.workers, keys.pulse, keys.lease("doctor")]
    return [*own, *map(keys.stream, Stream)]


def _megabytes(num_bytes: int) -> str:
    return f"{num_bytes / 2**20:,.0f} MiB"
