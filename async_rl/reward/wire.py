"""What a reward worker and its scoring processes say to each other, in msgpack. No pickle."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from async_rl.environments.base import Episode, TurnText
from async_rl.environments.load import EnvironmentSpec
from async_rl.errors import CodecError
from protocol.codec import decode_task, encode
from protocol.messages import FinishReason, Reward
from protocol.packing import pack, unpack


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
    return pack(_episode_fields(episode))


def unpack_episode(body: bytes) -> Episode:
    return _episode(_fields(body))


def pack_group(episodes: Sequence[Episode], rewards: Sequence[Reward]) -> bytes:
    """A whole group with the rewards that its members have so far."""
    fields = {"group": list(map(_episode_fields, episodes)), "rewards": list(map(_reward_fields, rewards))}
    return pack(fields)


def is_group(body: bytes) -> bool:
    return "group" in _fields(body)


def unpack_group(body: bytes) -> tuple[list[Episode], list[Reward]]:
    fields = _fields(body)
    return list(map(_episode, fields["group"])), [Reward(**reward) for reward in fields["rewards"]]


def pack_reward(reward: Reward) -> bytes:
    return pack(_reward_fields(reward))


def unpack_reward(body: bytes) -> Reward:
    """Raises: CodecError if this is no reward (a verifier may have written to the connection)."""
    try:
        return Reward(**_fields(body))
    except (TypeError, ValueError) as error:
        raise CodecError(f"not a reward: {error}") from error


def pack_rewards(rewards: Sequence[Reward]) -> bytes:
    return pack({"rewards": list(map(_reward_fields, rewards))})


def unpack_rewards(body: bytes, *, count: int) -> list[Reward]:
    """Raises: CodecError if these are not `count` rewards."""
    try:
        rewards = [Reward(**fields) for fields in _fields(body)["rewards"]]
    except (KeyError, TypeError, ValueError) as error:
        raise CodecError(f"not the rewards of a group: {error}") from error
    if len(rewards) != count:
        raise CodecError(f"{len(rewards)} rewards for a group of {count}")
    return rewards


def _episode_fields(episode: Episode) -> dict[str, Any]:
    return {
        "task": encode(episode.task),
        "index": episode.index,
        "turns": [[turn.text, turn.finish_reason.value, list(turn.token_ids)] for turn in episode.turns],
        "observations": list(episode.observations),
    }


def _episode(fields: Mapping[str, Any]) -> Episode:
    return Episode(
        task=decode_task(fields["task"]),
        index=int(fields["index"]),
        turns=tuple(TurnText(text, FinishReason(finish), tuple(ids)) for text, finish, ids in fields["turns"]),
        observations=tuple(fields["observations"]),
    )


def _reward_fields(reward: Reward) -> dict[str, Any]:
    return {
        "value": reward.value,
        "components": dict(reward.components),
        "invalid_reason": reward.invalid_reason,
        "error_type": reward.error_type,
    }


def _fields(body: bytes) -> dict[str, Any]:
    fields = unpack(body)
    if not isinstance(fields, dict):
        raise CodecError(f"expected a map, got {type(fields).__name__}")
    return fields
