"""Episodes with state: several turns, chat messages, tools. One session per trajectory, from its opening to its score.

Sessions speak in messages; the rollout turns them into tokens with the chat template of the model's own tokenizer, after the
exact ids that were sampled. What a session says is never trained.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Protocol, TypeAlias, runtime_checkable

from async_rl.environments.base import Episode
from protocol.messages import ChatMessage, FinishReason, Json, PromptTask, Reward

Said: TypeAlias = str | tuple[ChatMessage, ...]
"""Text as it stands, or chat messages for the tokenizer's template."""


@dataclass(frozen=True, slots=True)
class Opening:
    """What an episode begins with. tools: JSON schemas of functions, as `apply_chat_template(tools=…)` takes them."""

    prompt: Said
    tools: tuple[Mapping[str, Json], ...] = ()


@dataclass(frozen=True, slots=True)
class ToolCall:
    """A call as the model wrote it. error: why it cannot be read (then there are no arguments)."""

    name: str
    arguments: Mapping[str, Json] = field(default_factory=dict)
    error: str | None = None


@dataclass(frozen=True, slots=True)
class SampledTurn:
    """What the policy said: without special tokens, and as sampled. calls: the tool calls in it, if the session has tools."""

    text: str
    raw: str
    finish_reason: FinishReason
    token_ids: tuple[int, ...]
    calls: tuple[ToolCall, ...] = ()


@dataclass(frozen=True, slots=True)
class Reply:
    """What follows a turn. said None: the episode is over. reward: of this turn, added to the final one."""

    said: Said | None = None
    reward: float | None = None


class Session(Protocol):
    """One episode. Raising makes its reward invalid; the rest of the group goes on."""

    @property
    def opening(self) -> Opening: ...

    async def reply(self, turn: SampledTurn) -> Reply:
        """Act on the policy's turn. Not called after the last turn that a limit allows, nor for a turn cut by one."""
        ...

    async def score(self, episode: Episode) -> Reward:
        """The final reward, wherever the episode ended."""
        ...

    async def close(self) -> None:
        """Called once, whatever happened."""
        ...


@runtime_checkable
class SessionEnvironment(Protocol):
    """Opens sessions. It is scored where it runs, in the rollout worker."""

    async def open(self, task: PromptTask, index: int, seed: int) -> Session:
        """A session for member `index` of the task's group; `seed` is the trajectory's own: equal seeds, equal sessions."""
        ...


class SessionBase:
    """What most session environments share: `observe` and `score` of the plain protocol, which are never asked."""

    async def observe(self, episode: Episode) -> str | None:
        raise NotImplementedError("an environment of sessions is asked through its sessions")

    async def score(self, episode: Episode) -> Reward:
        raise NotImplementedError("an environment of sessions is scored by its sessions")
