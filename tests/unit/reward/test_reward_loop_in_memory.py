"""The reward worker's loop over the in-memory queue."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import pytest

from async_rl.environments.base import Episode
from async_rl.reward.loop import RewardLoop, RewardSettings
from async_rl.run_dir.files import read_json_lines
from async_rl.testing.builders import make_group, make_task, make_trajectory
from async_rl.testing.roles import running, until
from protocol.codec import decode_group, encode
from protocol.errors import MessageTooLarge, QueueFull
from protocol.memory_streams import MemoryStreams
from protocol.messages import FinishReason, Reward, TrajectoryGroup
from protocol.streams import IssuedTask, Publication, Stream

SETTINGS = RewardSettings(
    worker_id="reward-0", max_concurrent=4, lease_s=3600.0, drain_s=60.0, max_deliveries=3, reopen_wait_s=0.0
)


def _letters(ids: Sequence[int]) -> str:
    return "".join(chr(ord("a") + token) for token in ids)


def _unscored(row: int = 0, size: int = 2) -> TrajectoryGroup:
    """Members sample four tokens; member i's are all i."""
    trajectories = [make_trajectory(token_ids=[9, 9, 9, *[index] * 4], reward=None) for index in range(size)]
    return make_group(trajectories, task=make_task(row=row, group_size=size))


async def _enqueue(streams: MemoryStreams, *groups: TrajectoryGroup, worker: str = "rollout-0") -> None:
    """What rollout workers leave: the groups, in `unscored`."""
    await streams.open()
    counters = await streams.counters()
    issued = [IssuedTask(group.task_id, encode(group.task)) for group in groups]
    assert await streams.issue(counters.cursor, issued, next_cursor=counters.cursor + len(issued))
    tasks = await streams.read(Stream.TASKS, worker, count=len(issued), block_s=0)
    moves = zip(tasks, groups, strict=True)
    await streams.publish([Publication(Stream.TASKS, t.entry_id, Stream.UNSCORED, encode(g), t.task_id) for t, g in moves])


async def _scored(streams: MemoryStreams, count: int) -> list[TrajectoryGroup]:
    epoch = (await streams.counters()).epoch or await streams.raise_epoch(1)
    taken: list[TrajectoryGroup] = []

    async def all_there() -> bool:
        deliveries = await streams.read_groups(epoch, count=count, block_s=0)
        taken.extend(decode_group(delivery.payload) for delivery in deliveries)
        return len(taken) >= count

    await until(all_there)
    return taken


async def _first_letter(episode: Episode) -> Reward:
    if episode.completion == "cccc":
        return Reward.invalid("ZeroDivisionError: division by zero", "ZeroDivisionError")
    return Reward(float(ord(episode.completion[0]) - ord("a")))


async def test_every_member_gets_the_reward_of_its_own_text() -> None:
    streams = MemoryStreams()
    group = _unscored(size=4)
    await _enqueue(streams, group)
    async with running(RewardLoop(streams, _first_letter, _letters, SETTINGS).run()):
        [scored] = await _scored(streams, 1)
        await streams.end_run(1)
    rewards = [trajectory.reward for trajectory in scored.trajectories]
    assert [reward.value if reward else "missing" for reward in rewards] == [0.0, 1.0, None, 3.0]
    assert [reward.error_type for reward in rewards if reward] == [None, None, "ZeroDivisionError", None]
    for before, after in zip(group.trajectories, scored.trajectories, strict=True):
        assert after.token_ids.tolist() == before.token_ids.tolist()
        assert after.behavior_logprobs.tolist() == before.behavior_logprobs.tolist()
        assert after.versions == before.versions


