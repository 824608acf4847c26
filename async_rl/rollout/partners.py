"""Who answers a trajectory: an environment without state, or a session. Their failures are theirs: not the worker's, not 0."""

from __future__ import annotations

import asyncio
import math
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import Protocol, TypeAlias, TypeVar

from async_rl.algorithms.turns import TURN
from async_rl.environments.base import Environment, Episode
from async_rl.environments.calls import call
from async_rl.environments.session import Opening, Reply, SampledTurn, Session, SessionEnvironment
from protocol.messages import PromptTask, Reward

T = TypeVar("T")
Score: TypeAlias = Callable[[Episode], Awaitable[Reward]]
ScoreSession: TypeAlias = Callable[[Session, Episode], Awaitable[Reward]]
_LONGEST_REASON = 500


class PartnerFailed(Exception):
    """The environment could not begin, or could not answer a turn."""

    def __init__(self, reason: str, error_type: str) -> None:
        super().__init__(reason)
        self.error_type = error_type


class Partner(Protocol):
    """One trajectory's view of its environment."""

    @property
    def opening(self) -> Opening: ...

    async def reply(self, turn: SampledTurn, episode: Episode) -> Reply:
        """Raises: PartnerFailed."""
        ...

    async def score(self, episode: Episode) -> Reward | None:
        """None: it is scored elsewhere."""
        ...

    async def close(self) -> None: ...


@dataclass(frozen=True, slots=True)
class PlainPartner:
    """An environment that sees the whole episode each time."""

    environment: Environment
    opening: Opening
    scorer: Score | None
    timeout_s: float | None

    async def reply(self, turn: SampledTurn, episode: Episode) -> Reply:
        text = await within(call(self.environment.observe, episode), self.timeout_s, what="observe")
        if text is not None and not isinstance(text, str):
            what = f"{type(text).__name__} {text!r:.200}"
            raise PartnerFailed(f"observe returned {what}; it must be text or None", "NotText")
        return Reply(text)

    async def score(self, episode: Episode) -> Reward | None:
        return None if self.scorer is None else await self.scorer(episode)

    async def close(self) -> None:
        return


@dataclass(frozen=True, slots=True)
class SessionPartner:
    """A session of its own."""

    session: Session
    scorer: ScoreSession
    timeout_s: float | None

    @property
    def opening(self) -> Opening:
        return self.session.opening

    async def reply(self, turn: SampledTurn, episode: Episode) -> Reply:
        reply = await within(call(self.session.reply, turn), self.timeout_s, what="reply")
        if not isinstance(reply, Reply):
            raise PartnerFailed(f"reply returned {type(reply).__name__} {reply!r:.200}; it must be a Reply", "NotAReply")
        if reply.reward is not None and not math.isfinite(reply.reward):
            raise PartnerFailed(f"the reward of a turn is {reply.reward}, not a finite number", "NotFinite")
        return reply

    async def score(self, episode: Episode) -> Reward | None:
        return await self.scorer(self.session, episode)

    async def close(self) -> None:
        await self.session.close()


async def open_session(
    environment: SessionEnvironment, task: PromptTask, index: int, seed: int, scorer: ScoreSession, timeout_s: float | None
) -> SessionPartner:
    """Raises: PartnerFailed."""
    session = await within(call(environment.open, task, index, seed), timeout_s, what="open")
    return SessionPartner(session, scorer, timeout_s)


async def within(work: Awaitable[T], timeout_s: float | None, *, what: str) -> T:
    """The result of `work`. Raises: PartnerFailed for whatever it raises, and if it takes longer than `timeout_s`."""
    scope = asyncio.timeout(timeout_s)
    try:
        async with scope:
            return await work
    except TimeoutError as error:
        if scope.expired():
            raise PartnerFailed(f"no answer within reward.timeout_s={timeout_s:g}", "timeout") from error
        raise PartnerFailed(f"{what} raised TimeoutError: {error}", "TimeoutError") from error
    except (Exception, SystemExit) as error:  # an environment must not end its worker
        name = type(error).__name__
        raise PartnerFailed(f"{what} raised {name}: {error}"[:_LONGEST_REASON], name) from error


def with_turn_rewards(reward: Reward | None, turns: list[float]) -> Reward | None:
    """The final reward and those of the turns, added up; each turn that has one is a component."""
    if reward is None or reward.value is None or not any(turns):
        return reward
    components = {f"{TURN}{number}": value for number, value in enumerate(turns, start=1) if value}
    return Reward(reward.value + sum(turns), {**reward.components, **components})
