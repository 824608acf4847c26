"""Reward functions written for TRL's GRPOTrainer, as they are.

Source of the calling convention: the documentation of `reward_funcs` in TRL 1.16.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from async_rl.environments.base import Episode
from async_rl.environments.calls import call, with_keywords
from async_rl.environments.verifiers.base import Score
from async_rl.environments.verifiers.functions import scores_of
from protocol.messages import Reward

_RESERVED = ("prompt", "completion", "completion_ids")


@dataclass(frozen=True, slots=True)
class TrainerState:
    """What a reward function may ask of the trainer. Rewards are computed apart from it: only the data epoch is known."""

    epoch: float
    global_step: int = 0
    max_steps: int = 0


class TrlReward:
    """One function `(prompts, completions, completion_ids, **columns) -> list of numbers or None`, sync or async.

    It is called once per group, with keyword arguments: the prompts and completions (chat messages where the prompt is chat),
    the sampled ids, every column as a list, trainer_state, log_extra, log_metric and, of a TRL environment, environments.
    None says that it does not apply to that completion.
    """

    def __init__(self, function: Callable[..., Any]) -> None:
        self._function = function

    async def verify_group(self, episodes: Sequence[Episode]) -> Sequence[Score]:
        return await self.scores(episodes, {})

    async def scores(self, episodes: Sequence[Episode], more: Mapping[str, Any]) -> list[Score]:
        """`more`: further keyword arguments, lists of one entry per episode."""
        metrics: dict[str, float] = {}
        keywords = {**_keywords(episodes), **more, "log_extra": _ignore, "log_metric": _recorder(metrics)}
        results = scores_of(await call(with_keywords(self._function, keywords)), len(episodes))
        return [_with(score, metrics) for score in results]


def _keywords(episodes: Sequence[Episode]) -> dict[str, Any]:
    first = episodes[0].task
    columns = {
        name: [episode.task.columns.get(name) for episode in episodes] for name in first.columns if name not in _RESERVED
    }
    return {
        **columns,
        "prompts": [_prompt(episode) for episode in episodes],
        "completions": [_completion(episode) for episode in episodes],
        "completion_ids": [[token for turn in episode.turns for token in turn.token_ids] for episode in episodes],
        "trainer_state": TrainerState(epoch=float(first.data_epoch)),
    }


def _prompt(episode: Episode) -> Any:
    prompt = episode.task.prompt
    return prompt if isinstance(prompt, str) else [dict(message) for message in prompt]


def _completion(episode: Episode) -> Any:
    """Text for a text prompt; else the messages that were said, the environment's among them."""
    if isinstance(episode.task.prompt, str):
        return episode.completion
    messages: list[dict[str, Any]] = []
    for index, turn in enumerate(episode.turns):
        messages.append({"role": "assistant", "content": turn.text})
        if index < len(episode.observations):
            messages.append({"role": "tool", "content": episode.observations[index]})
    return messages


def _ignore(column: str, values: Sequence[Any]) -> None:
    """A table of completions is TRL's own; here `async-rl show` has them."""


def _recorder(metrics: dict[str, float]) -> Callable[[str, float], None]:
    def record(name: str, value: float) -> None:
        metrics[name] = float(value)

    return record


def _with(score: Score, metrics: Mapping[str, float]) -> Score:
    if not metrics or score is None or (isinstance(score, Reward) and not score.is_valid):
        return score
    if isinstance(score, Reward):
        return Reward(score.value, {**score.components, **metrics})
    return Reward(score, metrics)
