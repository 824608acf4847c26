"""The ways that `bench_transport` compares: how each makes, sends and receives messages. See there."""

from __future__ import annotations

import asyncio
import pickle
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import redis as redis_py
import zmq

from protocol import event_loop
from protocol.codec import decode_group, encode
from protocol.messages import FinishReason, PromptTask, Reward, SamplingParams, Timings, Trajectory, TrajectoryGroup, Turn
from protocol.redis_streams import RedisStreams
from protocol.streams import Finished, IssuedTask, Publication, Stream
from protocol.versions import VersionSpan

BATCH = 128
PROMPT_TOKENS = 64
NUM_DISTINCT = 32


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
async def prepare_ours(job: Job) -> None:
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