async def test_an_episode_shows_all_turns_and_observations() -> None:
    seen: list[Episode] = []

    async def score(episode: Episode) -> Reward:
        seen.append(episode)
        return Reward(1.0)

    streams = MemoryStreams()
    trajectory = make_trajectory(prompt_length=1, turns=((2, 3), (1, 0)), token_ids=[25, 0, 1, 2, 3, 4, 5], reward=None)
    await _enqueue(streams, make_group([trajectory], task=make_task(group_size=1)))
    async with running(RewardLoop(streams, score, _letters, SETTINGS).run()):
        await _scored(streams, 1)
        await streams.end_run(1)
    [episode] = seen
    assert ([turn.text for turn in episode.turns], episode.observations) == (["ab", "f"], ("cde",))


async def test_rewards_that_are_there_are_kept_and_aborted_members_are_not_scored() -> None:
    asked: list[int] = []

    async def score(episode: Episode) -> Reward:
        asked.append(episode.index)
        return Reward(1.0)

    early = Reward.invalid("the prompt leaves no room in the context", "long_prompt")
    members = [
        make_trajectory(reward=early),
        make_trajectory(reward=None, finish_reason=FinishReason.ABORTED),
        make_trajectory(reward=None),
    ]
    streams = MemoryStreams()
    await _enqueue(streams, make_group(members, task=make_task(group_size=3)))
    async with running(RewardLoop(streams, score, _letters, SETTINGS).run()):
        [scored] = await _scored(streams, 1)
        await streams.end_run(1)
    assert asked == [2]
    assert [t.reward for t in scored.trajectories] == [early, Reward.invalid("sampling was aborted", "aborted"), Reward(1.0)]


async def test_no_more_groups_are_held_than_allowed_and_a_slow_one_does_not_hold_the_others() -> None:
    release = asyncio.Event()
    at_once = most = 0

    async def score(episode: Episode) -> Reward:
        nonlocal at_once, most
        at_once += 1
        most = max(most, at_once)
        if episode.task.row == 0:
            await release.wait()
        await asyncio.sleep(0)
        at_once -= 1
        return Reward(1.0)

    streams = MemoryStreams()
    await _enqueue(streams, *(_unscored(row, size=1) for row in range(12)))
    async with running(RewardLoop(streams, score, _letters, replace(SETTINGS, max_concurrent=3)).run()):
        others = await _scored(streams, 11)
        assert 0 not in {group.task.row for group in others}
        release.set()
        [slow] = await _scored(streams, 1)
        await streams.end_run(1)
    assert (slow.task.row, most) == (0, 3)


async def test_stop_scores_what_is_held_and_takes_nothing_new() -> None:
    release, begun = asyncio.Event(), asyncio.Event()

    async def score(episode: Episode) -> Reward:
        begun.set()
        await release.wait()
        return Reward(1.0)

    streams = MemoryStreams()
    await _enqueue(streams, _unscored(0))
    loop = RewardLoop(streams, score, _letters, replace(SETTINGS, max_concurrent=1))
    draining = asyncio.ensure_future(loop.run())
    await begun.wait()
    await _enqueue(streams, _unscored(1))
    loop.stop()
    release.set()
    await asyncio.wait_for(draining, 10)
    [group] = await _scored(streams, 1)
    assert group.task.row == 0
    assert (await streams.depths())[Stream.UNSCORED].length == 1
    assert await streams.workers() == []


async def test_work_of_a_worker_that_is_gone_is_taken_over() -> None:
    streams = MemoryStreams()
    await _enqueue(streams, _unscored())
    assert len(await streams.read(Stream.UNSCORED, "reward-that-died", count=1, block_s=0)) == 1
    async with running(RewardLoop(streams, _first_letter, _letters, SETTINGS).run()):
        [scored] = await _scored(streams, 1)
        await streams.end_run(1)
    assert scored.is_scored


async def test_a_delivery_that_never_arrived_is_found_among_the_own_pending() -> None:
    """The server handed it to this worker, but the reply was lost."""
    streams = MemoryStreams()
    await _enqueue(streams, _unscored())
    assert len(await streams.read(Stream.UNSCORED, SETTINGS.worker_id, count=1, block_s=0)) == 1
    async with running(RewardLoop(streams, _first_letter, _letters, SETTINGS).run()):
        assert (await _scored(streams, 1))[0].is_scored
        await streams.end_run(1)


