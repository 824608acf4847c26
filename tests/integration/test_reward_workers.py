"""Reward worker processes over a real server: what they score, what they survive, how they leave."""

from __future__ import annotations

import asyncio
import os
import signal
import sys
import tempfile
from collections.abc import AsyncIterator, Iterator, Sequence
from contextlib import asynccontextmanager
from pathlib import Path

import psutil
import pytest
from msgspec.structs import replace

from async_rl.config import load_config
from async_rl.launch.embedded_redis import EmbeddedRedis
from async_rl.launch.prepare import write_config
from async_rl.run_dir.layout import RunLayout, create_run
from async_rl.testing.builders import make_group, make_task, make_trajectory
from async_rl.testing.roles import until
from async_rl.testing.tiny_models import char_tokenizer, save_tiny_model
from protocol.codec import decode_group, encode
from protocol.messages import Reward, TrajectoryGroup
from protocol.redis_streams import RedisStreams
from protocol.streams import IssuedTask, Publication, Stream

VERIFIER = '''
import os, signal, time

def verify(completion, row):
    """1 for the answer, 0 for another number; what is no number raises."""
    if row.get("does") == "hang once" and not os.path.exists(row["mark"]):
        open(row["mark"], "w").close()
        time.sleep(600)
    return float(int(completion) == row["answer"])
'''


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tiny_model(tmp_path_factory.mktemp("model") / "tiny")


@pytest.fixture
def server() -> Iterator[EmbeddedRedis]:
    with tempfile.TemporaryDirectory(prefix="arl-") as directory, EmbeddedRedis(Path(directory) / "redis") as redis:
        yield redis


class _Run:
    """A run directory, its queue, and reward workers of it."""

    def __init__(self, layout: RunLayout, streams: RedisStreams, env: dict[str, str]) -> None:
        self.layout = layout
        self.streams = streams
        self._env = env
        self.workers: list[asyncio.subprocess.Process] = []

    async def start_worker(self, index: int = 0) -> asyncio.subprocess.Process:
        command = (sys.executable, "-m", "workers.reward", str(self.layout.config_toml), "--index", str(index))
        output = (self.layout.root / f"reward-{index}.out").open("wb")
        with output:
            worker = await asyncio.create_subprocess_exec(*command, env=self._env, stdout=output, stderr=output)
        self.workers.append(worker)
        return worker

    async def enqueue(self, group: TrajectoryGroup) -> None:
        """Leave the group in `unscored`, as a rollout worker does."""
        cursor = (await self.streams.counters()).cursor
        assert await self.streams.issue(cursor, [IssuedTask(group.task_id, encode(group.task))], next_cursor=cursor + 1)
        [task] = await self.streams.read(Stream.TASKS, "rollout-0", count=1, block_s=5)
        publication = Publication(Stream.TASKS, task.entry_id, Stream.UNSCORED, encode(group), task.task_id)
        assert await self.streams.publish([publication]) == [True]

    async def scored(self, count: int) -> list[TrajectoryGroup]:
        epoch = (await self.streams.counters()).epoch or await self.streams.raise_epoch(1)
        groups: list[TrajectoryGroup] = []
        async with asyncio.timeout(90):
            while len(groups) < count:
                deliveries = await self.streams.read_groups(epoch, count=count, block_s=1)
                groups += [decode_group(delivery.payload) for delivery in deliveries]
        return groups


@pytest.fixture
async def run(model: Path, tmp_path: Path, server: EmbeddedRedis) -> AsyncIterator[_Run]:
    async with _opened(model, tmp_path, server) as opened:
        yield opened


