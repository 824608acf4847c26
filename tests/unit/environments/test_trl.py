"""What was written for TRL runs as it is: reward functions with all their arguments, environments whose methods are tools."""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
from msgspec.structs import replace

from async_rl.config.rollout import EnvironmentConfig
from async_rl.environments.base import Episode, TurnText
from async_rl.environments.load import load_environment
from async_rl.environments.session import SampledTurn, SessionEnvironment, ToolCall
from async_rl.errors import ConfigError
from async_rl.reward.score import score_episode, score_group
from async_rl.testing.builders import make_task
from protocol.messages import FinishReason, Json, Reward

MODULE = '''
import asyncio

SEEN = {}

def length(completions, **kwargs):
    SEEN.update(kwargs, completions=completions)
    return [float(len(c if isinstance(c, str) else c[-1]["content"])) for c in completions]

async def right(prompts, completions, answer, **kwargs):
    await asyncio.sleep(0)
    return [None if a is None else float(c == a) for c, a in zip(completions, answer)]

def logs(completions, log_metric, log_extra, **kwargs):
    log_metric("shown", 3.0)
    log_extra("column", completions)
    return [1.0] * len(completions)

def breaks(completions, **kwargs):
    raise RuntimeError("no licence")

def environment_bonus(environments, **kwargs):
    return [float(e.total) for e in environments]

class Counter:
    """Two tools."""

    def reset(self, start=0, **kwargs):
        self.total = start
        return f" Start at {start}."

    def add(self, amount: int) -> int:
        """Add to the total.

        Args:
            amount: what is added
        """
        self.total += amount
        return self.total

    async def double(self) -> int:
        """Double the total."""
        self.total *= 2
        return self.total

    def get_reward(self):
        return 1.0 if self.total == 10 else 0.0

class Scoreless:
    def reset(self, **kwargs):
        return None
'''


@pytest.fixture(autouse=True)
def _module(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    (tmp_path / "written_for_trl.py").write_text(MODULE)
    monkeypatch.syspath_prepend(str(tmp_path))
    yield
    sys.modules.pop("written_for_trl", None)


def episode(text: str, *, index: int = 0, prompt: Any = "q", **columns: Json) -> Episode:
    return Episode(replace(make_task(), prompt=prompt, columns=columns), index, (TurnText(text, FinishReason.STOP, (7, 8)),))


async def group_rewards(parts: Sequence[dict[str, Any]], episodes: Sequence[Episode]) -> list[Reward]:
    environment = load_environment(EnvironmentConfig(name="verify", args={"verifiers": list(parts)}))
    alone = await asyncio.gather(*(score_episode(environment, one, 5.0) for one in episodes))
    return await score_group(environment, episodes, alone, 5.0)


async def test_several_functions_with_weights_and_one_that_does_not_apply() -> None:
    parts = [
        {"trl": "written_for_trl:length", "weight": 0.5, "name": "length"},
        {"trl": "written_for_trl:right", "name": "right"},
    ]
    rewards = await group_rewards(parts, [episode("ab", answer="ab"), episode("abc", answer="x"), episode("a", answer=None)])
    assert [reward.value for reward in rewards] == [2.0, 1.5, 0.5]
    assert [dict(reward.components) for reward in rewards] == [
        {"length": 2.0, "right": 1.0}, {"length": 3.0, "right": 0.0}, {"length": 1.0}
    ]  # fmt: skip


async def test_every_keyword_argument_arrives() -> None:
    import written_for_trl  # type: ignore[import-not-found]  # made by the fixture

    chat = ({"role": "user", "content": "q"},)
    await group_rewards(
        [{"trl": "written_for_trl:length"}], [episode("ab", prompt=chat, level=3), episode("c", prompt=chat, level=4)]
    )
    seen = written_for_trl.SEEN
    assert seen["completions"] == [[{"role": "assistant", "content": "ab"}], [{"role": "assistant", "content": "c"}]]
    assert seen["prompts"] == [[{"role": "user", "content": "q"}]] * 2
    assert seen["completion_ids"] == [[7, 8], [7, 8]]
    assert seen["level"] == [3, 4]
    assert seen["trainer_state"].epoch == 0.0


async def test_metrics_are_components() -> None:
    (reward,) = await group_rewards([{"trl": "written_for_trl:logs", "name": "logs"}], [episode("a")])
    assert reward == Reward(1.0, {"logs": 1.0, "logs.shown": 3.0})


async def test_a_function_that_raises_makes_rewards_invalid() -> None:
    (reward,) = await group_rewards([{"trl": "written_for_trl:breaks", "name": "b"}], [episode("a")])
    assert (reward.value, reward.error_type, reward.invalid_reason) == (None, "RuntimeError", "b: RuntimeError: no licence")


def turn(*calls: ToolCall) -> SampledTurn:
    return SampledTurn("", "", FinishReason.STOP, (1,), calls)


async def test_methods_are_tools_and_state_is_the_trajectory_s_own() -> None:
    environment = load_environment(EnvironmentConfig(name="trl", args={"factory": "written_for_trl:Counter"}))
    assert isinstance(environment, SessionEnvironment)
    task = replace(make_task(), prompt=({"role": "user", "content": "Reach 10."},), columns={"start": 4})
    one, other = await environment.open(task, 0, 0), await environment.open(task, 1, 1)
    assert one.opening.prompt == ({"role": "user", "content": "Reach 10. Start at 4."},)
    assert [tool["function"]["name"] for tool in one.opening.tools] == ["add", "double"]  # type: ignore[index,call-overload]  # JSON
    reply = await one.reply(
        turn(ToolCall("add", {"amount": 1}), ToolCall("double"), ToolCall("nope"), ToolCall("add", {"x": 1}))
    )
    assert isinstance(reply.said, tuple)
    assert [message["content"] for message in reply.said[:2]] == ["5", "10"]
    assert [str(message["content"])[:9] for message in reply.said[2:]] == ["{'error':"] * 2
    assert (await one.reply(turn())).said is None
    last = Episode(task, 0, (TurnText("done", FinishReason.STOP),))
    assert await one.score(last) == Reward(1.0, {"Counter": 1.0})
    assert await other.score(last) == Reward(0.0, {"Counter": 0.0})


async def test_reward_functions_see_the_environment() -> None:
    rewards = [{"use": "written_for_trl:environment_bonus", "weight": 0.1, "name": "bonus"}]
    config = EnvironmentConfig(name="trl", args={"factory": "written_for_trl:Counter", "rewards": rewards})
    environment = load_environment(config)
    assert isinstance(environment, SessionEnvironment)
    task = replace(make_task(), prompt=({"role": "user", "content": "?"},), columns={"start": 10})
    session = await environment.open(task, 0, 0)
    assert await session.score(Episode(task, 0, ())) == Reward(2.0, {"Counter": 1.0, "bonus": 10.0})


def test_what_could_never_be_scored_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"Scoreless has no get_reward, and .* is empty"):
        load_environment(EnvironmentConfig(name="trl", args={"factory": "written_for_trl:Scoreless"}))
