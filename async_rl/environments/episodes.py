"""From a trajectory to the episode that its environment sees. Decoding is for reading only: no text becomes ids again."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import pairwise

from async_rl.environments.base import Episode, TurnText
from protocol.messages import PromptTask, Trajectory

Decode = Callable[[Sequence[int]], str]
"""Token ids to text, special tokens left out."""


def episode_of(task: PromptTask, trajectory: Trajectory, index: int, decode: Decode) -> Episode:
    """The episode of member `index`: each turn's sampled tokens, and the tokens between turns as observations."""
    turns = trajectory.turns
    ids = trajectory.token_ids
    return Episode(
        task=task,
        index=index,
        turns=tuple(
            TurnText(
                decode(ids[turn.start : turn.end].tolist()), turn.finish_reason, tuple(ids[turn.start : turn.end].tolist())
            )
            for turn in turns
        ),
        observations=tuple(decode(ids[turn.end : following.start].tolist()) for turn, following in pairwise(turns)),
    )
