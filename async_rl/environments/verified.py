"""One turn, scored by one verifier or a weighted sum of several, each with its own time limit, retries and concurrency."""

from __future__ import annotations

import asyncio
import math
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass

from async_rl.environments.base import Episode
from async_rl.environments.verifiers.base import Closable, GroupVerifier, Score, Verifier
from protocol.messages import Reward

TIMEOUT = "timeout"
NOT_SCORED = "not_scored"
NOT_FINITE = "NotFinite"
_LONGEST_REASON = 500


@dataclass(frozen=True, slots=True)
class Part:
    """One verifier and how it is used."""

    name: str
    verifier: Verifier | GroupVerifier
    weight: float = 1.0
    timeout_s: float | None = None
    """Of one try; unset: reward.timeout_s alone bounds it."""
    retries: int = 0
    """Further tries after an error (a verifier that raised, or an invalid reward)."""
    max_concurrent: int | None = None
    """Calls at a time in one process; unset: no bound."""


class Verified:
    """Environment: reward = Σ weight × score over the verifiers that apply, with each score as a component.

    One verifier that fails makes the reward invalid: a sum without it would be another reward. None from all: invalid too.
    """

    def __init__(self, parts: Sequence[Part]) -> None:
        self._parts = [_Guarded(part) for part in parts if not isinstance(part.verifier, GroupVerifier)]
        self._group_parts = [_Guarded(part) for part in parts if isinstance(part.verifier, GroupVerifier)]

    async def observe(self, episode: Episode) -> str | None:
        """One turn only."""
        return None

    async def score(self, episode: Episode) -> Reward:
        scores = await asyncio.gather(*(part.score(episode) for part in self._parts))
        names = [part.part.name for part in self._parts]
        return combined(names, [part.part.weight for part in self._parts], scores, is_all=not self._group_parts)

    async def close(self) -> None:
        """End what the verifiers hold."""
        for guarded in (*self._parts, *self._group_parts):
            if isinstance(guarded.part.verifier, Closable):
                await guarded.part.verifier.close()


class VerifiedGroups(Verified):
    """Some of the verifiers see the whole group."""

    async def score_group(self, episodes: Sequence[Episode], rewards: Sequence[Reward]) -> Sequence[Reward]:
        """Members that could be scored alone get the scores of the group's verifiers on top."""
        members = [index for index, reward in enumerate(rewards) if reward.is_valid]
        if not members:
            return rewards
        columns = await asyncio.gather(
            *(part.score_group([episodes[index] for index in members]) for part in self._group_parts)
        )
        names = [part.part.name for part in self._group_parts]
        weights = [part.part.weight for part in self._group_parts]
        result = list(rewards)
        for index, scores in zip(members, zip(*columns, strict=True), strict=True):
            alone = rewards[index]
            together = combined(names, weights, scores, is_all=not alone.components)
            if together.value is None or alone.value is None:
                result[index] = together
            else:
                result[index] = Reward(alone.value + together.value, {**alone.components, **together.components})
        return result


def verified(parts: Sequence[Part]) -> Verified:
    """The environment of `parts`; it looks at groups only if one of them does."""
    sees_groups = any(isinstance(part.verifier, GroupVerifier) for part in parts)
    return VerifiedGroups(parts) if sees_groups else Verified(parts)


def combined(names: Sequence[str], weights: Sequence[float], scores: Sequence[Score], *, is_all: bool) -> Reward:
    """The weighted sum of what applies. is_all: nothing else adds to it, so that no score at all is no reward."""
    total, components = 0.0, dict[str, float]()
    for name, weight, score in zip(names, weights, scores, strict=True):
        if score is None:
            continue
        value = score.value if isinstance(score, Reward) else score
        if value is None:
            assert isinstance(score, Reward)
            return Reward.invalid(f"{name}: {score.invalid_reason}", score.error_type or "unknown")
        if not math.isfinite(value):
            return Reward.invalid(f"{name}: {float(value)} is not a finite number", NOT_FINITE)
        if isinstance(score, Reward):
            components.update({f"{name}.{key}": part for key, part in score.components.items()})
        components[name] = float(value)
        total += weight * value
    if not components and is_all:
        return Reward.invalid(f"none of {', '.join(names)} applies to this completion", NOT_SCORED)
    return Reward(total, components)


class _Guarded:
    """A verifier behind its limits. Never raises, except to be cancelled."""

    def __init__(self, part: Part) -> None:
        self.part = part
        self._slots = asyncio.Semaphore(part.max_concurrent or 2**31)

    async def score(self, episode: Episode) -> Score:
        verifier = self.part.verifier
        assert not isinstance(verifier, GroupVerifier)

        async def verify() -> Sequence[Score]:
            return [await verifier.verify(episode)]

        (score,) = await self._tried(verify, count=1)
        return score

    async def score_group(self, episodes: Sequence[Episode]) -> Sequence[Score]:
        verifier = self.part.verifier
        assert isinstance(verifier, GroupVerifier)
        return await self._tried(lambda: verifier.verify_group(episodes), count=len(episodes))

    async def _tried(self, work: Callable[[], Awaitable[Sequence[Score]]], *, count: int) -> Sequence[Score]:
        scores: Sequence[Score] = []
        for _ in range(self.part.retries + 1):
            scores = await self._once(work, count)
            if not any(isinstance(score, Reward) and not score.is_valid for score in scores):
                break
        return scores

    async def _once(self, work: Callable[[], Awaitable[Sequence[Score]]], count: int) -> Sequence[Score]:
        async with self._slots:
            scope = asyncio.timeout(self.part.timeout_s)
            try:
                async with scope:
                    return await work()
            except TimeoutError as error:
                if scope.expired():
                    return [Reward.invalid(f"no score within timeout_s={self.part.timeout_s:g}", TIMEOUT)] * count
                return [_failed(error)] * count
            except (Exception, SystemExit) as error:  # a verifier must not end its worker
                return [_failed(error)] * count


def _failed(error: BaseException) -> Reward:
    name = type(error).__name__
    return Reward.invalid(f"{name}: {error}"[:_LONGEST_REASON], name)
