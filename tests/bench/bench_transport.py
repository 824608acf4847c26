"""How many messages a second go from process to process through Redis, with everything that a run needs around them.

ours      lease the task, encode, publish (Lua), read COUNT 128 behind the fence, decode, finish (Lua), heartbeats
baseline  pickled lists, one XADD each, XREAD COUNT 1
redis     the limit of the server: the same bytes, XADD in pipelines of 128, XREADGROUP COUNT 128, XACK; no coding
zmq       the limit of a pipe: the same bytes over PUSH/PULL on ipc; no coding, nothing kept

All four take turns on one server (unix socket, AOF; the embedded server with its own settings), each beginning with an empty
one. `value` and `baseline` are messages a second, medians over the rounds; `limit_share` is ours by redis; `cpu_us` is the CPU
time of each process for one message, which a busy machine disturbs less than the rates.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import multiprocessing
import os
import pickle
import statistics
import tempfile
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from multiprocessing.synchronize import Barrier
from pathlib import Path
from typing import Any, Literal, TypeAlias

import numpy as np
import psutil
import redis as redis_py
import zmq
from rich.console import Console
from rich.table import Table

from async_rl.launch.embedded_redis import EmbeddedRedis
from async_rl.launch.processes import ALLOCATOR
from protocol import event_loop
from protocol.codec import decode_group, encode
from protocol.messages import FinishReason, PromptTask, Reward, SamplingParams, Timings, Trajectory, TrajectoryGroup, Turn
from protocol.redis_streams import RedisStreams
from protocol.streams import Finished, IssuedTask, Publication, Stream
from protocol.versions import VersionSpan

BATCH = 128
PROMPT_TOKENS = 64
NUM_DISTINCT = 32
JOIN_TIMEOUT_S = 120.0
Durability: TypeAlias = Literal["always", "everysec"]
TOKENS = {"512": 512, "16k": 16384}


@dataclass(frozen=True)
class Job:
    """One measurement: num_messages of num_tokens through one way."""

    way: str
    address: str
    num_tokens: int
    num_messages: int
    run_id: str = "bench"


# -- messages --------------------------------------------------------------------------------------------------------
def make_groups(num_tokens: int) -> list[TrajectoryGroup]:
    """Groups of one trajectory that differ from each other, as a worker would make them."""
    random = np.random.default_rng(0)
    return [_group(index, num_tokens, random) for index in range(NUM_DISTINCT)]


def _group(index: int, num_tokens: int, random: np.random.Generator) -> TrajectoryGroup:
    sampled = slice(PROMPT_TOKENS, num_tokens)
    loss_mask = np.zeros(num_tokens, np.uint8)
    loss_mask[sampled] = 1
    logprobs = np.zeros(num_tokens, np.float32)
    logprobs[sampled] = -random.exponential(1.0, num_tokens - PROMPT_TOKENS)
    half = num_tokens // 2
    trajectory = Trajectory(
        token_ids=random.integers(0, 150_000, num_tokens, dtype=np.int32),
        loss_mask=loss_mask,
        behavior_logprobs=logprobs,
        versions=(VersionSpan(PROMPT_TOKENS, half, 7, 7), VersionSpan(half, num_tokens, 8, 8)),
        sampling=SamplingParams(1.0, num_tokens, seed=1234567 + index, stop_token_ids=(2,)),
        turns=(Turn(PROMPT_TOKENS, num_tokens, FinishReason.STOP),),
        finish_reason=FinishReason.STOP,
        timings=Timings(1.0e9, 1.0e9 + 3.5, 0.1, 3.3, 0.0, 0.1),
        worker_id="rollout-0",
        engine_id="rollout-0/0",
        reward=Reward(1.0, {"exact_match": 1.0}),
    )
    return TrajectoryGroup(_task(index), (trajectory,), started_version=7, published_at_s=1.0e9)


def _task(index: int) -> PromptTask:
    return PromptTask(
        "bench",
        f"bench:0:{index}:0",
        "bench",
        0,
        index,
        0,
        "4213>",
        {"answer": "1234"},
        "sort_digits",
        1,
        index,
        1.0,
        512,
        1.0e9,
    )


def as_lists(group: TrajectoryGroup) -> dict[str, Any]:
    """What the usual way pickles: plain lists and a few scalars."""
    trajectory = group.trajectories[0]
    return {
        "token_ids": trajectory.token_ids.tolist(),
        "loss_mask": trajectory.loss_mask.tolist(),
        "behavior_logprobs": trajectory.behavior_logprobs.tolist(),
        "versions": [8] * len(trajectory.token_ids),
        "task_id": group.task_id,
        "reward": 1.0,
    }


# -- ours ------------------------------------------------------------------------------------------------------------
async def _prepare_ours(job: Job) -> None:
    streams = RedisStreams(job.address, job.run_id)
    await streams.open()
    payload = encode(_task(0))
    for first in range(0, job.num_messages, 1000):
        names = [f"bench:0:{row}:0" for row in range(first, min(first + 1000, job.num_messages))]
        assert await streams.issue(first, [IssuedTask(name, payload) for name in names], next_cursor=first + len(names))
    await streams.raise_epoch(1)
    await streams.close()


async def _heartbeats(streams: RedisStreams, worker_id: str) -> None:
    while True:
        await streams.heartbeat(worker_id, "rollout", ttl_s=15.0)
        await asyncio.sleep(0.5)


async def _produce_ours(job: Job, start: Callable[[], object]) -> None:
    streams = RedisStreams(job.address, job.run_id)
    groups = make_groups(job.num_tokens)
    beating = asyncio.create_task(_heartbeats(streams, "w0"))
    await streams.counters()
    start()
    reading = asyncio.create_task(streams.read(Stream.TASKS, "w0", count=BATCH, block_s=1.0))
    publishing: asyncio.Task[Any] | None = None
    while leased := await reading:
        reading = asyncio.create_task(streams.read(Stream.TASKS, "w0", count=BATCH, block_s=0.0))  # beside the work on this one
        await asyncio.sleep(0)
        publications = [
            Publication(Stream.TASKS, task.entry_id, Stream.GROUPS, encode(groups[i % NUM_DISTINCT]), task.task_id)
            for i, task in enumerate(leased)
        ]
        if publishing is not None:
            assert all(await publishing)
        publishing = asyncio.create_task(streams.publish(publications))
    if publishing is not None:
        assert all(await publishing)
    beating.cancel()
    await asyncio.gather(beating, return_exceptions=True)
    await streams.close()


async def _consume_ours(job: Job, start: Callable[[], object]) -> float:
    streams = RedisStreams(job.address, job.run_id)
    await streams.counters()
    num_read = 0
    start()
    begin = time.perf_counter()
    finishing: asyncio.Task[None] | None = None
    reading = asyncio.create_task(streams.read_groups(1, count=BATCH, block_s=10.0))
    while num_read < job.num_messages:
        deliveries = await reading
        num_read += len(deliveries)
        if num_read < job.num_messages:
            reading = asyncio.create_task(streams.read_groups(1, count=BATCH, block_s=10.0))  # beside the work on these
            await asyncio.sleep(0)
        for delivery in deliveries:
            assert len(decode_group(delivery.payload).trajectories[0].token_ids) == job.num_tokens
        if finishing is not None:
            await finishing
        finishing = asyncio.create_task(streams.finish(1, [Finished(d.entry_id, d.task_id or "") for d in deliveries]))
    if finishing is not None:
        await finishing
    seconds = time.perf_counter() - begin
    assert (await streams.counters()).outstanding == 0
    await streams.close()
    return seconds


# -- the others ------------------------------------------------------------------------------------------------------
def _connect(job: Job) -> redis_py.Redis:
    return redis_py.Redis.from_url(job.address, protocol=2)


def _produce_baseline(job: Job, start: Callable[[], object]) -> None:
    client, messages = _connect(job), [as_lists(group) for group in make_groups(job.num_tokens)]
    client.ping()
    start()
    for index in range(job.num_messages):
        client.xadd("baseline", {"d": pickle.dumps(messages[index % NUM_DISTINCT])})


def _consume_baseline(job: Job, start: Callable[[], object]) -> float:
    client, last, num_read = _connect(job), b"0", 0
    client.ping()
    start()
    begin = time.perf_counter()
    while num_read < job.num_messages:
        for _, entries in client.xread({"baseline": last}, count=1, block=10_000):
            for entry_id, fields in entries:
                assert len(pickle.loads(fields[b"d"])["token_ids"]) == job.num_tokens
                last = entry_id
                num_read += 1
    return time.perf_counter() - begin


def _produce_redis(job: Job, start: Callable[[], object]) -> None:
    client, frames = _connect(job), [encode(group) for group in make_groups(job.num_tokens)]
    client.ping()
    start()
    for first in range(0, job.num_messages, BATCH):
        pipe = client.pipeline(transaction=False)
        for index in range(first, min(first + BATCH, job.num_messages)):
            pipe.xadd("raw", {"d": frames[index % NUM_DISTINCT]})
        pipe.execute()


def _consume_redis(job: Job, start: Callable[[], object]) -> float:
    client, num_read = _connect(job), 0
    client.response_callbacks.clear()
    client.execute_command("XGROUP", "CREATE", "raw", "g", "0", "MKSTREAM")
    start()
    begin = time.perf_counter()
    while num_read < job.num_messages:
        reply = client.execute_command("XREADGROUP", "GROUP", "g", "c", "COUNT", BATCH, "BLOCK", 10_000, "STREAMS", "raw", ">")
        entry_ids = [entry[0] for entry in reply[0][1]]
        client.execute_command("XACK", "raw", "g", *entry_ids)
        num_read += len(entry_ids)
    return time.perf_counter() - begin


def _produce_zmq(job: Job, start: Callable[[], object]) -> None:
    frames = [encode(group) for group in make_groups(job.num_tokens)]
    with zmq.Context() as context, context.socket(zmq.PUSH) as push:
        push.connect(job.address)
        start()
        for index in range(job.num_messages):
            push.send(frames[index % NUM_DISTINCT])


def _consume_zmq(job: Job, start: Callable[[], object]) -> float:
    with zmq.Context() as context, context.socket(zmq.PULL) as pull:
        pull.bind(job.address)
        start()
        begin = time.perf_counter()
        for _ in range(job.num_messages):
            pull.recv()
        return time.perf_counter() - begin


PRODUCERS: dict[str, Callable[[Job, Callable[[], object]], None]] = {
    "ours": lambda job, start: event_loop.run(_produce_ours(job, start)),
    "baseline": _produce_baseline,
    "redis": _produce_redis,
    "zmq": _produce_zmq,
}
CONSUMERS: dict[str, Callable[[Job, Callable[[], object]], float]] = {
    "ours": lambda job, start: event_loop.run(_consume_ours(job, start)),
    "baseline": _consume_baseline,
    "redis": _consume_redis,
    "zmq": _consume_zmq,
}


# -- measuring -------------------------------------------------------------------------------------------------------
@dataclass(frozen=True)
class Measured:
    """One measurement: messages a second, and the CPU time (µs a message) of each process that took part."""

    rate: float
    cpu_us: Mapping[str, float]


class _CpuMeter:
    """What a process computes after the start that all agree on."""

    def __init__(self, barrier: Barrier) -> None:
        self._barrier = barrier
        self._begin_s = 0.0

    def start(self) -> None:
        self._barrier.wait(JOIN_TIMEOUT_S)
        self._begin_s = time.process_time()

    def seconds(self) -> float:
        return time.process_time() - self._begin_s


def _producer(job: Job, barrier: Barrier, results: Any) -> None:
    meter = _CpuMeter(barrier)
    PRODUCERS[job.way](job, meter.start)
    results.put(("producer", 0.0, meter.seconds()))


def _consumer(job: Job, barrier: Barrier, results: Any) -> None:
    meter = _CpuMeter(barrier)
    seconds = CONSUMERS[job.way](job, meter.start)
    results.put(("consumer", seconds, meter.seconds()))


def measure(job: Job, server: psutil.Process) -> Measured:
    """From the start that both processes agree on to the last acknowledgement.

    Every process gets the environment that the launcher gives its roles.
    """
    os.environ.update(ALLOCATOR)
    if job.way == "ours":
        event_loop.run(_prepare_ours(job))
    spawn = multiprocessing.get_context("spawn")
    barrier, results = spawn.Barrier(2), spawn.Queue()
    processes = [spawn.Process(target=role, args=(job, barrier, results)) for role in (_producer, _consumer)]
    before_s = _cpu_s(server)
    for process in processes:
        process.start()
    try:
        reports = [results.get(timeout=JOIN_TIMEOUT_S) for _ in processes]
        for process in processes:
            process.join(JOIN_TIMEOUT_S)
            assert process.exitcode == 0, f"{process.name} ended with {process.exitcode}"
    finally:
        for process in processes:
            process.kill()
    cpu_s = {name: used_s for name, _, used_s in reports} | {"server": _cpu_s(server) - before_s}
    seconds = max(wall_s for _, wall_s, _ in reports)
    return Measured(job.num_messages / seconds, {name: used_s / job.num_messages * 1e6 for name, used_s in cpu_s.items()})


def _cpu_s(process: psutil.Process) -> float:
    times = process.cpu_times()
    return float(times.user + times.system)


def _empty(url: str) -> None:
    """Everybody begins with an empty server and a short append-only file, so nobody pays for rewriting another's."""
    client = redis_py.Redis.from_url(url)
    client.flushall()
    client.bgrewriteaof()
    deadline = time.monotonic() + JOIN_TIMEOUT_S
    while client.info("persistence")["aof_rewrite_in_progress"]:
        assert time.monotonic() < deadline, "the server does not finish rewriting its append-only file"
        time.sleep(0.02)


