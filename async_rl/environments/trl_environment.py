"""Environments written for TRL's GRPOTrainer (`environment_factory`), as they are: methods are tools.

Source of the convention: the documentation of `environment_factory` in TRL 1.16.
"""

from __future__ import annotations

import inspect
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from async_rl.environments.base import Episode
from async_rl.environments.calls import call, with_keywords
from async_rl.environments.objects import load_object
from async_rl.environments.session import Opening, Reply, SampledTurn, SessionBase
from async_rl.environments.tools import run_calls, schemas_of
from async_rl.environments.verified import combined
from async_rl.environments.verifiers.base import Score, row_of
from async_rl.environments.verifiers.functions import score_of
from async_rl.environments.verifiers.trl_reward import TrlReward
from async_rl.errors import ConfigError
from protocol.messages import ChatMessage, PromptTask, Reward


class TrlEnvironment(SessionBase):
    """`factory` (`module:Class`) makes one instance per trajectory.

    `reset(**row)` may return text that is appended to the last message of the prompt. Public methods are the model's tools;
    a turn without a call is the last. The reward is `get_reward()`, if there is one, and the weighted sum of `rewards`:
    tables of {use = "module:function", weight, name}, called as TRL calls them with this one trajectory.
    """

    def __init__(self, factory: str, rewards: Sequence[Mapping[str, Any]] = ()) -> None:
        self._factory = load_object(factory, field="environment.args.factory", kind="Class")
        self._rewards = [_reward(entry, f"environment.args.rewards[{index}]") for index, entry in enumerate(rewards)]
        kind = self._factory if inspect.isclass(self._factory) else type(self._factory())
        if not callable(getattr(kind, "reset", None)):
            raise ConfigError(f"environment.args.factory={factory!r}: {kind.__name__} has no reset method")
        if not self._rewards and not callable(getattr(kind, "get_reward", None)):
            raise ConfigError(
                f"environment.args.factory={factory!r}: {kind.__name__} has no get_reward, and environment.args.rewards is "
                f"empty: nothing would score the trajectories; give one of them"
            )

    async def open(self, task: PromptTask, index: int, seed: int) -> _TrlSession:
        instance = self._factory()
        row = dict(row_of(Episode(task, index, ())))
        said = await call(with_keywords(instance.reset, row))
        return _TrlSession(instance, _opening(task, said, instance), self._rewards)


@dataclass(frozen=True, slots=True)
class _Reward:
    name: str
    weight: float
    function: TrlReward


class _TrlSession:
    """One instance of the user's class."""

    def __init__(self, instance: Any, opening: Opening, rewards: Sequence[_Reward]) -> None:
        self._instance, self._rewards = instance, rewards
        self._tools = {name: getattr(instance, name) for name in _tool_names(instance)}
        self.opening = opening

    async def reply(self, turn: SampledTurn) -> Reply:
        if not turn.calls:
            return Reply()
        return Reply(await run_calls(turn.calls, self._tools))

    async def score(self, episode: Episode) -> Reward:
        names, weights, scores = list[str](), list[float](), list[Score]()
        if callable(getattr(self._instance, "get_reward", None)):
            names.append(type(self._instance).__name__)
            weights.append(1.0)
            scores.append(score_of(await call(self._instance.get_reward)))
        for reward in self._rewards:
            names.append(reward.name)
            weights.append(reward.weight)
            scores += await reward.function.scores([episode], {"environments": [self._instance]})
        return combined(names, weights, scores, is_all=True)

    async def close(self) -> None:
        close = getattr(self._instance, "close", None)
        if callable(close) and "close" not in self._tools:
            await call(close)


def _tool_names(instance: Any) -> list[str]:
    members = inspect.getmembers(type(instance), predicate=inspect.isfunction)
    return [name for name, _ in members if not name.startswith("_") and name not in ("reset", "get_reward")]


def _opening(task: PromptTask, said: object, instance: Any) -> Opening:
    tools = schemas_of([getattr(instance, name) for name in _tool_names(instance)])
    if said is not None and not isinstance(said, str):
        raise TypeError(f"reset returned {type(said).__name__}; it must return text or None")
    if isinstance(task.prompt, str):
        raise ConfigError("a TRL environment needs chat prompts: give the prompt column a list of messages")
    *before, last = task.prompt
    messages: tuple[ChatMessage, ...] = (*before, {**last, "content": f"{last['content']}{said or ''}"})
    return Opening(messages, tools)


def _reward(entry: Mapping[str, Any], field: str) -> _Reward:
    unknown = [key for key in entry if key not in ("use", "weight", "name")]
    if "use" not in entry or unknown:
        raise ConfigError(f"{field}={entry!r}: needs use, and takes weight and name")
    path = str(entry["use"])
    function = load_object(path, field=f"{field}.use", kind="function")
    return _Reward(str(entry.get("name", path)), float(entry.get("weight", 1.0)), TrlReward(function))
