"""Which trajectories of a group a step trains: decided purely, per trajectory, when the step is composed. Torch-free.

The age of a token is `current_version − kv_version`: the oldest policy that had a hand in it. A trajectory's `lag` is the
age of its oldest sampled token.

Baseline rule: every trajectory that is not INVALID enters its group's baseline, the dropped ones too. A reward is a fact
about the prompt, and a baseline built from the fresh (on average shorter) completions alone would be biased towards them;
an older policy's reward adds a little bias to the baseline's *value*, but a baseline that does not depend on the
trajectory's own tokens never biases the gradient, and the lag is bounded. What is INVALID is a record that cannot be
trusted, so its reward is not a fact: it leaves baseline and loss.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from enum import StrEnum
from typing import Any, Literal, TypeAlias

import numpy as np
import numpy.typing as npt

from async_rl.algorithms.dapo import has_signal, is_truncated
from async_rl.algorithms.records import layout_is_consistent, record_fault
from protocol.messages import EndReason, FinishReason, Trajectory, TrajectoryGroup

TooOld: TypeAlias = Literal["mask", "drop"]
Stragglers: TypeAlias = Literal["wait", "mask", "drop"]


class Verdict(StrEnum):
    """What a step does with one trajectory."""

    TRAIN = "train"  # every token of its loss mask
    MASK = "mask"  # all but its too-old tokens
    DROP = "drop"  # none, but its reward stays in the baseline
    INVALID = "invalid"  # none, and no part in the baseline


class DropReason(StrEnum):
    """Why a sound trajectory is not trained."""

    STALE = "stale"  # older than max_lag (with stragglers = mask: every trained token is)
    TRUNCATED = "truncated"  # it ran into a length limit (DropRules.truncated)
    NO_SIGNAL = "no_signal"  # its group's valid rewards do not differ (DropRules.without_signal)


class InvalidReason(StrEnum):
    """Why a trajectory's record cannot be trusted."""

    LENGTH_MISMATCH = "length_mismatch"  # arrays, spans or turns do not fit each other
    ABORTED = "aborted"  # sampling was cancelled
    EMPTY = "empty"  # no token to train
    NO_CONTEXT = "no_context"  # its very first token is marked as trained: nothing precedes it
    TRAINED_OUTSIDE_TURNS = "trained_outside_turns"  # a token that the policy did not sample is in the loss mask
    STOP_TOKEN = "stop_token"  # a stop token is untrained, or inside a turn
    POSITIVE_LOGPROB = "positive_logprob"  # a probability above 1
    LOGPROBS_DIFFER = "logprobs_differ"  # recomputed at the version that sampled them, they are others (found by the trainer)
    UNVERSIONED = "unversioned"  # a trained token is in no version span
    FUTURE_VERSION = "future_version"  # sampled by a version that the trainer has not reached
    NON_FINITE_LOGPROB = "non_finite_logprob"  # NaN or infinity at a trained token
    UNSCORED = "unscored"  # it never got a reward
    REWARD = "reward"  # the scorer failed; Reward.error_type says how
    NON_FINITE_REWARD = "non_finite_reward"  # NaN or infinity


