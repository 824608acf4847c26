"""64 workers and a trainer through one Redis server, at what it gives: latency, memory, and whether anything is lost.

Synthetic roles, everything between them real: tasks are issued under an admission bound, leased, decoded, answered with a group
of 8 × 512 tokens, published, read behind the fence, decoded, finished. Workers live in two processes, the trainer in one.

full      as fast as it goes, ADMITTED groups out at a time: throughput, and the latency that a full pipe has
half      paced at half of that: the latency that a run which waits for its engines has
raw       the same bytes, XADD in pipelines of 64 from two processes and nothing else (a client of our own in the place of
          redis-benchmark, which is not everywhere): what the server takes at most

`always` and `everysec` are two servers that take turns in one run; `always` runs for --seconds in all. p50 and p99 are from
publish called to group delivered. Memory is the server's `used_memory`, twice a second; growth compares the last quarter of a
turn with its second one.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import multiprocessing
import statistics
import tempfile
import time
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from multiprocessing.synchronize import Barrier, Event
from pathlib import Path
from typing import Any, Literal, TypeAlias

import numpy as np
import redis as redis_py
from rich.console import Console
from rich.table import Table

from async_rl.launch.embedded_redis import EmbeddedRedis
from async_rl.testing.builders import make_task, make_trajectory
from protocol.codec import decode_group, decode_task, encode
from protocol.messages import TrajectoryGroup
from protocol.redis_streams import RedisStreams
from protocol.streams import Finished, IssuedTask, Publication, RunState, Stream

PROCESSES, WORKERS_EACH = 2, 32
GROUP_SIZE, PROMPT_TOKENS, NUM_TOKENS = 8, 64, 512
ADMITTED = 256
BATCH = 64
ROUNDS = 3
WAIT_S = 120.0
Durability: TypeAlias = Literal["always", "everysec"]


@dataclass(frozen=True)
class Turn:
    """One turn of one server: `rate` groups a second are issued; None: as fast as it goes."""

    url: str
    run_id: str
    seconds: float
    rate: float | None


@dataclass(frozen=True)
class Measured:
    """What a turn showed."""

    groups: int
    seconds: float
    latencies_s: np.ndarray[Any, np.dtype[np.float64]]
    memory_bytes: Sequence[int]
    lost: int
    twice: int

    @property
    def rate(self) -> float:
        return self.groups / self.seconds

    @property
    def growth(self) -> float:
        """Of the server's memory, from the second quarter of the turn to the last."""
        quarter = max(1, len(self.memory_bytes) // 4)
        before = statistics.mean(self.memory_bytes[quarter : 2 * quarter] or self.memory_bytes[:1])
        return statistics.mean(self.memory_bytes[-quarter:]) / before - 1


# -- roles -----------------------------------------------------------------------------------------------------------
def _trajectories() -> tuple[Any, ...]:
    random = np.random.default_rng(0)
    sampled = NUM_TOKENS - PROMPT_TOKENS
    return tuple(
        make_trajectory(
            prompt_length=PROMPT_TOKENS,
            turns=[(sampled, 0)],
            versions=[7] * (sampled // 2) + [8] * (sampled - sampled // 2),
            token_ids=random.integers(0, 150_000, NUM_TOKENS).tolist(),
            logprobs=(-random.exponential(1.0, sampled)).tolist(),
            seed=index,
        )
        for index in range(GROUP_SIZE)
    )


async def _worker(streams: RedisStreams, name: str, trajectories: tuple[Any, ...], stop: Event) -> None:
    renewed = 0.0
    while not stop.is_set():
        if time.monotonic() - renewed > 3.0:
            renewed = time.monotonic()
            await streams.heartbeat(name, "rollout", ttl_s=15.0)
        for task in await streams.read(Stream.TASKS, name, count=1, block_s=0.2):
            group = TrajectoryGroup(decode_task(task.payload), trajectories, 7, time.time())
            publication = Publication(Stream.TASKS, task.entry_id, Stream.GROUPS, encode(group), task.task_id)
            assert await streams.publish([publication]) == [True]
    await streams.leave(name)


async def _workers(turn: Turn, first: int, barrier: Barrier, stop: Event) -> None:
    streams, trajectories = RedisStreams(turn.url, turn.run_id), _trajectories()
    await streams.counters()
    await asyncio.to_thread(barrier.wait, WAIT_S)
    names = [f"w{first + number}" for number in range(WORKERS_EACH)]
    await asyncio.gather(*(_worker(streams, name, trajectories, stop) for name in names))
    await streams.close()


def _run_workers(turn: Turn, first: int, barrier: Barrier, stop: Event) -> None:
    asyncio.run(_workers(turn, first, barrier, stop))


async def _trainer(turn: Turn, barrier: Barrier) -> tuple[list[float], list[str]]:
    """Latencies and task ids in the order of their delivery, until the data has ended and everything is in."""
    streams = RedisStreams(turn.url, turn.run_id)
    epoch = await streams.raise_epoch(1)
    await asyncio.to_thread(barrier.wait, WAIT_S)
    latencies: list[float] = []
    seen: list[str] = []
    while True:
        deliveries = await streams.read_groups(epoch, count=BATCH, block_s=0.2)
        now = time.time()
        for delivery in deliveries:
            group = decode_group(delivery.payload)
            latencies.append(now - group.published_at_s)
            seen.append(group.task_id)
        await streams.finish(epoch, [Finished(d.entry_id, str(d.task_id)) for d in deliveries])
        if not deliveries:
            counters = await streams.counters()
            if counters.state is RunState.EXHAUSTED and counters.outstanding == 0:
                await streams.close()
                return latencies, seen


def _run_trainer(turn: Turn, barrier: Barrier, results: Any) -> None:
    results.put(asyncio.run(_trainer(turn, barrier)))


async def _coordinate(turn: Turn) -> tuple[int, float, list[int]]:
    """Issue while there is room (and the pace allows). Returns groups issued, seconds, and the server's memory over them."""
    streams = RedisStreams(turn.url, turn.run_id)
    started, issued, memory, looked = time.monotonic(), 0, list[int](), 0.0
    while (elapsed := time.monotonic() - started) < turn.seconds:
        counters = await streams.counters()
        room = min(BATCH, ADMITTED - counters.outstanding)
        if turn.rate is not None:
            room = min(room, int(turn.rate * elapsed) - issued)
        if room > 0:
            tasks = [make_task(row=row, group_size=GROUP_SIZE) for row in range(issued, issued + room)]
            issuing = [IssuedTask(task.task_id, encode(task)) for task in tasks]
            assert await streams.issue(issued, issuing, next_cursor=issued + room)
            issued += room
        if elapsed - looked >= 0.5:
            looked = elapsed
            memory.append(int((await streams.client.info("memory"))["used_memory"]))
        await asyncio.sleep(0.001)
    while True:
        if not (await streams.counters()).outstanding:
            break
        await asyncio.sleep(0.01)
    seconds = time.monotonic() - started
    assert await streams.mark_exhausted(issued)
    await streams.close()
    return issued, seconds, memory or [1]


async def _open(turn: Turn) -> None:
    streams = RedisStreams(turn.url, turn.run_id)
    await streams.open()
    await streams.close()


def load(turn: Turn) -> Measured:
    """One turn, from the start that all processes agree on until the last group is finished."""
    asyncio.run(_open(turn))
    spawn = multiprocessing.get_context("spawn")
    barrier, stop, results = spawn.Barrier(PROCESSES + 2), spawn.Event(), spawn.Queue()
    processes = [
        spawn.Process(target=_run_workers, args=(turn, WORKERS_EACH * number, barrier, stop)) for number in range(PROCESSES)
    ]
    processes.append(spawn.Process(target=_run_trainer, args=(turn, barrier, results)))
    for process in processes:
        process.start()
    try:
        barrier.wait(WAIT_S)
        issued, seconds, memory = asyncio.run(_coordinate(turn))
        latencies, seen = results.get(timeout=WAIT_S)
        stop.set()
        for process in processes:
            process.join(WAIT_S)
            assert process.exitcode == 0, f"{process.name} ended with {process.exitcode}"
    finally:
        for process in processes:
            process.kill()
    warm = np.asarray(latencies[min(len(latencies) // 10, ADMITTED) :])
    return Measured(issued, seconds, warm, memory, lost=issued - len(set(seen)), twice=len(seen) - len(set(seen)))


# -- the limit -------------------------------------------------------------------------------------------------------
def _run_raw(url: str, key: str, seconds: float, barrier: Barrier, results: Any) -> None:
    group = TrajectoryGroup(make_task(row=0, group_size=GROUP_SIZE), _trajectories(), 7, time.time())
    frame, client = encode(group), redis_py.Redis.from_url(url, protocol=2)
    client.ping()
    barrier.wait(WAIT_S)
    started, added = time.perf_counter(), 0
    while time.perf_counter() - started < seconds:
        pipe = client.pipeline(transaction=False)
        for _ in range(BATCH):
            pipe.xadd(key, {"d": frame}, maxlen=ADMITTED, approximate=True)
        pipe.execute()
        added += BATCH
    results.put(added / (time.perf_counter() - started))


def raw(url: str, seconds: float) -> float:
    """XADD a second that the server takes from two clients which do nothing else."""
    spawn = multiprocessing.get_context("spawn")
    barrier, results = spawn.Barrier(PROCESSES), spawn.Queue()
    processes = [spawn.Process(target=_run_raw, args=(url, f"raw{n}", seconds, barrier, results)) for n in range(PROCESSES)]
    for process in processes:
        process.start()
    try:
        return float(sum(results.get(timeout=WAIT_S) for _ in processes))
    finally:
        for process in processes:
            process.join(10)
            process.kill()


# -- the whole -------------------------------------------------------------------------------------------------------
def measure(seconds: float, rounds: int) -> dict[Durability, dict[str, Any]]:
    """Mode → what its turns showed: `full`, `half` (Measured each), `raw` (XADD a second)."""
    found: dict[Durability, dict[str, Any]] = {mode: {"full": [], "half": [], "raw": []} for mode in ("always", "everysec")}
    with ExitStack() as stack:
        directory = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="arl-")))
        servers = {mode: stack.enter_context(EmbeddedRedis(directory / mode, appendfsync=mode)) for mode in found}
        for number in range(rounds):
            for mode, server in servers.items():
                length = seconds / rounds if mode == "always" else seconds / rounds / 2
                full = load(Turn(server.url, f"full-{number}", length, None))
                found[mode]["full"].append(full)
                found[mode]["half"].append(load(Turn(server.url, f"half-{number}", length / 4, full.rate / 2)))
                found[mode]["raw"].append(raw(server.url, length / 4))
                redis_py.Redis.from_url(server.url).flushall()
    return found


def metrics_of(found: dict[Durability, dict[str, Any]]) -> dict[str, dict[str, object]]:
    metrics: dict[str, dict[str, object]] = {}
    for mode, turns in found.items():
        limit = statistics.median(turns["raw"])
        rate = statistics.median(turn.rate for turn in turns["full"])
        other = statistics.median(turn.rate for turn in found["everysec"]["full"])
        metrics[f"groups_{mode}"] = _metric(rate, "groups/s", baseline=other, limit_share=rate / limit, raw_xadd=limit)
        for load_, name in (("full", "latency"), ("half", "latency_half_load")):
            latencies = np.concatenate([turn.latencies_s for turn in turns[load_]])
            for percent in (50, 99):
                metrics[f"{name}_p{percent}_{mode}"] = _metric(float(1000 * np.percentile(latencies, percent)), "ms")
        everything = [*turns["full"], *turns["half"]]
        metrics[f"memory_growth_{mode}"] = _metric(max(turn.growth for turn in turns["full"]), "share")
        metrics[f"memory_max_{mode}"] = _metric(max(max(turn.memory_bytes) for turn in turns["full"]) / 2**20, "MiB")
        metrics[f"lost_{mode}"] = _metric(sum(turn.lost for turn in everything), "groups")
        metrics[f"twice_{mode}"] = _metric(sum(turn.twice for turn in everything), "groups")
        metrics[f"moved_{mode}"] = _metric(sum(turn.groups for turn in everything), "groups")
    return metrics


def _metric(value: float, unit: str, *, baseline: float | None = None, **more: float) -> dict[str, object]:
    ratio = None if not baseline else value / baseline
    return {"value": value, "unit": unit, "baseline": baseline, "ratio": ratio, "limit_share": None, **more}


def show(metrics: dict[str, dict[str, Any]]) -> None:
    table = Table(
        "metric", "value", "unit", "of everysec", "raw XADD/s", "share of it", title="load: 64 workers, 8 × 512 tokens"
    )
    for name, m in metrics.items():
        ratio = "" if m["ratio"] is None else f"{m['ratio']:.2f}"
        limit = f"{m['raw_xadd']:,.0f}" if "raw_xadd" in m else ""
        share = "" if m["limit_share"] is None else f"{m['limit_share']:.2f}"
        table.add_row(name, f"{m['value']:,.2f}", m["unit"], ratio, limit, share)
    Console(width=120).print(table)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=Path("runs/bench"))
    parser.add_argument("--seconds", type=float, default=60.0, help="of full load with appendfsync always, all turns together")
    parser.add_argument("--smoke", action="store_true", help="one short turn of everything")
    arguments = parser.parse_args()
    found = measure(4.0, 1) if arguments.smoke else measure(arguments.seconds, ROUNDS)
    metrics = metrics_of(found)
    arguments.out.mkdir(parents=True, exist_ok=True)
    (arguments.out / "load.json").write_text(json.dumps(metrics, indent=2) + "\n", encoding="utf-8")
    show(metrics)
    problems = [name for name, m in metrics.items() if name.startswith(("lost_", "twice_")) and m["value"]]
    if problems:
        raise SystemExit(f"lost or doubled: {problems}")


if __name__ == "__main__":
    main()
