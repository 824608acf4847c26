"""Shaping of length and format: small terms beside what says whether an answer is right."""

from __future__ import annotations

from async_rl.environments.base import Episode
from async_rl.environments.verifiers.base import Score
from async_rl.errors import ConfigError
from protocol.messages import FinishReason


class Length:
    """0 up to `max_tokens − buffer` sampled tokens, then linearly down to −1 at `max_tokens`; −1 beyond.

    Source: Yu et al. 2025, eq. 13 (arXiv:2503.14476), soft overlong punishment. Counts the tokens of all turns.
    """

    def __init__(self, *, max_tokens: int, buffer: int) -> None:
        if not 0 < buffer <= max_tokens:
            raise ConfigError(f"length: buffer={buffer} must be from 1 to max_tokens={max_tokens}")
        self._free, self._buffer = max_tokens - buffer, buffer

    async def verify(self, episode: Episode) -> Score:
        tokens = sum(turn.num_tokens for turn in episode.turns)
        return -min(1.0, max(0.0, (tokens - self._free) / self._buffer))


class Finished:
    """1 if the policy ended its last turn itself, 0 if a limit did."""

    async def verify(self, episode: Episode) -> Score:
        return float(bool(episode.turns) and episode.turns[-1].finish_reason is FinishReason.STOP)