@asynccontextmanager
async def _opened(model: Path, tmp_path: Path, server: EmbeddedRedis) -> AsyncIterator[_Run]:
    (tmp_path / "verifiers_of_a_user.py").write_text(VERIFIER)
    settings = {
        "run_dir": tmp_path / "run",
        "model.path": model,
        "environment.name": "prompt_reward",
        "environment.reward": "verifiers_of_a_user:verify",
        "data.source": tmp_path / "rows.jsonl",
        "reward.placement": "workers",
        "redis.lease_s": 2.0,
    }
    config = load_config(None, [f"--{key}={value}" for key, value in settings.items()], {}).config
    layout, identity = create_run(config.run_dir)
    write_config(config, layout)
    env = {**os.environ, "ASYNC_RL_REDIS__URL": server.url, "PYTHONPATH": str(tmp_path), "OMP_NUM_THREADS": "1"}
    streams = RedisStreams(server.url, identity.run_id, timeout_s=5, retry_s=30, lease_s=0)
    await streams.open()
    opened = _Run(layout, streams, env)
    try:
        yield opened
    finally:
        for worker in opened.workers:
            if worker.returncode is None:
                worker.kill()
                await worker.wait()
        await streams.close()


def _unscored(texts: Sequence[str], *, row: int = 0, **columns: str) -> TrajectoryGroup:
    """A group whose members answered `texts` to the prompt "31>"; the right answer is 13."""
    tokenizer = char_tokenizer()
    prompt = tokenizer.encode("31>", add_special_tokens=False)
    members = []
    for text in texts:
        sampled = [*tokenizer.encode(text, add_special_tokens=False), tokenizer.eos_token_id]
        members.append(
            make_trajectory(prompt_length=len(prompt), turns=((len(sampled), 0),), token_ids=[*prompt, *sampled], reward=None)
        )
    task = replace(make_task(row=row, prompt="31>", group_size=len(texts)), columns={"answer": 13, **columns})
    return make_group(members, task=task)


def _rewards(group: TrajectoryGroup) -> list[Reward | None]:
    return [trajectory.reward for trajectory in group.trajectories]


async def _processes_of(worker: asyncio.subprocess.Process) -> list[psutil.Process]:
    return await asyncio.to_thread(lambda: psutil.Process(worker.pid).children(recursive=True))


async def test_a_verifier_that_raises_costs_its_member_and_the_worker_drains_on_sigterm(run: _Run) -> None:
    worker = await run.start_worker()
    await run.enqueue(_unscored(["13", "31", "13", "1>3"]))
    [group] = await run.scored(1)
    rewards = _rewards(group)
    assert [reward.value if reward else "missing" for reward in rewards] == [1.0, 0.0, 1.0, None]
    assert rewards[3] is not None
    assert rewards[3].error_type == "ValueError"
    assert "1>3" in str(rewards[3].invalid_reason)

    scoring = await _processes_of(worker)
    assert scoring
    worker.send_signal(signal.SIGTERM)
    assert await asyncio.wait_for(worker.wait(), 30) == 0
    assert not any(process.is_running() for process in scoring)
    assert await run.streams.workers() == []


async def test_what_a_killed_worker_held_is_scored_by_another(run: _Run, tmp_path: Path) -> None:
    """The first worker hangs in a verifier and is killed with -9: its lease runs out, and a second one takes over."""
    mark = tmp_path / "hanging"
    await run.enqueue(_unscored(["13", "31"], does="hang once", mark=str(mark)))
    first = await run.start_worker(0)

    async def hangs() -> bool:
        await asyncio.sleep(0.02)
        return mark.exists()

    await until(hangs, within_s=60)
    scoring = await _processes_of(first)
    first.kill()
    await first.wait()
    gone, alive = await asyncio.to_thread(psutil.wait_procs, scoring, 20)
    assert (len(gone) > 0, alive) == (True, [])

    second = await run.start_worker(1)
    [group] = await run.scored(1)
    assert [reward.value if reward else None for reward in _rewards(group)] == [1.0, 0.0]

    await run.streams.end_run((await run.streams.counters()).epoch)
    assert await asyncio.wait_for(second.wait(), 30) == 0