NUM_MESSAGES = {
    "512": {"ours": 16384, "baseline": 4096, "redis": 16384, "zmq": 32768},
    "16k": {"ours": 1536, "baseline": 512, "redis": 1536, "zmq": 3072},
}
Rounds: TypeAlias = dict[str, list[Measured]]


def run_mode(durability: Durability, rounds: int, scale: float) -> dict[str, Rounds]:
    """Metric suffix → way → what each round measured. The ways take turns, so a busy moment does not hit one of them alone."""
    measured: dict[str, Rounds] = {size: {way: [] for way in PRODUCERS} for size in TOKENS}
    with (
        tempfile.TemporaryDirectory(prefix="arl-") as directory,
        EmbeddedRedis(Path(directory) / "redis", appendfsync=durability) as server,
    ):
        for _ in range(rounds):
            for size, num_tokens in TOKENS.items():
                for way in PRODUCERS:
                    _empty(server.url)
                    address = f"ipc://{directory}/zmq" if way == "zmq" else server.url
                    job = Job(way, address, num_tokens, max(BATCH, int(NUM_MESSAGES[size][way] * scale)))
                    measured[size][way].append(measure(job, psutil.Process(server.pid)))
    return measured


def metrics_of(modes: Mapping[Durability, dict[str, Rounds]]) -> dict[str, dict[str, object]]:
    metrics: dict[str, dict[str, object]] = {}
    for durability, sizes in modes.items():
        for size, ways in sizes.items():
            rate = {way: statistics.median([one.rate for one in rounds]) for way, rounds in ways.items()}
            pairs = zip(ways["ours"], ways["baseline"], strict=True)
            metrics[f"msgs_{size}" if durability == "always" else f"msgs_{size}_{durability}"] = {
                "value": rate["ours"],
                "unit": "messages/s",
                "baseline": rate["baseline"],
                "ratio": rate["ours"] / rate["baseline"],
                "ratio_of_each_round": [ours.rate / baseline.rate for ours, baseline in pairs],
                "limit_share": rate["ours"] / rate["redis"],
                "limit": rate["redis"],
                "zmq": rate["zmq"],
                "zmq_share": rate["ours"] / rate["zmq"],
                "cpu_us": {way: _median_cpu_us(rounds) for way, rounds in ways.items()},
                "appendfsync": durability,
            }
    return metrics


