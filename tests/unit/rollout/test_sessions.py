"""Sessions in a group: exact ids across turns, masks, rewards of turns, budgets, and failures that stay with their member."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

from msgspec.structs import replace

from async_rl.environments.base import Episode
from async_rl.environments.session import Opening, Reply, SampledTurn, Session, SessionBase
from async_rl.reward.score import score_episode
from async_rl.rollout.group import GroupRollout, RolloutLimits
from async_rl.testing.builders import make_task
from async_rl.testing.engines import ScriptedEngine
from async_rl.testing.tiny_models import char_tokenizer
from protocol.messages import FinishReason, PromptTask, Reward, SamplingParams, TrajectoryGroup

EOS = 1
TEMPLATE = "{% for m in messages %}{{ m.role[0] }}{{ m.content }}<eos>{% endfor %}{% if add_generation_prompt %}a{% endif %}"
TOKENIZER = char_tokenizer("0123456789abstu.", chat_template=TEMPLATE)


class Counting(SessionBase):
    """Answers `turns` turns with a message, each worth `reward`; fails where told to."""

    def __init__(self, turns: int = 1, *, reward: float | None = None, fail: Callable[[int], str] = lambda index: "") -> None:
        self.turns, self.reward, self.fail = turns, reward, fail
        self.seen: list[SampledTurn] = []
        self.seeds: list[int] = []
        self.closed = 0

    async def open(self, task: PromptTask, index: int, seed: int) -> Session:
        self.seeds.append(seed)
        if self.fail(index) == "open":
            raise OSError("no room")
        return _Counted(self, index)


class _Counted:
    def __init__(self, outer: Counting, index: int) -> None:
        self._outer, self._index, self._left = outer, index, outer.turns
        self.opening = Opening(({"role": "user", "content": "1"},))

    async def reply(self, turn: SampledTurn) -> Reply:
        self._outer.seen.append(turn)
        if self._outer.fail(self._index) == "reply":
            raise KeyError("gone")
        self._left -= 1
        said = ({"role": "tool", "content": "7"},) if self._left >= 0 else None
        return Reply(said, self._outer.reward)

    async def score(self, episode: Episode) -> Reward:
        return Reward(float(len(episode.turns)))

    async def close(self) -> None:
        self._outer.closed += 1


def play(environment: Any, ids: Sequence[int], *, finish: FinishReason = FinishReason.STOP, **limits: Any) -> tuple[Any, Any]:
    def script(prompt: Sequence[int], sampling: SamplingParams) -> tuple[Sequence[int], FinishReason]:
        return ids, finish

    engine = ScriptedEngine(script, max_context=64)
    clock = iter(range(1000))
    rollout = GroupRollout(
        engine, TOKENIZER, environment, RolloutLimits(**{"max_turns": 4, "max_context": 64, "max_new_tokens": 8, **limits}),
        worker_id="w", stop_token_ids=[EOS], score=None, score_session=partial(score_episode, timeout_s=5.0),
        observe_timeout_s=5.0, clock=lambda: float(next(clock)),
    )  # fmt: skip
    return rollout, engine


async def run(rollout: GroupRollout, size: int = 1) -> TrajectoryGroup:
    return await rollout.run(replace(make_task(group_size=size), prompt=({"role": "user", "content": "1"},)))


def encoded(text: str) -> list[int]:
    return TOKENIZER.encode(text, add_special_tokens=False)


async def test_a_later_turn_begins_with_the_exact_ids_and_what_the_template_puts_behind_them() -> None:
    rollout, engine = play(Counting(), [*encoded("5"), EOS])
    (trajectory,) = (await run(rollout)).trajectories
    assert engine.prompts == [encoded("u1<eos>a"), encoded("u1<eos>a5<eos>t7<eos>a")]
    assert trajectory.token_ids.tolist() == encoded("u1<eos>a5<eos>t7<eos>a5<eos>")
    assert trajectory.loss_mask.tolist() == [0] * 4 + [1] * 2 + [0] * 4 + [1] * 2
    assert trajectory.reward == Reward(2.0)


async def test_rewards_of_turns_are_added_and_named() -> None:
    rollout, _ = play(Counting(reward=0.25), [*encoded("5"), EOS])
    (trajectory,) = (await run(rollout)).trajectories
    assert trajectory.reward == Reward(2.5, {"turn.1": 0.25, "turn.2": 0.25})


async def test_equal_seeds_open_equal_sessions_and_members_have_their_own() -> None:
    seeds = []
    for _ in range(2):
        environment = Counting()
        rollout, _engine = play(environment, [EOS])
        await run(rollout, 3)
        seeds.append(environment.seeds)
        assert environment.closed == 3
    assert seeds[0] == seeds[1]
    assert len(set(seeds[0])) == 3


async def test_a_session_that_fails_costs_its_member_alone() -> None:
    environment = Counting(fail=lambda index: {0: "open", 1: "reply"}.get(index, ""))
    rollout, _ = play(environment, [*encoded("5"), EOS])
    first, second, third = (await run(rollout, 3)).trajectories
    assert [one.reward.error_type if one.reward else None for one in (first, second)] == ["OSError", "KeyError"]
    assert third.reward == Reward(2.0)
    assert (len(first.turns), len(second.turns)) == (0, 1)
    assert environment.closed == 2


async def test_a_budget_of_tokens_ends_the_trajectory_scored_as_it_stands() -> None:
    rollout, engine = play(Counting(turns=9), [*encoded("5"), EOS], max_sampled=4)
    (trajectory,) = (await run(rollout)).trajectories
    assert (len(trajectory.turns), trajectory.num_sampled, trajectory.reward) == (2, 4, Reward(2.0))
    assert len(engine.prompts) == 2


async def test_a_budget_of_time_lets_no_further_turn_begin() -> None:
    rollout, _ = play(Counting(turns=9), [*encoded("5"), EOS], max_s=1.0)
    (trajectory,) = (await run(rollout)).trajectories
    assert (len(trajectory.turns), trajectory.reward) == (1, Reward(1.0))


async def test_every_turn_keeps_why_it_ended() -> None:
    lengths = iter([FinishReason.STOP, FinishReason.LENGTH])
    environment = Counting(turns=9)
    rollout, engine = play(environment, [*encoded("5"), EOS])
    engine._script = lambda prompt, sampling: (encoded("5"), next(lengths))
    (trajectory,) = (await run(rollout)).trajectories
    assert [turn.finish_reason for turn in trajectory.turns] == [FinishReason.STOP, FinishReason.LENGTH]
    assert len(environment.seen) == 1  # the turn that a limit cut is not answered
