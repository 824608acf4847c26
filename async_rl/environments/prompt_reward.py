"""The plain case: a prompt, one completion, and a reward function of the user's."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from async_rl.environments.base import Episode
from async_rl.environments.verifiers.functions import FunctionVerifier, not_a_number
from protocol.messages import Reward


class PromptReward:
    """Scores each completion with `function(completion, row)`.

    completion: str, the text of the one turn. row: dict, the data row's columns and the prompt under "prompt".
    Returns a number or a `Reward`; sync or async. What it raises makes the reward invalid, never 0.
    """

    def __init__(self, function: Callable[..., Any]) -> None:
        self._verifier = FunctionVerifier(function)

    async def observe(self, episode: Episode) -> str | None:
        """One turn only."""
        return None

    async def score(self, episode: Episode) -> Reward:
        score = await self._verifier.verify(episode)
        if isinstance(score, Reward):
            return score
        if score is None:
            return not_a_number(None)
        return Reward(score)
