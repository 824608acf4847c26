"""What a policy acts in. Token in, token out: an environment sees text, but the ids that were sampled are never re-encoded."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol, runtime_checkable

from protocol.messages import ChatMessage, FinishReason, Json, PromptTask, Reward


@dataclass(frozen=True, slots=True)
class Row:
    """One prompt of a data source: its text or messages, and the other columns."""

    prompt: str | tuple[ChatMessage, ...]
    columns: Mapping[str, Json] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class TurnText:
    """What the policy said in one turn, decoded for reading only."""

    text: str
    finish_reason: FinishReason
    token_ids: tuple[int, ...] = ()  # as sampled, a stop token included

    @property
    def num_tokens(self) -> int:
        return len(self.token_ids)


@dataclass(frozen=True, slots=True)
class Episode:
    """A trajectory as its environment sees it."""

    task: PromptTask
    index: int  # member of the group
    turns: tuple[TurnText, ...]
    observations: tuple[str, ...] = ()  # text given back after each turn but the last

    @property
    def completion(self) -> str:
        """Text of the last turn."""
        return self.turns[-1].text if self.turns else ""


class Environment(Protocol):
    """Scores episodes, and may answer a turn with an observation. One instance serves all episodes of a worker."""

    async def observe(self, episode: Episode) -> str | None:
        """The text that follows the last turn (its tokens are never trained), or None: the episode is over.

        Raising is allowed: the episode ends there, and its reward is *invalid*, with the error's type.
        """
        ...

    async def score(self, episode: Episode) -> Reward:
        """The reward of a finished episode. Raising is allowed: the reward is then *invalid*, with the error's type."""
        ...


@runtime_checkable
class GroupScorer(Protocol):
    """An environment whose rewards depend on the whole group (novelty, ranking, a batch of judgements)."""

    async def score_group(self, episodes: Sequence[Episode], rewards: Sequence[Reward]) -> Sequence[Reward]:
        """One reward per member, in order. Each was scored alone before: `rewards[i]`, perhaps invalid, is of `episodes[i]`.

        Members whose sampling was aborted or whose environment failed are not among them. Raising makes all invalid.
        """
        ...


@runtime_checkable
class RowSource(Protocol):
    """An environment that brings its own prompts (a built-in task)."""

    def num_rows(self) -> int: ...

    def row(self, index: int) -> Row:
        """Training row `index`, the same at every call."""
        ...

    def held_out_rows(self, count: int) -> Sequence[Row]:
        """The first `count` held-out rows; disjoint from the training rows by construction."""
        ...

    def warmup_pairs(self, count: int, seed: int) -> Iterator[tuple[str, str]]:
        """(prompt, answer) pairs for a supervised warm-up, from training rows."""
        ...
