"""What a reward worker and its scoring processes say to each other: msgpack frames, each behind its length. No pickle."""

from __future__ import annotations

import struct
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final

from async_rl.environments.base import Episode, TurnText
from async_rl.environments.load import EnvironmentSpec
from async_rl.errors import CodecError
from protocol.codec import decode_task, encode
from protocol.messages import FinishReason, Reward
from protocol.packing import pack, unpack

LENGTH: Final = struct.Struct("<I")


def framed(body: bytes) -> bytes:
    """A frame: the length of `body` as a little-endian uint32, then `body`."""
    return LENGTH.pack(len(body)) + body


@dataclass(frozen=True, slots=True)
class NamedEnvironment:
    """`config.environment`, as a scoring process knows it."""

    name: str
    args: Mapping[str, Any]
    reward: str | None


def pack_start(environment: EnvironmentSpec, timeout_s: float, path: list[str]) -> bytes:
    """The first frame of a scoring process: what it scores, and where modules are found."""
    return pack(
        {
            "name": environment.name,
            "args": dict(environment.args),
            "reward": environment.reward,
            "timeout_s": timeout_s,
            "path": path,
        }
    )


def unpack_start(body: bytes) -> tuple[NamedEnvironment, float, list[str]]:
    fields = _fields(body)
    environment = NamedEnvironment(fields["name"], fields["args"], fields["reward"])
    return environment, float(fields["timeout_s"]), list(fields["path"])


def pack_episode(episode: Episode) -> bytes:
    """Raises: CodecError if a column of the task cannot be packed."""
    return pack(
        {
            "task": encode(episode.task),
            "index": episode.index,
            "turns": [[turn.text, turn.finish_reason.value] for turn in episode.turns],
            "observations": list(episode.observations),
        }
    )


def unpack_episode(body: bytes) -> Episode:
    fields = _fields(body)
    return Episode(
        task=decode_task(fields["task"]),
        index=int(fields["index"]),
        turns=tuple(TurnText(text, FinishReason(finish)) for text, finish in fields["turns"]),
        observations=tuple(fields["observations"]),
    )


def pack_reward(reward: Reward) -> bytes:
    return pack(
        {
            "value": reward.value,
            "components": dict(reward.components),
            "invalid_reason": reward.invalid_reason,
            "error_type": reward.error_type,
        }
    )


def unpack_reward(body: bytes) -> Reward:
    """Raises: CodecError if this is no reward (a verifier may have written to the connection)."""
    try:
        return Reward(**_fields(body))
    except (TypeError, ValueError) as error:
        raise CodecError(f"not a reward: {error}") from error


def _fields(body: bytes) -> dict[str, Any]:
    fields = unpack(body)
    if not isinstance(fields, dict):
        raise CodecError(f"expected a map, got {type(fields).__name__}")
    return fields
