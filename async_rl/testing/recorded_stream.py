"""A recorded stream of groups, and who feeds it to a trainer: coordinator and rollout workers in one, one batch at a time.

A batch is published in order, once the one before is in the intake log and acknowledged, and no more than one step ahead of
training: what the trainer takes in, and in which order, then depends on nothing that a crash can change.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable

import numpy as np

from async_rl.testing.builders import make_group, make_task, make_trajectory
from protocol.codec import encode
from protocol.messages import TrajectoryGroup
from protocol.streams import IssuedTask, Publication, RunState, Stream, Streams

GROUPS_PER_STEP = 4
GROUP_SIZE = 4
PROMPT_TOKENS = 7
VOCABULARY = 22
WORKER = "feeder"
POLL_S = 0.002


class RecordedStream:
    """Groups as bytes, the same for every run that is fed from it: made once, from the number of their batch.

    lag: a batch is sampled by the version that is this much older than the one which is to train it.
    """

    def __init__(self, *, lag: int = 2) -> None:
        self._lag = lag
        self._batches: dict[int, list[tuple[IssuedTask, bytes]]] = {}

    def batch(self, number: int) -> list[tuple[IssuedTask, bytes]]:
        """(task, encoded group) of the GROUPS_PER_STEP groups of batch `number`."""
        if number not in self._batches:
            rows = range(number * GROUPS_PER_STEP, (number + 1) * GROUPS_PER_STEP)
            groups = [_group(row, max(0, number - self._lag)) for row in rows]
            self._batches[number] = [(IssuedTask(group.task_id, encode(group.task)), encode(group)) for group in groups]
        return self._batches[number]


def _group(row: int, version: int) -> TrajectoryGroup:
    """Random tokens, rewards and logprobs from the row's number, sampled by `version`."""
    rng = np.random.default_rng(row)
    trajectories = []
    for _ in range(GROUP_SIZE):
        sampled = int(rng.integers(3, 9))
        trajectories.append(
            make_trajectory(
                prompt_length=PROMPT_TOKENS,
                turns=((sampled, 0),),
                versions=version,
                token_ids=rng.integers(3, VOCABULARY, size=PROMPT_TOKENS + sampled).tolist(),
                logprobs=(-3.0 + rng.normal(scale=0.2, size=sampled)).tolist(),
                reward=float(rng.random() < 0.5),
            )
        )
    return make_group(trajectories, task=make_task(row=row, group_size=GROUP_SIZE, run_id="recorded"))


class Feeder:
    """Feeds batches from 0 on while their number is below `limit`; when `ends`, the prompts are exhausted there.

    version: the newest policy version that was trained. ahead: how many batches may be out beyond the one that it trains.
    published: batches published so far.
    """

    def __init__(self, streams: Streams, stream: RecordedStream, version: Callable[[], int], *, ahead: int = 1) -> None:
        self._streams = streams
        self._stream = stream
        self._version = version
        self._ahead = ahead
        self.limit = 0
        self.ends = False
        self.published = 0

    async def run(self) -> None:
        """Until cancelled."""
        await self._streams.open()
        while True:
            counters = await self._streams.counters()
            number = counters.cursor // GROUPS_PER_STEP
            if number < self.limit and number <= self._version() + self._ahead and counters.outstanding == 0:
                await self._feed(number)
                self.published = number + 1
            elif number == self.limit and self.ends and counters.state is RunState.RUNNING:
                await self._streams.mark_exhausted(counters.cursor)
            await asyncio.sleep(POLL_S)

    async def _feed(self, number: int) -> None:
        batch = self._stream.batch(number)
        cursor = number * GROUPS_PER_STEP
        assert await self._streams.issue(cursor, [task for task, _ in batch], next_cursor=cursor + len(batch))
        leased = await self._streams.read(Stream.TASKS, WORKER, count=len(batch), block_s=1.0)
        assert [delivery.task_id for delivery in leased] == [task.task_id for task, _ in batch]
        for delivery, (task, group) in zip(leased, batch, strict=True):
            move = Publication(Stream.TASKS, delivery.entry_id, Stream.GROUPS, group, task.task_id)
            assert await self._streams.publish([move]) == [True]
