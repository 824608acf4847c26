"""Score one episode. Whatever goes wrong on the way is an invalid reward with its kind of error, never 0."""

from __future__ import annotations

import asyncio
import math
import numbers
from collections.abc import Awaitable, Sequence
from dataclasses import dataclass

from async_rl.environments.base import Environment, Episode, GroupScorer
from async_rl.environments.calls import call
from protocol.messages import Reward

TIMEOUT = "timeout"
NOT_FINITE = "NotFinite"
NOT_A_REWARD = "NotAReward"
_LONGEST_REASON = 500


async def score_episode(environment: Environment, episode: Episode, timeout_s: float) -> Reward:
    """The environment's reward, or an invalid one: it raised, took longer than `timeout_s` seconds, or is no finite number.

    A `score` that is not async runs in a thread. Neither a thread nor an async function that never awaits can be stopped:
    where that may happen, score in reward workers, whose processes are killed.
    """
    outcome = await _outcome(call(environment.score, episode), timeout_s)
    return outcome.error if isinstance(outcome, _Failed) else checked(outcome)


async def score_group(
    environment: Environment, episodes: Sequence[Episode], rewards: Sequence[Reward], timeout_s: float
) -> list[Reward]:
    """The rewards of a whole group, as `GroupScorer.score_group` gives them; what goes wrong makes all of them invalid."""
    if not isinstance(environment, GroupScorer) or not episodes:
        return list(rewards)
    outcome = await _outcome(call(environment.score_group, episodes, rewards), timeout_s)
    if isinstance(outcome, _Failed):
        return [outcome.error] * len(episodes)
    if not isinstance(outcome, Sequence) or len(outcome) != len(episodes):
        what = f"{len(outcome)} rewards" if isinstance(outcome, Sequence) else type(outcome).__name__
        wrong = Reward.invalid(f"score_group returned {what} for a group of {len(episodes)}", NOT_A_REWARD)
        return [wrong] * len(episodes)
    return [checked(reward) for reward in outcome]


@dataclass(frozen=True, slots=True)
class _Failed:
    error: Reward


async def _outcome(work: Awaitable[object], timeout_s: float) -> object:
    """What `work` returns, or the invalid reward that says why it did not."""
    scope = asyncio.timeout(timeout_s)
    try:
        async with scope:
            return await work
    except TimeoutError as error:
        return _Failed(timed_out(timeout_s) if scope.expired() else failed(error))
    except asyncio.CancelledError as error:
        task = asyncio.current_task()
        if task is None or task.cancelling():
            raise
        return _Failed(failed(error))  # the verifier's own
    except KeyboardInterrupt:
        raise
    except BaseException as error:  # also SystemExit: a verifier must not end its worker
        return _Failed(failed(error))


def checked(reward: object) -> Reward:
    """`reward` if it is a valid Reward of finite floats, or invalid already; else an invalid one that says why."""
    if not isinstance(reward, Reward):
        return Reward.invalid(f"score returned {type(reward).__name__} {reward!r:.200}, not a Reward", NOT_A_REWARD)
    if not reward.is_valid:
        return reward
    parts = {"value": reward.value, **{f"components.{name}": part for name, part in reward.components.items()}}
    for name, part in parts.items():
        if not isinstance(part, numbers.Real):
            return Reward.invalid(f"{name} is {type(part).__name__} {part!r:.200}, not a number", NOT_A_REWARD)
        if not math.isfinite(part):
            return Reward.invalid(f"{name} is {float(part)}, not a finite number", NOT_FINITE)
    value, *components = (float(part) for part in parts.values() if part is not None)
    return Reward(value, dict(zip(map(str, reward.components), components, strict=True)))


def failed(error: BaseException) -> Reward:
    """The invalid reward of a verifier that raised."""
    name = type(error).__name__
    return Reward.invalid(f"{name}: {error}"[:_LONGEST_REASON], name)


def timed_out(timeout_s: float) -> Reward:
    """The invalid reward of a score that took too long."""
    return Reward.invalid(f"no score within reward.timeout_s={timeout_s:g}", TIMEOUT)