async def test_what_keeps_killing_its_workers_goes_to_the_dead() -> None:
    streams = MemoryStreams()
    await _enqueue(streams, _unscored())
    counts = [await streams.read(Stream.UNSCORED, "dead-1", count=1, block_s=0)]
    counts += [await streams.claim(Stream.UNSCORED, worker_id, count=1) for worker_id in ("dead-2", "dead-3")]
    assert [delivery.delivery_count for (delivery,) in counts] == [1, 2, 3]
    asked: list[Episode] = []

    async def score(episode: Episode) -> Reward:
        asked.append(episode)
        return Reward(1.0)

    async with running(RewardLoop(streams, score, _letters, SETTINGS).run()):

        async def buried() -> bool:
            return len(await streams.dead_entries(count=10)) == 1

        await until(buried)
        await streams.end_run(await streams.raise_epoch(1))
    [dead] = await streams.dead_entries(count=10)
    assert (asked, dead.task_id, dead.reason) == ([], _unscored().task_id, "delivered 4 times without success")


async def test_what_cannot_be_read_goes_to_the_dead() -> None:
    streams = MemoryStreams()
    await streams.open()
    streams.add_foreign(Stream.UNSCORED, b"\xc1 no message")
    async with running(RewardLoop(streams, _first_letter, _letters, SETTINGS).run()):

        async def buried() -> bool:
            return len(await streams.dead_entries(count=10)) == 1

        await until(buried)
        await streams.end_run(await streams.raise_epoch(1))
    [dead] = await streams.dead_entries(count=10)
    assert dead.reason.startswith("unreadable group: ")


class _Refusing(MemoryStreams):
    """Refuses publications: as a full server the first times, or always as too large."""

    def __init__(self, *errors: Exception) -> None:
        super().__init__()
        self.errors = list(errors)

    async def publish(self, publications: Sequence[Publication]) -> Sequence[bool]:
        if publications[0].source is Stream.UNSCORED and self.errors:
            raise self.errors.pop(0)
        return await super().publish(publications)


async def test_a_full_server_is_waited_for_and_the_score_is_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("protocol.patience.FULL_RETRY_S", 0.001)
    asked: list[int] = []

    async def score(episode: Episode) -> Reward:
        asked.append(episode.index)
        return Reward(1.0)

    streams = _Refusing(QueueFull("no room"), QueueFull("no room"))
    await _enqueue(streams, _unscored(size=2))
    async with running(RewardLoop(streams, score, _letters, SETTINGS).run()):
        await _scored(streams, 1)
        await streams.end_run(1)
    assert asked == [0, 1]


async def test_a_group_that_grew_too_large_goes_to_the_dead() -> None:
    streams = _Refusing(MessageTooLarge("too many bytes"))
    await _enqueue(streams, _unscored())
    async with running(RewardLoop(streams, _first_letter, _letters, SETTINGS).run()):

        async def buried() -> bool:
            return [dead.reason for dead in await streams.dead_entries(count=10)] == ["too many bytes"]

        await until(buried)
        await streams.end_run(await streams.raise_epoch(1))


async def test_figures_count_invalid_rewards_by_their_kind(tmp_path: Path) -> None:
    streams = MemoryStreams()
    path = tmp_path / "logs" / "reward-0.metrics.jsonl"
    path.parent.mkdir()
    await _enqueue(streams, _unscored(0, size=4), _unscored(1, size=3))
    loop = RewardLoop(streams, _first_letter, _letters, replace(SETTINGS, metrics_path=path))
    async with running(loop.run()):
        await _scored(streams, 2)
        loop.stop()

        async def left() -> bool:
            return not await streams.workers()

        await until(left)
    *_, last = read_json_lines(path)
    assert (last["groups"], last["rewards"], last["invalid"]) == (2, 7, {"ZeroDivisionError": 2})