@dataclass(frozen=True, slots=True)
class TrajectoryVerdict:
    """The verdict on one trajectory, with what the metrics need.

    lag: optimizer steps between its oldest sampled token and the trainer; None where no version can be trusted. It is
    `lag_in_flight` (versions passed while it was sampled) plus `lag_in_queue` (passed since its last token).
    num_tokens: tokens of its loss mask. num_trained: those that enter the loss.
    """

    verdict: Verdict
    lag: int | None
    lag_in_flight: int | None
    num_tokens: int
    num_trained: int
    reason: DropReason | InvalidReason | None = None

    @property
    def trains(self) -> bool:
        return self.num_trained > 0

    @property
    def in_baseline(self) -> bool:
        return self.verdict is not Verdict.INVALID

    @property
    def num_masked(self) -> int:
        """Tokens that are too old to train, in a trajectory that trains otherwise."""
        return self.num_tokens - self.num_trained if self.verdict is Verdict.MASK else 0

    @property
    def lag_in_queue(self) -> int | None:
        return None if self.lag is None or self.lag_in_flight is None else self.lag - self.lag_in_flight

    def to_record(self) -> list[Any]:
        """Plain values for the step record: [verdict, lag, lag in flight, tokens, trained, reason]."""
        reason = None if self.reason is None else self.reason.value
        return [self.verdict.value, self.lag, self.lag_in_flight, self.num_tokens, self.num_trained, reason]

    @staticmethod
    def from_record(record: list[Any]) -> TrajectoryVerdict:
        """Inverse of `to_record`. Raises: ValueError on an unknown verdict or reason, or a wrong number of values."""
        name, lag, lag_in_flight, num_tokens, num_trained, reason = record
        verdict = Verdict(name)
        kind = InvalidReason if verdict is Verdict.INVALID else DropReason
        return TrajectoryVerdict(verdict, lag, lag_in_flight, num_tokens, num_trained, None if reason is None else kind(reason))


@dataclass(frozen=True, slots=True)
class GroupVerdict:
    """The verdicts on a group's trajectories, in their order. All that is needed, with the group, to train it again."""

    current_version: int
    max_lag: int
    trajectories: tuple[TrajectoryVerdict, ...]

    @property
    def oldest_trained_version(self) -> int:
        """Tokens of an older (KV) version are too old."""
        return self.current_version - self.max_lag

    @property
    def trains(self) -> bool:
        """True if at least one token enters the loss."""
        return any(trajectory.trains for trajectory in self.trajectories)

    @property
    def end(self) -> EndReason:
        """How the group ends with the step: TRAINED, else DROPPED if a sound trajectory was too old, else INVALID."""
        if self.trains:
            return EndReason.TRAINED
        dropped = any(trajectory.verdict is Verdict.DROP for trajectory in self.trajectories)
        return EndReason.DROPPED if dropped else EndReason.INVALID

    @property
    def drop_reason(self) -> DropReason | None:
        """Why nothing of the group trains, if it ends as DROPPED: the first of its dropped trajectories' reasons."""
        if self.end is not EndReason.DROPPED:
            return None
        return next((t.reason for t in self.trajectories if isinstance(t.reason, DropReason)), None)

    @property
    def counts(self) -> Counter[Verdict]:
        """Trajectories per verdict."""
        return Counter(trajectory.verdict for trajectory in self.trajectories)

    @property
    def invalid_counts(self) -> Counter[InvalidReason]:
        """Invalid trajectories per reason."""
        return Counter(t.reason for t in self.trajectories if isinstance(t.reason, InvalidReason))

    @property
    def num_trained(self) -> int:
        """Tokens that enter the loss."""
        return sum(trajectory.num_trained for trajectory in self.trajectories)

    @property
    def num_masked(self) -> int:
        """Too-old tokens of trajectories that train otherwise."""
        return sum(trajectory.num_masked for trajectory in self.trajectories)

    @property
    def max_trained_lag(self) -> int | None:
        """Largest lag among trajectories that train; None if none does."""
        return max((t.lag for t in self.trajectories if t.trains and t.lag is not None), default=None)

    def to_record(self) -> dict[str, Any]:
        """Plain dicts, lists and values for the step record of the intake log."""
        return {
            "current_version": self.current_version,
            "max_lag": self.max_lag,
            "trajectories": [trajectory.to_record() for trajectory in self.trajectories],
        }

    @staticmethod
    def from_record(record: Mapping[str, Any]) -> GroupVerdict:
        """Inverse of `to_record`. Raises: KeyError or ValueError on a record that `to_record` did not make."""
        trajectories = tuple(TrajectoryVerdict.from_record(row) for row in record["trajectories"])
        return GroupVerdict(record["current_version"], record["max_lag"], trajectories)


@dataclass(frozen=True, slots=True)
class DropRules:
    """What is not trained although it is sound and young enough: see async_rl.algorithms.dapo."""

    truncated: bool = False
    without_signal: bool = False


