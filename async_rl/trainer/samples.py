"""From a judged group to flat tokens with credit. Numpy only: tensors begin at packing."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TypeAlias

import numpy as np
import numpy.typing as npt

from async_rl.algorithms.credit import Float64Array
from async_rl.algorithms.staleness import GroupVerdict, Verdict
from async_rl.errors import ShapeError
from protocol.messages import Float32Array, Int32Array, Trajectory, TrajectoryGroup
from protocol.versions import VersionSpan

BoolArray: TypeAlias = npt.NDArray[np.bool_]


@dataclass(frozen=True, slots=True, eq=False)
class TrainingSample:
    """One trajectory as the step trains it. All arrays are [T] and aligned: position t holds what belongs to token t.

    token_ids: int32. loss_mask: bool, True where trained; never the first token, which has nothing before it.
    behavior_logprobs: float32, nats at `temperature`. advantages: float32, 0 where not trained. lags: int32, versions
    between the oldest policy that had a hand in a token and the one that trains it, 0 where not sampled.
    task_id, member: which trajectory of which group it is.
    """

    token_ids: Int32Array
    loss_mask: BoolArray
    behavior_logprobs: Float32Array
    advantages: Float32Array
    lags: Int32Array
    temperature: float
    task_id: str
    member: int

    def __post_init__(self) -> None:
        shape = self.token_ids.shape
        arrays = ("loss_mask", "behavior_logprobs", "advantages", "lags")
        if len(shape) != 1 or any(getattr(self, name).shape != shape for name in arrays):
            listed = ", ".join(f"{name} {getattr(self, name).shape}" for name in arrays)
            raise ShapeError(f"sample {self.task_id}[{self.member}]: token_ids {shape}, {listed} must be one [T]")
        if shape[0] == 0 or self.loss_mask[0]:
            raise ShapeError(f"sample {self.task_id}[{self.member}]: needs a first token, and that one cannot be trained")

    def __len__(self) -> int:
        return len(self.token_ids)


def to_training_samples(
    group: TrajectoryGroup, verdict: GroupVerdict, advantages: Sequence[float | Float64Array] | Float64Array
) -> list[TrainingSample]:
    """Return a sample for each trajectory of `group` that trains, in order; `advantages` credit whole trajectories ([G]) or,
    where there is an array [T], each token of one.

    Too-old tokens of a masked trajectory leave the loss mask and stay as context. Tokens after the last trained one are cut
    off: nothing depends on them.
    Raises: ShapeError if verdict and advantages are not one per trajectory, or those of tokens not one per token.
    """
    if not len(advantages) == len(group.trajectories) == len(verdict.trajectories):
        raise ShapeError(
            f"group {group.task_id} has {len(group.trajectories)} trajectories, {len(verdict.trajectories)} verdicts and "
            f"{len(advantages)} advantages: one of each per trajectory is needed"
        )
    oldest_trained = verdict.oldest_trained_version
    samples: list[TrainingSample] = []
    for member, (trajectory, decision) in enumerate(zip(group.trajectories, verdict.trajectories, strict=True)):
        if not decision.trains:
            continue
        mask = trajectory.loss_mask != 0
        if decision.verdict is Verdict.MASK:
            _clear_older(mask, trajectory.versions, oldest_trained)
        lags = _token_lags(trajectory, verdict.current_version)
        samples.append(_sample(trajectory, mask, lags, advantages[member], group.task_id, member))
    return samples


def _clear_older(mask: BoolArray, versions: tuple[VersionSpan, ...], oldest_trained: int) -> None:
    for span in versions:
        if span.kv_version < oldest_trained:
            mask[span.start : span.end] = False


def _token_lags(trajectory: Trajectory, current_version: int) -> Int32Array:
    lags = np.zeros(len(trajectory.token_ids), dtype=np.int32)
    for span in trajectory.versions:
        lags[span.start : span.end] = current_version - span.kv_version
    return lags


def _sample(
    trajectory: Trajectory, mask: BoolArray, lags: Int32Array, advantage: float | Float64Array, task_id: str, member: int
) -> TrainingSample:
    credit = np.asarray(advantage, dtype=np.float64)
    if credit.shape not in ((), mask.shape):
        raise ShapeError(f"sample {task_id}[{member}]: advantages {credit.shape} for {mask.shape} tokens")
    end = len(mask) if mask[-1] else len(mask) - int(mask[::-1].argmax())
    mask = mask[:end]
    return TrainingSample(
        token_ids=trajectory.token_ids[:end],
        loss_mask=mask,
        behavior_logprobs=trajectory.behavior_logprobs[:end],
        advantages=np.multiply(mask, credit if credit.ndim == 0 else credit[:end], dtype=np.float32),
        lags=lags[:end],
        temperature=trajectory.sampling.temperature,
        task_id=task_id,
        member=member,
    )
