"""Environments for tests: small, deterministic, and with more than one turn."""

from __future__ import annotations

from async_rl.environments.base import Episode, Row
from protocol.messages import Reward

SECOND_QUESTION = "again>"


class TwoTurns:
    """Answers the first turn with a fixed observation; the reward is the share of turns whose text is `answer`."""

    def __init__(self, answer: str = "1") -> None:
        self._answer = answer

    async def observe(self, episode: Episode) -> str | None:
        return SECOND_QUESTION if len(episode.turns) == 1 else None

    async def score(self, episode: Episode) -> Reward:
        right = sum(turn.text == self._answer for turn in episode.turns)
        return Reward(right / 2, {"turns": float(len(episode.turns))})


class NumberedRows:
    """A source of which row n says n."""

    def __init__(self, count: int) -> None:
        self._count = count

    def num_rows(self) -> int:
        return self._count

    def row(self, index: int) -> Row:
        return Row(prompt=f"{index}>", columns={"n": index})
