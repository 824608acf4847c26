"""The messages that roles send each other. Frozen, torch-free, and the only things on a stream.

One stream entry is one message. `SCHEMA_VERSION` grows with every change of a field; a reader refuses a version that it does
not know.
"""

from __future__ import annotations

from collections.abc import Mapping
from enum import StrEnum
from typing import TYPE_CHECKING, Any, Final, TypeAlias

import msgspec
import numpy as np
import numpy.typing as npt

from protocol.versions import VersionSpan, oldest_version

SCHEMA_VERSION: Final = 1

Int32Array: TypeAlias = npt.NDArray[np.int32]
Float32Array: TypeAlias = npt.NDArray[np.float32]
UInt8Array: TypeAlias = npt.NDArray[np.uint8]
if TYPE_CHECKING:
    Json: TypeAlias = "bool | int | float | str | list[Json] | dict[str, Json] | None"
else:
    Json = Any  # the codec's decoder reads these annotations at run time, and checks JSON values itself
ChatMessage: TypeAlias = dict[str, Json]


class FinishReason(StrEnum):
    """Why sampling of a turn ended."""

    STOP = "stop"  # a stop token was sampled (it is the last trained token) or the environment ended the episode
    LENGTH = "length"  # max_new_tokens or the context was reached
    ABORTED = "aborted"  # cancelled; never trained


class EndReason(StrEnum):
    """How a task ended. Every issued task ends exactly once with one of these."""

    TRAINED = "trained"
    DROPPED = "dropped"
    INVALID = "invalid"
    DEAD = "dead"
    UNUSED = "unused"


class SamplingParams(msgspec.Struct, frozen=True, forbid_unknown_fields=True, gc=False):
    """How one completion is sampled. `seed` is unique per trajectory by construction (see `trajectory_seed`)."""

    temperature: float
    max_new_tokens: int
    seed: int
    stop_token_ids: tuple[int, ...] = ()
    top_p: float = 1.0
    top_k: int = 0  # 0: off


class PromptTask(msgspec.Struct, frozen=True, forbid_unknown_fields=True, gc=False):
    """One prompt to be completed `group_size` times. Its id is deterministic, so issuing it again is a no-op."""

    run_id: str
    task_id: str  # "{source}:{data_epoch}:{row}:{repeat}"
    source: str
    data_epoch: int
    row: int
    repeat: int
    prompt: str | tuple[ChatMessage, ...]  # raw text, or chat messages for the tokenizer's template
    columns: Mapping[str, Json]  # the row's other columns, for rewards
    environment: str
    group_size: int
    seed: int  # of the group; members derive theirs
    temperature: float
    max_new_tokens: int
    issued_at_s: float  # Unix time


class Reward(msgspec.Struct, frozen=True, forbid_unknown_fields=True, gc=False):
    """A score with its named components, or *invalid* with a reason. Infrastructure failures are invalid, never 0.

    The component `turn.N` is what turn N (from 1) earned; it is part of the value.
    """

    value: float | None
    components: Mapping[str, float] = msgspec.field(default_factory=dict)
    invalid_reason: str | None = None  # e.g. "ZeroDivisionError: ..."
    error_type: str | None = None  # e.g. "ZeroDivisionError", "timeout"; counted in the metrics

    def __post_init__(self) -> None:
        if (self.value is None) == (self.invalid_reason is None):
            raise ValueError("Reward needs either a value or an invalid_reason, not both and not neither")

    @property
    def is_valid(self) -> bool:
        return self.value is not None

    @staticmethod
    def invalid(reason: str, error_type: str) -> Reward:
        return Reward(value=None, invalid_reason=reason, error_type=error_type)


class Turn(msgspec.Struct, frozen=True, forbid_unknown_fields=True, gc=False):
    """Tokens [start, end) that the policy sampled in one turn."""

    start: int
    end: int
    finish_reason: FinishReason


class Timings(msgspec.Struct, frozen=True, forbid_unknown_fields=True, gc=False):
    """Where a trajectory's time went (seconds), and when it was sampled (Unix time)."""

    started_at_s: float
    finished_at_s: float
    queued_s: float = 0.0  # waited in the engine for a slot
    generate_s: float = 0.0
    environment_s: float = 0.0
    reward_s: float = 0.0


class Trajectory(msgspec.Struct, frozen=True, forbid_unknown_fields=True, gc=False, eq=False):
    """The record of one rollout: every id, and for every sampled id its behavior logprob and version.

    token_ids int32 [T]: prompt, then sampled and observed tokens in order. loss_mask uint8 [T]: 1 where trained.
    behavior_logprobs float32 [T]: nats at the sampling temperature where sampled, 0 elsewhere.
    """

    token_ids: Int32Array
    loss_mask: UInt8Array
    behavior_logprobs: Float32Array
    versions: tuple[VersionSpan, ...]
    sampling: SamplingParams
    turns: tuple[Turn, ...]
    finish_reason: FinishReason
    timings: Timings
    worker_id: str
    engine_id: str
    reward: Reward | None = None  # None: not scored yet

    @property
    def prompt_length(self) -> int:
        """Tokens before the first sampled one."""
        return self.turns[0].start if self.turns else len(self.token_ids)

    @property
    def num_sampled(self) -> int:
        return sum(turn.end - turn.start for turn in self.turns)

    @property
    def oldest_version(self) -> int | None:
        """What `lag` is measured from; None if nothing was sampled."""
        return oldest_version(self.versions)


class TrajectoryGroup(msgspec.Struct, frozen=True, forbid_unknown_fields=True, gc=False, eq=False):
    """The `group_size` trajectories of one prompt. One stream entry."""

    task: PromptTask
    trajectories: tuple[Trajectory, ...]
    started_version: int  # served when the task began
    published_at_s: float  # Unix time

    @property
    def task_id(self) -> str:
        return self.task.task_id

    @property
    def is_scored(self) -> bool:
        return all(trajectory.reward is not None for trajectory in self.trajectories)


Message: TypeAlias = PromptTask | TrajectoryGroup


def task_id(source: str, data_epoch: int, row: int, repeat: int) -> str:
    """The deterministic id of a task within its run."""
    return f"{source}:{data_epoch}:{row}:{repeat}"
