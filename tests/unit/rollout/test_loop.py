"""The rollout worker's loop on streams in memory: what it takes, what it publishes, when it leaves."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from pathlib import Path
from typing import cast

import pytest

from async_rl.environments.prompt_reward import PromptReward
from async_rl.errors import DataError, EngineError, NotServing, WorkStalled
from async_rl.launch.demo_model import demo_tokenizer
from async_rl.registry.memory_registry import MemoryRegistry
from async_rl.rollout.chat import Tokenizer
from async_rl.rollout.engine import Completion
from async_rl.rollout.group import GroupRollout, RolloutLimits
from async_rl.rollout.loop import RolloutLoop, RolloutSettings
from async_rl.run_dir.files import read_json_lines
from async_rl.testing.builders import make_task
from async_rl.testing.engines import Script, ScriptedEngine
from async_rl.testing.roles import until
from protocol.codec import decode_group, encode
from protocol.memory_streams import MemoryStreams
from protocol.messages import FinishReason, SamplingParams
from protocol.streams import IssuedTask, Started, Stream

ONE, EOS = 4, 1


class NoPushes:
    """A receiver without a trainer."""

    async def run(self) -> None:
        await asyncio.Event().wait()


def says_one(prompt: Sequence[int], sampling: SamplingParams) -> tuple[Sequence[int], FinishReason]:
    return [ONE, EOS], FinishReason.STOP


class Scene:
    def __init__(
        self,
        script: Script = says_one,
        *,
        version: int | None = 0,
        unscored: bool = False,
        metrics: Path | None = None,
        lease_s: float = 60.0,
        progress_s: float = 60.0,
    ) -> None:
        self.streams = MemoryStreams(max_message_bytes=4000)
        self.engine = ScriptedEngine(script, version=version)
        environment = PromptReward(lambda completion, row: float(completion == "1"))
        rollout = GroupRollout(
            self.engine,
            cast(Tokenizer, demo_tokenizer()),
            environment,
            RolloutLimits(1, 64, 8),
            worker_id="w",
            stop_token_ids=[EOS],
            score=None if unscored else environment.score,
        )
        settings = RolloutSettings(
            worker_id="w",
            max_groups_in_flight=2,
            lease_s=lease_s,
            drain_s=60.0,
            max_deliveries=3,
            reopen_wait_s=0.0,
            unscored=unscored,
            metrics_path=metrics,
            progress_s=progress_s,
        )
        registry = MemoryRegistry(lambda: 1)
        self.loop = RolloutLoop(self.streams, registry, self.engine, rollout, NoPushes(), settings)

    async def issue(self, *payloads: bytes) -> None:
        await self.streams.open()
        cursor = (await self.streams.counters()).cursor
        tasks = [IssuedTask(f"test:0:{cursor + number}:0", payload) for number, payload in enumerate(payloads)]
        assert await self.streams.issue(cursor, tasks, next_cursor=cursor + len(tasks))

    async def published(self, stream: Stream, count: int) -> bool:
        return (await self.streams.depths())[stream].length == count

    async def run_until(self, stream: Stream, count: int) -> None:
        running = asyncio.create_task(self.loop.run())
        await until(lambda: self.published(stream, count), within_s=10)
        self.loop.stop()
        await running


def task_payload(row: int, **fields: int) -> bytes:
    return encode(make_task(row=row, prompt="1>", group_size=2, **fields))


async def test_every_leased_task_becomes_one_scored_group_and_the_worker_leaves() -> None:
    scene = Scene()
    await scene.issue(*(task_payload(row) for row in range(5)))
    await scene.run_until(Stream.GROUPS, 5)
    epoch = await scene.streams.raise_epoch(1)
    groups = [decode_group(d.payload) for d in await scene.streams.read_groups(epoch, count=10, block_s=0)]
    assert sorted(group.task_id for group in groups) == [f"test:0:{row}:0" for row in range(5)]
    assert {t.reward.value for group in groups for t in group.trajectories if t.reward} == {1.0}
    assert (await scene.streams.depths())[Stream.TASKS].length == 0
    assert list(await scene.streams.workers()) == []


async def test_groups_without_rewards_go_to_the_reward_workers() -> None:
    scene = Scene(unscored=True)
    await scene.issue(task_payload(0))
    await scene.run_until(Stream.UNSCORED, 1)
    assert await scene.published(Stream.GROUPS, 0)


async def test_no_task_is_taken_before_a_version_is_served() -> None:
    scene = Scene(version=None)
    await scene.issue(task_payload(0))
    running = asyncio.create_task(scene.loop.run())
    await until(scene.streams.workers)
    for _ in range(20):
        await asyncio.sleep(0)
    assert (await scene.streams.depths())[Stream.TASKS].pending == 0
    await scene.engine.serve(3)
    await until(lambda: scene.published(Stream.GROUPS, 1), within_s=10)
    scene.loop.stop()
    await running


async def test_an_unreadable_task_is_dead_lettered_and_the_others_go_on() -> None:
    scene = Scene()
    await scene.issue(task_payload(0)[:-1], task_payload(1))
    await scene.run_until(Stream.GROUPS, 1)
    (dead,) = await scene.streams.dead_entries(count=10)
    assert "unreadable task" in dead.reason
    assert dead.task_id == "test:0:0:0"


async def test_a_group_above_the_message_limit_is_dead_lettered_with_its_size_and_the_others_go_on() -> None:
    scene = Scene(lambda prompt, sampling: ([ONE] * 7 + [EOS], FinishReason.STOP))
    big = encode(make_task(row=0, prompt="1>", group_size=40))
    await scene.issue(big, task_payload(1))
    await scene.run_until(Stream.GROUPS, 1)
    (dead,) = await scene.streams.dead_entries(count=10)
    assert "4000" in dead.reason


async def test_a_prompt_without_room_ends_the_worker_and_its_task_stays_queued() -> None:
    scene = Scene()
    await scene.issue(encode(make_task(row=0, prompt="1" * 80 + ">", group_size=2)))
    with pytest.raises(ExceptionGroup) as raised:
        await scene.loop.run()
    assert raised.group_contains(DataError, match="81 tokens", depth=2)
    assert (await scene.streams.depths())[Stream.TASKS].length == 1


async def test_an_engine_that_dies_ends_the_worker_and_its_tasks_can_be_claimed() -> None:
    def dies(prompt: Sequence[int], sampling: SamplingParams) -> tuple[Sequence[int], FinishReason]:
        raise EngineError("the decoding thread died")

    scene = Scene(dies)
    await scene.issue(task_payload(0))
    with pytest.raises(ExceptionGroup) as raised:
        await scene.loop.run()
    assert raised.group_contains(EngineError, match="thread died", depth=2)
    await scene.streams.leave("w")
    await scene.streams.heartbeat("other", "rollout", ttl_s=9)
    (claimed,) = await scene.streams.claim(Stream.TASKS, "other", count=5)
    assert claimed.delivery_count == 2


async def test_the_worker_goes_home_when_the_run_ends() -> None:
    scene = Scene()
    await scene.streams.open()
    running = asyncio.create_task(scene.loop.run())
    await until(scene.streams.workers)
    await scene.streams.end_run(await scene.streams.raise_epoch(1))
    async with asyncio.timeout(10):
        await running


async def test_busy_and_idle_time_are_written_for_people_to_read(tmp_path: Path) -> None:
    scene = Scene(metrics=tmp_path / "w.jsonl")
    await scene.issue(task_payload(0), task_payload(1))
    await scene.run_until(Stream.GROUPS, 2)
    (*_, last) = read_json_lines(tmp_path / "w.jsonl")
    assert (last["groups"], last["tokens"], last["duplicates"]) == (2, 8, 0)
    assert last["seconds"] == pytest.approx(last["busy_s"] + last["idle_s"])


async def test_a_task_whose_delivery_was_lost_on_its_way_is_found_and_done() -> None:
    scene = Scene(lease_s=0.2)
    await scene.issue(task_payload(0), task_payload(1))
    lost = await scene.streams.read(Stream.TASKS, "w", count=1, block_s=0)  # the reply never reaches the loop
    await scene.run_until(Stream.GROUPS, 2)
    groups = await scene.streams.read_groups(await scene.streams.raise_epoch(1), count=10, block_s=0)
    assert sorted(str(group.task_id) for group in groups) == ["test:0:0:0", "test:0:1:0"]
    assert lost[0].task_id == "test:0:0:0"


async def test_a_task_in_flight_is_not_started_again_by_the_look_for_lost_deliveries() -> None:
    scene = Scene(lease_s=0.0)  # looks in every round
    await scene.issue(*(task_payload(row) for row in range(6)))
    await scene.run_until(Stream.GROUPS, 6)
    assert scene.loop._usage.duplicates == 0
    assert scene.loop._usage.groups == 6


async def test_a_task_is_noted_with_the_version_it_begins_under_before_anything_is_sampled() -> None:
    scene = Scene(version=3)
    seen: list[object] = []

    class Watched(ScriptedEngine):
        async def generate(self, prompt_ids: Sequence[int], sampling: Sequence[SamplingParams]) -> Sequence[Completion]:
            seen.append(await scene.streams.in_flight())
            if len(seen) == 1:
                self._version = None
                raise NotServing("withdrawn")
            return await super().generate(prompt_ids, sampling)

    engine = Watched(says_one, version=3)
    scene.loop._engine = scene.loop._rollout._engine = engine
    await scene.issue(task_payload(0))
    running = asyncio.create_task(scene.loop.run())
    await until(lambda: asyncio.sleep(0, bool(seen)))
    await asyncio.sleep(0)
    assert await scene.streams.in_flight() == {}  # it holds no step of the trainer until it is begun again
    engine._version = 5
    await until(lambda: scene.published(Stream.GROUPS, 1))
    scene.loop.stop()
    await running
    assert seen == [{"test:0:0:0": Started("w", 3)}, {"test:0:0:0": Started("w", 5)}]


async def test_a_worker_whose_engine_stands_still_loses_its_lease_though_its_loop_runs() -> None:
    scene = Scene(lease_s=0.2, progress_s=0.1)
    await scene.issue()
    running = asyncio.create_task(scene.loop.run())
    await until(scene.streams.workers)
    scene.engine.work.begin("decoding 2 sequences")  # and never a mark

    async def gone() -> bool:
        return not await scene.streams.workers()

    await until(gone, within_s=10)
    with pytest.raises(ExceptionGroup) as raised:
        await asyncio.wait_for(running, 10)
    assert raised.group_contains(WorkStalled, match=r"no progress for .* in: decoding 2 sequences")
