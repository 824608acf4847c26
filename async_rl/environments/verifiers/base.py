"""What a verifier is, and what all of them need."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Protocol, TypeAlias, runtime_checkable

from async_rl.environments.base import Episode
from async_rl.errors import DataError
from protocol.messages import Json, Reward

Score: TypeAlias = "float | Reward | None"
"""A number, a Reward (perhaps invalid), or None: not applicable, the others decide."""


class Verifier(Protocol):
    """Scores one episode. What it raises makes the reward invalid, never 0."""

    async def verify(self, episode: Episode) -> Score: ...


@runtime_checkable
class GroupVerifier(Protocol):
    """Scores all members of a group at once, in order."""

    async def verify_group(self, episodes: Sequence[Episode]) -> Sequence[Score]: ...


@runtime_checkable
class Closable(Protocol):
    """Holds processes or connections."""

    async def close(self) -> None: ...


def gold_of(episode: Episode, column: str) -> Json:
    """The row's gold answer. Raises: DataError if it has none: nothing could be right."""
    columns = episode.task.columns
    if column not in columns:
        raise DataError(f"the row has no column {column!r} with the gold answer; it has {', '.join(columns) or 'none'}")
    if columns[column] is None:
        raise DataError(f"column {column!r} with the gold answer is null")
    return columns[column]


def row_of(episode: Episode) -> Mapping[str, Json]:
    """The row as a reward function sees it: its columns, and the prompt under "prompt"."""
    prompt = episode.task.prompt
    return {**episode.task.columns, "prompt": prompt if isinstance(prompt, str) else list(prompt)}
