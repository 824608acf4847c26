"""`async-rl dead` on a run: list, show, requeue before and after the end is in the log, drop."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path

import pytest

from async_rl.config.dump import dump_toml
from async_rl.config.run import ModelConfig, RunConfig
from async_rl.coordinator.prompts import PromptSource
from async_rl.environments.load import load_environment
from async_rl.launch.embedded_redis import EmbeddedRedis
from async_rl.run_dir.intake_log import IntakeLog
from async_rl.run_dir.layout import RunLayout, create_run
from async_rl.run_dir.records import DeadRecord
from async_rl.testing.tiny_models import save_tiny_model
from protocol.codec import decode_task, encode
from protocol.redis_streams import RedisStreams
from protocol.streams import IssuedTask, Publication, Stream
from workers.cli import main


@dataclass(frozen=True, slots=True)
class DeadRun:
    """A run that nobody works on, with two dead tasks: one poison, one whose group was cut short."""

    layout: RunLayout
    run_id: str
    poison: str
    torn: str

    @asynccontextmanager
    async def streams(self) -> AsyncIterator[RedisStreams]:
        with EmbeddedRedis(self.layout.redis_dir) as server:
            streams = RedisStreams(server.url, self.run_id, lease_s=0.0)
            await streams.open()
            yield streams
            await streams.close()


@pytest.fixture(autouse=True)
def _wide_terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "250")
    monkeypatch.delenv("ASYNC_RL_REDIS__URL", raising=False)


@pytest.fixture
async def run(tmp_path: Path) -> DeadRun:
    layout, identity = create_run(tmp_path / "run")
    config = RunConfig(run_dir=layout.root, model=ModelConfig(path=save_tiny_model(tmp_path / "model")))
    layout.config_toml.write_text(dump_toml(config))
    source = PromptSource.from_config(config, identity.run_id, load_environment(config.environment))
    poison, torn = source.task_at(0), source.task_at(1)
    assert poison is not None
    assert torn is not None
    made = DeadRun(layout, identity.run_id, poison.task_id, torn.task_id)
    async with made.streams() as streams:
        await streams.issue(0, [IssuedTask(task.task_id, encode(task)) for task in (poison, torn)], next_cursor=2)
        first, second = await streams.read(Stream.TASKS, "w", count=2, block_s=0)
        await streams.bury(first, task_id=poison.task_id, reason="delivered 4 times without success")
        await streams.publish([Publication(Stream.TASKS, second.entry_id, Stream.UNSCORED, first.payload[:-20], torn.task_id)])
        [unscored] = await streams.read(Stream.UNSCORED, "r", count=1, block_s=0)
        await streams.bury(unscored, task_id=torn.task_id, reason="unreadable group: not a whole msgpack message")
    return made


def call(capsys: pytest.CaptureFixture[str], *arguments: str) -> tuple[int, str]:
    with pytest.raises(SystemExit) as ended:
        main(["dead", *arguments])
    printed = capsys.readouterr()
    assert isinstance(ended.value.code, int)
    return ended.value.code, printed.out + printed.err


async def entry_ids(run: DeadRun) -> list[str]:
    async with run.streams() as streams:
        return [dead.entry_id for dead in await streams.dead_entries(count=10)]


async def _call(capsys: pytest.CaptureFixture[str], run: DeadRun, *arguments: str) -> tuple[int, str]:
    """In a thread: the command has an event loop of its own."""
    return await asyncio.to_thread(call, capsys, str(run.layout.root), *arguments)


async def test_the_list_says_what_died_where_why_and_whether_the_log_knows(
    run: DeadRun, capsys: pytest.CaptureFixture[str]
) -> None:
    code, text = await _call(capsys, run)
    assert code == 0
    first, second = (line for line in text.splitlines() if "sort_digits:" in line)
    assert run.poison in first
    assert ("tasks" in first, "unscored" in second, "not yet" in first) == (True, True, True)
    assert "delivered 4 times without success" in first


async def test_show_decodes_what_it_can(run: DeadRun, capsys: pytest.CaptureFixture[str]) -> None:
    poison, torn = await entry_ids(run)
    code, text = await _call(capsys, run, "show", poison)
    assert code == 0
    assert "prompt" in text
    assert "group" not in text.split("sampling")[0].split("prompt")[0]
    code, text = await _call(capsys, run, "show", torn)
    assert code == 0
    assert "not readable" in text
    assert "at byte" in text
    assert "body.task_id" in text


async def test_before_its_end_is_in_the_log_an_entry_goes_back_under_its_own_id(
    run: DeadRun, capsys: pytest.CaptureFixture[str]
) -> None:
    poison, torn = await entry_ids(run)
    said = f"{poison}: task {run.poison} is in the queue\n{torn}: task {run.torn} is in the queue\n"
    assert await _call(capsys, run, "requeue", "all") == (0, said)
    async with run.streams() as streams:
        again = await streams.read(Stream.TASKS, "w2", count=9, block_s=0)
        assert [delivery.task_id for delivery in again] == [run.poison, run.torn]
        assert [decode_task(delivery.payload).task_id for delivery in again] == [run.poison, run.torn]  # the torn one made anew
        assert (await streams.counters()).issued == 2
        assert list(await streams.dead_entries(count=9)) == []


async def test_after_its_end_is_in_the_log_the_row_is_issued_once_more_as_the_next_free_repeat(
    run: DeadRun, capsys: pytest.CaptureFixture[str]
) -> None:
    poison, _ = await entry_ids(run)
    row = run.poison.rpartition(":")[0]
    log = IntakeLog.open(run.layout.intake_dir, epoch=1)
    log.append([DeadRecord(run.poison, "poison"), DeadRecord(f"{row}:1", "an earlier try")])
    log.sync()
    log.close()
    async with run.streams() as streams:
        await streams.finish_dead(await streams.raise_epoch(1), [run.poison])
    code, text = await _call(capsys, run, "requeue", poison)
    assert (code, text) == (0, f"{poison}: task {row}:2 is in the queue\n")
    async with run.streams() as streams:
        [again] = await streams.read(Stream.TASKS, "w2", count=9, block_s=0)
        task = decode_task(again.payload)
        assert (again.task_id, task.task_id, task.repeat) == (f"{row}:2", f"{row}:2", 2)
        counters = await streams.counters()
        assert (counters.issued, counters.outstanding) == (3, 2)


async def test_drop_deletes_the_entry_and_keeps_its_tasks_end(run: DeadRun, capsys: pytest.CaptureFixture[str]) -> None:
    poison, torn = await entry_ids(run)
    assert await _call(capsys, run, "drop", poison) == (0, f"{poison}: dropped\n")
    assert await entry_ids(run) == [torn]
    async with run.streams() as streams:
        assert set(await streams.newly_dead(await streams.raise_epoch(1))) == {run.poison, run.torn}


async def test_bad_input_is_one_clear_line(run: DeadRun, capsys: pytest.CaptureFixture[str]) -> None:
    for arguments, code, message in [
        (("requeue",), 2, "needs an ENTRY"),
        (("show", "99-1"), 3, "no entry of the dead stream"),
        (("drop", "nonsense"), 3, "no entry of the dead stream"),
        (("bury", "1-1"), 2, "bury"),
    ]:
        got, text = await _call(capsys, run, *arguments)
        assert got == code
        assert message in text
        assert len(text.splitlines()) == 1