NO_RULES = DropRules()


def judge(
    group: TrajectoryGroup,
    *,
    current_version: int,
    max_lag: int,
    stragglers: TooOld,
    rules: DropRules = NO_RULES,
    quarantined: Mapping[int, InvalidReason] | None = None,
) -> GroupVerdict:
    """Return what a step at `current_version` (optimizer steps applied before it) does with each trajectory of `group`.

    stragglers: a trajectory with lag > max_lag is dropped whole (`drop`), or only its tokens older than max_lag leave the
    loss (`mask`); a trajectory without a younger trained token is dropped either way. rules: what else is dropped.
    quarantined: members that a check of the trainer's found to be invalid, and why.
    Raises: ValueError if max_lag or current_version is negative, or stragglers is neither.
    """
    if max_lag < 0 or current_version < 0:
        raise ValueError(f"max_lag={max_lag}, current_version={current_version}: both must be at least 0")
    if stragglers not in ("mask", "drop"):
        raise ValueError(f"stragglers={stragglers!r}: must be 'mask' or 'drop'")
    verdicts = [_judge_trajectory(trajectory, current_version, max_lag, stragglers) for trajectory in group.trajectories]
    for member, reason in (quarantined or {}).items():
        if verdicts[member].in_baseline:
            verdicts[member] = replace(verdicts[member], verdict=Verdict.INVALID, num_trained=0, reason=reason)
    if rules.truncated:
        verdicts = [
            _dropped(verdict, DropReason.TRUNCATED) if is_truncated(trajectory) else verdict
            for trajectory, verdict in zip(group.trajectories, verdicts, strict=True)
        ]
    if rules.without_signal and not has_signal(_valid_rewards(group, verdicts)):
        verdicts = [_dropped(verdict, DropReason.NO_SIGNAL) for verdict in verdicts]
    return GroupVerdict(current_version, max_lag, tuple(verdicts))


def _dropped(verdict: TrajectoryVerdict, reason: DropReason) -> TrajectoryVerdict:
    """The same trajectory, not trained; what is dropped or invalid already keeps its reason."""
    return replace(verdict, verdict=Verdict.DROP, num_trained=0, reason=reason) if verdict.trains else verdict


def _valid_rewards(group: TrajectoryGroup, verdicts: Sequence[TrajectoryVerdict]) -> npt.NDArray[np.float64]:
    rewards = [t.reward for t, verdict in zip(group.trajectories, verdicts, strict=True) if verdict.in_baseline]
    return np.array([r.value for r in rewards if r is not None and r.value is not None], dtype=np.float64)


def _judge_trajectory(trajectory: Trajectory, current_version: int, max_lag: int, stragglers: TooOld) -> TrajectoryVerdict:
    num_tokens = int(np.count_nonzero(trajectory.loss_mask))
    fault = _record_fault(trajectory, num_tokens) or _version_fault(trajectory, num_tokens, current_version)
    if fault is not None:  # the versions are part of what cannot be trusted
        return TrajectoryVerdict(Verdict.INVALID, None, None, num_tokens, 0, fault)

    oldest = min(span.kv_version for span in trajectory.versions)
    lag = current_version - oldest
    lag_in_flight = max(span.version for span in trajectory.versions) - oldest
    fault = _reward_fault(trajectory)
    if fault is not None:
        return TrajectoryVerdict(Verdict.INVALID, lag, lag_in_flight, num_tokens, 0, fault)
    if lag <= max_lag:
        return TrajectoryVerdict(Verdict.TRAIN, lag, lag_in_flight, num_tokens, num_tokens)
    num_young = _num_trained_since(trajectory, current_version - max_lag) if stragglers == "mask" else 0
    if num_young == 0:
        return TrajectoryVerdict(Verdict.DROP, lag, lag_in_flight, num_tokens, 0, DropReason.STALE)
    verdict = Verdict.TRAIN if num_young == num_tokens else Verdict.MASK  # what is too old may not be trained anyway
    return TrajectoryVerdict(verdict, lag, lag_in_flight, num_tokens, num_young)


