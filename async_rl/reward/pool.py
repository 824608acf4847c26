"""Scoring in processes that can be killed: a verifier that hangs or crashes costs one reward, not the worker."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from functools import partial

from async_rl.environments.base import Episode
from async_rl.environments.load import EnvironmentSpec
from async_rl.environments.processes import ProcessDied, ProcessHung, ProcessPool
from async_rl.reward.score import timed_out
from async_rl.reward.wire import pack_episode, pack_group, pack_start, unpack_reward, unpack_rewards
from protocol.messages import Reward

CRASHED = "crash"
_GRACE_S = 0.25  # async verifiers are cancelled by their own process at the deadline: let it say so


class ScoringPool:
    """Scores with `environment` in `processes` processes, each score within `timeout_s` seconds."""

    def __init__(
        self, environment: EnvironmentSpec, *, processes: int, timeout_s: float, start_timeout_s: float = 120.0
    ) -> None:
        self._timeout_s = timeout_s
        self._pool = ProcessPool(
            "async_rl.reward.pool_child",
            pack_start(environment, timeout_s, sys.path),
            what=repr(environment.name),
            processes=processes,
            start_timeout_s=start_timeout_s,
        )

    @property
    def pids(self) -> list[int]:
        """Of the scoring processes that run now."""
        return self._pool.pids

    @property
    def scores_groups(self) -> bool:
        """Whether the environment has rewards of whole groups; known once the pool is started."""
        return bool(self._pool.greeting.get("group"))

    async def start(self) -> None:
        """Start all processes. Raises: ConfigError if the environment cannot be loaded there; DeadlineExceeded."""
        await self._pool.start()

    async def score(self, episode: Episode) -> Reward:
        """The episode's reward; invalid if the process hangs (killed at the deadline) or dies. Waits for a free process."""
        try:
            return await self._pool.ask(pack_episode(episode), unpack_reward, timeout_s=self._timeout_s + _GRACE_S)
        except ProcessHung:
            return timed_out(self._timeout_s)
        except ProcessDied as error:
            return _crashed(error)

    async def score_group(self, episodes: Sequence[Episode], rewards: Sequence[Reward]) -> Sequence[Reward]:
        """The rewards of a whole group, after its members were scored alone; all invalid if the process hangs or dies."""
        frame = pack_group(episodes, rewards)
        try:
            decode = partial(unpack_rewards, count=len(rewards))
            return await self._pool.ask(frame, decode, timeout_s=self._timeout_s + _GRACE_S)
        except ProcessHung:
            return [timed_out(self._timeout_s)] * len(rewards)
        except ProcessDied as error:
            return [_crashed(error)] * len(rewards)

    async def close(self) -> None:
        """Kill all processes and wait for their end."""
        await self._pool.close()


def _crashed(error: Exception) -> Reward:
    return Reward.invalid(f"the scoring process died: {error}", CRASHED)
