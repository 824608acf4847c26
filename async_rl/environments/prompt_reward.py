"""The plain case: a prompt, one completion, and a reward function of the user's."""

from __future__ import annotations

import numbers
from collections.abc import Callable
from typing import Any

from async_rl.environments.base import Episode
from async_rl.environments.calls import call
from protocol.messages import Reward


class PromptReward:
    """Scores each completion with `function(completion, row)`.

    completion: str, the text of the one turn. row: dict, the data row's columns and the prompt under "prompt".
    Returns a number or a `Reward`; sync or async. What it raises makes the reward invalid, never 0.
    """

    def __init__(self, function: Callable[..., Any]) -> None:
        self._function = function

    async def observe(self, episode: Episode) -> str | None:
        """One turn only."""
        return None

    async def score(self, episode: Episode) -> Reward:
        prompt = episode.task.prompt
        row = {**episode.task.columns, "prompt": prompt if isinstance(prompt, str) else list(prompt)}
        result = _plain(await call(self._function, episode.completion, row))
        if isinstance(result, Reward):
            return result
        if isinstance(result, numbers.Real):
            return Reward(float(result))
        return Reward.invalid(
            f"the reward function returned {type(result).__name__} {result!r:.200}; it must return a number or a Reward",
            "NotANumber",
        )


def _plain(result: Any) -> Any:
    """A scalar of numpy or torch (a bool_, a tensor without dimensions) as Python's own; everything else as it is."""
    is_scalar = getattr(result, "ndim", None) == 0 and callable(getattr(result, "item", None))
    return result.item() if is_scalar else result