def _record_fault(trajectory: Trajectory, num_tokens: int) -> InvalidReason | None:
    if not layout_is_consistent(trajectory):
        return InvalidReason.LENGTH_MISMATCH
    if trajectory.finish_reason is FinishReason.ABORTED:
        return InvalidReason.ABORTED
    if num_tokens == 0:
        return InvalidReason.EMPTY
    if trajectory.loss_mask[0]:
        return InvalidReason.NO_CONTEXT
    fault = record_fault(trajectory)
    return None if fault is None else InvalidReason(fault.value)


def _version_fault(trajectory: Trajectory, num_tokens: int, current_version: int) -> InvalidReason | None:
    if _num_trained_since(trajectory, 0) != num_tokens:
        return InvalidReason.UNVERSIONED
    if any(span.version > current_version for span in trajectory.versions):
        return InvalidReason.FUTURE_VERSION
    return None


def _reward_fault(trajectory: Trajectory) -> InvalidReason | None:
    reward = trajectory.reward
    if reward is None:
        return InvalidReason.UNSCORED
    if reward.value is None:
        return InvalidReason.REWARD
    return None if math.isfinite(reward.value) else InvalidReason.NON_FINITE_REWARD


def _num_trained_since(trajectory: Trajectory, version: int) -> int:
    """Tokens of the loss mask in spans whose kv_version is at least `version`."""
    mask = trajectory.loss_mask
    return sum(int(np.count_nonzero(mask[s.start : s.end])) for s in trajectory.versions if s.kv_version >= version)


def oldest_version(group: TrajectoryGroup) -> int:
    """Oldest version that any sampled token of the group depends on; `started_version` if it has none."""
    versions = [trajectory.oldest_version for trajectory in group.trajectories]
    return min((version for version in versions if version is not None), default=group.started_version)


def must_wait_for(
    in_flight: Mapping[str, int],
    arrived: Iterable[int],
    *,
    current_version: int,
    max_lag: int,
    groups_per_step: int,
    steps: int = 1,
) -> tuple[str, ...]:
    """Ids of the started groups for which a batch at `current_version` must wait, oldest first; empty: compose it now.

    in_flight: task id → version that it started at, of groups that have not arrived (in an engine, unscored or queued).
    arrived: oldest version of each group that could be drawn; the batch draws the oldest `groups_per_step × steps` of them.

    A group of version s trains at version s + max_lag at the latest (its deadline), and every step trains groups_per_step
    groups. So a batch may be composed only if what it leaves behind still fits: after it the trainer is at version n, and of
    what is left, groups with a deadline of at most d must not be more than (d − n + 1) × groups_per_step, for every d.

    Example: max_lag 1, 2 groups per step, the trainer at version 3. x and y, of version 3, have arrived; a (started at 2) and
    b (at 3) are in flight. A step on x and y would leave a behind, and at version 4 it is too old: the step waits for a. When
    a has arrived, the step trains a and x and leaves y and b, both of version 3: they fit into the step at version 4.

    It never waits in vain: not for a group that is too old already, and not where the batch is full of groups that are at
    least as old. Admission makes the condition reachable: when a task starts at s, no more than (s + max_lag + 1) ×
    groups_per_step groups were issued and not discarded, so once those of version ≤ s have arrived, oldest first fits them all.
    Tasks that have not started yet need no entry in `in_flight`, for the same reason: they start at s ≥ the oldest served
    version, and all that is untrained fits into the steps up to s + max_lag.
    """
    wanted = groups_per_step * steps
    drawn = sorted(arrived)[:wanted]
    newest_drawn = drawn[-1] if len(drawn) == wanted else None
    savable = sorted((version, task_id) for task_id, version in in_flight.items() if version >= current_version - max_lag)
    blocking = 0
    for number, (version, _) in enumerate(savable, start=1):
        if newest_drawn is not None and newest_drawn <= version:
            break
        room = max(0, version + max_lag + 1 - (current_version + steps)) * groups_per_step
        if number > room:
            blocking = number
    return tuple(task_id for _, task_id in savable[:blocking])
