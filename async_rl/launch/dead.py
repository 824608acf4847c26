"""`async-rl dead`: entries that could not be done, and another chance for them.

What the intake log says has ended stays ended. So an entry goes back under its own id only while the trainer has not
recorded its end; afterwards its row is issued once more, as the next repeat: another task, with its own id and seed.
"""

from __future__ import annotations

import re
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path

from async_rl.config import RunConfig
from async_rl.coordinator.data_record import lengths_of, read_records
from async_rl.coordinator.sources import TaskSource
from async_rl.errors import CodecError, DataError, RunDirError
from async_rl.launch.inputs import open_prompts
from async_rl.launch.look import config_of_run
from async_rl.launch.servers import server_of_run
from async_rl.run_dir.intake_log import read_log
from async_rl.run_dir.layout import RunLayout, open_run
from protocol.codec import decode, encode
from protocol.redis_streams import RedisStreams
from protocol.streams import DeadEntry, IssuedTask, Streams

LISTED = 1000
_ENTRY_ID = re.compile(r"\d+-\d+")


@dataclass(frozen=True, slots=True)
class DeadLetters:
    """The dead entries of one run."""

    run_id: str
    config: RunConfig
    streams: Streams

    async def entries(self, count: int = LISTED) -> Sequence[DeadEntry]:
        """Oldest first."""
        return await self.streams.dead_entries(count=count)

    async def entry(self, entry_id: str) -> DeadEntry:
        """Raises: DataError if there is none of that id."""
        found = await self.streams.dead_entry(entry_id) if _ENTRY_ID.fullmatch(entry_id) else None
        if found is None:
            raise DataError(f"{entry_id!r} is no entry of the dead stream of run {self.run_id}; list them without an action")
        return found

    async def requeue(self, entry_id: str) -> str:
        """Give the entry another chance; the id of the task that is in the queue now. Raises: DataError, saying why not."""
        dead = await self.entry(entry_id)
        if dead.task_id is None:
            raise DataError(f"{entry_id} belongs to no task of this run: look at it (show), then drop it")
        lengths = lengths_of(read_records(RunLayout(self.config.run_dir).data_json))
        source = open_prompts(self.config, self.run_id).with_lengths(lengths)
        anew = None if _is_readable(dead) else encode_task(source, dead.task_id)
        repeat = await self._next_repeat(source, dead.task_id)
        queued = await self.streams.requeue(entry_id, repeat=repeat, anew=anew)
        if queued is None:
            raise DataError(f"{entry_id} was not requeued: the run has ended, or somebody else has just taken care of it")
        return queued

    async def drop(self, entry_id: str) -> None:
        """Delete the entry; its task keeps its end. Raises: DataError if there is none of that id."""
        dead = await self.entry(entry_id)
        await self.streams.drop_dead(dead.entry_id)

    async def _next_repeat(self, source: TaskSource, task_id: str) -> IssuedTask:
        """The task of the same row under the first id that neither the log nor the queue has seen."""
        layout = RunLayout(self.config.run_dir)
        index = read_log(layout.intake_dir)
        outstanding = await self.streams.outstanding()
        row, _, repeat = task_id.rpartition(":")
        number = int(repeat) if repeat.isdigit() else 0
        while True:
            number += 1
            name = f"{row}:{number}"
            if not index.knows(name) and name not in outstanding:
                return IssuedTask(name, encode_task(source, name))


def encode_task(source: TaskSource, task_id: str) -> bytes:
    """The task made again from its row. Raises: DataError if the id is not of this run's data."""
    task = source.task_of(task_id)
    if task is None:
        raise DataError(f"task {task_id!r} is not of this run's data (data.source may have changed): drop its entry")
    return encode(task)


@asynccontextmanager
async def dead_letters(run_dir: Path, env: Mapping[str, str]) -> AsyncIterator[DeadLetters]:
    """The dead entries of the run in `run_dir`, whether it runs or not.

    Raises: RunDirError if there is no run; QueueUnavailable if its server does not answer.
    """
    _, identity = open_run(run_dir)
    config = config_of_run(run_dir, dict(env))
    if config.redis.url == "embedded" and not RunLayout(run_dir).redis_dir.is_dir():
        raise RunDirError(f"{run_dir} has no queue: the run was never started")
    with server_of_run(config.redis, run_dir) as url:
        redis = config.redis
        streams = RedisStreams(url, identity.run_id, timeout_s=redis.timeout_s, retry_s=redis.timeout_s, tls=redis.tls)
        try:
            yield DeadLetters(identity.run_id, config, streams)
        finally:
            await streams.close()


def _is_readable(dead: DeadEntry) -> bool:
    try:
        decode(dead.payload)
    except CodecError:
        return False
    return True
