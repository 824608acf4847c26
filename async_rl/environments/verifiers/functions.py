"""Functions of the user's as verifiers."""

from __future__ import annotations

import numbers
from collections.abc import Callable, Sequence
from typing import Any

from async_rl.environments.base import Episode
from async_rl.environments.calls import call
from async_rl.environments.verifiers.base import Score, row_of
from protocol.messages import Reward

NOT_A_NUMBER = "NotANumber"


class FunctionVerifier:
    """`function(completion, row)`: the text of the last turn, and the row with its prompt. Sync or async."""

    def __init__(self, function: Callable[..., Any]) -> None:
        self._function = function

    async def verify(self, episode: Episode) -> Score:
        return score_of(await call(self._function, episode.completion, row_of(episode)))


class GroupFunctionVerifier:
    """`function(completions, rows)`: all members of a group, one number (or None) for each, in order. Sync or async."""

    def __init__(self, function: Callable[..., Any]) -> None:
        self._function = function

    async def verify_group(self, episodes: Sequence[Episode]) -> Sequence[Score]:
        completions, rows = [episode.completion for episode in episodes], [row_of(episode) for episode in episodes]
        return scores_of(await call(self._function, completions, rows), len(episodes))


def score_of(result: Any) -> Score:
    """What a reward function returned, as a score; an invalid reward if it is none. Scalars of numpy and torch are numbers."""
    if getattr(result, "ndim", None) == 0 and callable(getattr(result, "item", None)):
        result = result.item()
    if result is None or isinstance(result, Reward):
        return result
    if isinstance(result, numbers.Real):
        return float(result)
    return not_a_number(result)


def not_a_number(result: Any) -> Reward:
    """The invalid reward of a function that returned `result`."""
    what = f"{type(result).__name__} {result!r:.200}"
    return Reward.invalid(f"the reward function returned {what}; it must return a number or a Reward", NOT_A_NUMBER)


def scores_of(results: Any, count: int) -> list[Score]:
    """`count` results, each as a score. Raises: ValueError if there are not as many."""
    try:
        results = list(results)
    except TypeError as error:
        raise ValueError(f"the reward function returned {type(results).__name__}; it must return {count} numbers") from error
    if len(results) != count:
        raise ValueError(f"the reward function returned {len(results)} rewards for {count} completions")
    return [score_of(result) for result in results]
