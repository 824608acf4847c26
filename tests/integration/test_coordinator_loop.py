"""The coordinator over a real server: how fast tasks follow a version, what a killed server costs, and its command."""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
import time
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path

import pytest

from async_rl.coordinator.loop import CoordinatorLoop, CoordinatorSettings
from async_rl.coordinator.prompts import PromptSource, TaskTemplate
from async_rl.environments.sort_digits import SortDigits
from async_rl.launch.embedded_redis import EmbeddedRedis
from async_rl.registry.redis_registry import RedisRegistry
from async_rl.testing.roles import FakeEngine, FakeTrainer, running, until
from protocol.redis_streams import RedisStreams
from protocol.streams import RunState, Stream

SETTINGS = CoordinatorSettings(
    worker_id="coordinator-0",
    max_lag=1,
    groups_per_step=4,
    groups_needed=None,
    lease_s=60.0,
    push_deadline_s=30.0,
    reopen_wait_s=0.0,
)
TEMPLATE = TaskTemplate("run", "sort_digits", "sort_digits", run_seed=0, group_size=2, temperature=1.0, max_new_tokens=8)


@pytest.fixture
def server() -> Iterator[EmbeddedRedis]:
    """One per test: one of them kills it."""
    with tempfile.TemporaryDirectory(prefix="arl-") as directory, EmbeddedRedis(Path(directory) / "redis") as redis:
        yield redis


@dataclass
class _Run:
    streams: RedisStreams
    trainer: FakeTrainer
    coordination: CoordinatorLoop


@asynccontextmanager
async def _run(server: EmbeddedRedis, *, data_epochs: int | None = None, length: int = 6) -> AsyncIterator[_Run]:
    connections = [RedisStreams(server.url, "run", timeout_s=5, retry_s=30, lease_s=0) for _ in range(3)]
    for streams in connections:
        await streams.open()
    registries = [RedisRegistry(streams.client, "run") for streams in connections]
    source = PromptSource(SortDigits(length), TEMPLATE, data_epochs=data_epochs)
    loop = CoordinatorLoop(connections[0], registries[0], source, SETTINGS)
    engine = FakeEngine(connections[1], registries[1], "rollout-0")
    trainer = FakeTrainer(connections[2], registries[2])
    try:
        async with running(loop.run(), engine.run()):
            yield _Run(connections[2], trainer, loop)
    finally:
        for streams in connections:
            await streams.close()


async def test_tasks_follow_a_served_version_and_end_with_the_data(server: EmbeddedRedis) -> None:
    """Nine training rows of one digit in steps of four: 4 + 4 + 1, and the run is exhausted."""
    async with _run(server, data_epochs=1, length=1) as run:
        await run.trainer.start()
        for count in (4, 4, 1):
            await run.trainer.step(count)

        async def exhausted() -> bool:
            return (await run.streams.counters()).state is RunState.EXHAUSTED

        await until(exhausted)
        counters = await run.streams.counters()
        await run.streams.end_run(run.trainer.epoch)

        async def left() -> bool:
            return [worker.role for worker in await run.streams.workers()] == ["rollout"]

        await until(left)
    assert (counters.issued, counters.outstanding) == (9, 0)
    assert len(set(run.trainer.task_ids)) == len(run.trainer.task_ids) == 9


async def test_new_tasks_are_out_soon_after_a_version_is_confirmed(server: EmbeddedRedis) -> None:
    """From the trainer's announcement over plan, confirmation and admission to a task in a worker's hands."""
    waits: list[float] = []
    async with _run(server) as run:
        await run.trainer.start()
        await run.trainer.take(8)
        for _ in range(20):
            run.trainer.version += 1
            run.trainer.trained += 4
            started = time.perf_counter()
            await run.trainer.announce()
            await run.streams.read(Stream.TASKS, "worker", count=1, block_s=10)
            waits.append(time.perf_counter() - started)
            await run.trainer.take(3)
        await run.streams.end_run(run.trainer.epoch)
    waits.sort()
    print(f"announcement to task: median {waits[10] * 1000:.1f} ms, slowest {waits[-1] * 1000:.1f} ms")
    assert waits[10] < 0.5


async def test_a_killed_server_costs_no_task(server: EmbeddedRedis) -> None:
    async with _run(server) as run:
        await run.trainer.start()
        await run.trainer.step(4)
        server.kill()
        server.start()
        await run.trainer.step(4)
        server.kill()
        server.start()
        await run.trainer.step(4)
        tasks = await run.trainer.take(8)
        counters = await run.streams.counters()
        await run.streams.end_run(run.trainer.epoch)
    assert len(tasks) == 8
    assert len(set(run.trainer.task_ids)) == len(run.trainer.task_ids) == counters.issued == 20


def _command(*arguments: str) -> subprocess.CompletedProcess[str]:
    env = {**os.environ, "OMP_NUM_THREADS": "1"}
    return subprocess.run(
        [sys.executable, "-m", "workers.coordinator", *arguments],
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
        env=env,
    )


@pytest.mark.parametrize(
    ("setting", "code", "message"),
    [
        ("--data.source=missing.jsonl", 3, "data.source='missing.jsonl' does not exist"),
        ("--environment.name=sort_digit", 2, "environment.name='sort_digit' is not known (did you mean 'sort_digits'?)"),
        ("--environment.args.length=60", 2, "environment.args.length=60: sort_digits needs an integer from 1 to 18"),
    ],
)
def test_what_cannot_be_coordinated_is_one_line_and_an_exit_code(setting: str, code: int, message: str, tmp_path: Path) -> None:
    config = tmp_path / "config.toml"
    config.write_text(f'run_dir = "{tmp_path}/run"\n[model]\npath = "{tmp_path}"\n')
    result = _command(str(config), setting)
    errors = [line for line in result.stderr.splitlines() if line.startswith("error: ")]
    assert (result.returncode, len(errors)) == (code, 1)
    assert message in errors[0]
    assert "Traceback" not in result.stderr