def _median_cpu_us(rounds: Sequence[Measured]) -> dict[str, float]:
    return {name: statistics.median([one.cpu_us[name] for one in rounds]) for name in rounds[0].cpu_us}


def show(metrics: dict[str, dict[str, Any]]) -> None:
    table = Table(
        "metric",
        "appendfsync",
        "ours",
        "baseline",
        "ratio",
        "cpu µs ours",
        "baseline",
        "raw redis",
        "share",
        "zmq",
        "share",
        title="transport, messages/s",
    )
    for name, m in metrics.items():
        cells: Iterable[str] = (
            f"{m['value']:,.0f}", f"{m['baseline']:,.0f}", f"{m['ratio']:.1f}x",
            f"{sum(m['cpu_us']['ours'].values()):.0f}", f"{sum(m['cpu_us']['baseline'].values()):.0f}", f"{m['limit']:,.0f}",
            f"{m['limit_share']:.2f}", f"{m['zmq']:,.0f}", f"{m['zmq_share']:.2f}",
        )  # fmt: skip
        table.add_row(name, m["appendfsync"], *cells)
    Console(width=120).print(table)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=Path("runs/bench"))
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--scale", type=float, default=1.0, help="of the number of messages")
    parser.add_argument("--appendfsync", nargs="+", choices=("always", "everysec"), default=("always", "everysec"))
    parser.add_argument("--smoke", action="store_true", help="one short turn of everything, to see that it runs")
    arguments = parser.parse_args()
    rounds, scale = (1, 0.05) if arguments.smoke else (arguments.rounds, arguments.scale)
    metrics = metrics_of({mode: run_mode(mode, rounds, scale) for mode in arguments.appendfsync})
    arguments.out.mkdir(parents=True, exist_ok=True)
    (arguments.out / "transport.json").write_text(json.dumps(metrics, indent=2) + "\n", encoding="utf-8")
    show(metrics)


if __name__ == "__main__":
    main()
