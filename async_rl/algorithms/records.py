"""What is wrong with a trajectory's record, as far as the record itself tells. Pure and torch-free.

Everything that is trained rests on these facts: what was sampled and what was not, under which version, with which logprob.
The first fault found is the verdict's reason; `explain` says it in words, with positions.
"""

from __future__ import annotations

from enum import StrEnum

import numpy as np
import numpy.typing as npt

from protocol.messages import Trajectory

POSITIVE_LOGPROB = 1e-3
"""A logprob above this is none (rounding may leave a little above 0)."""


class RecordFault(StrEnum):
    """Why a trajectory's record cannot be trusted. The values are those of `staleness.InvalidReason`."""

    LENGTH_MISMATCH = "length_mismatch"  # arrays, spans or turns do not fit each other
    TRAINED_OUTSIDE_TURNS = "trained_outside_turns"  # a token of the prompt, a tool or the environment is in the loss mask
    STOP_TOKEN = "stop_token"  # a stop token is untrained, or inside a turn
    NON_FINITE_LOGPROB = "non_finite_logprob"  # NaN or infinity at a trained token
    POSITIVE_LOGPROB = "positive_logprob"  # a probability above 1


def layout_is_consistent(trajectory: Trajectory) -> bool:
    """Arrays of one length; spans ascend without overlap; spans and turns end within the sequence."""
    length = len(trajectory.token_ids)
    end = 0
    for span in trajectory.versions:
        if span.start < end or span.end > length:
            return False
        end = span.end
    same_length = length == len(trajectory.loss_mask) == len(trajectory.behavior_logprobs)
    return same_length and all(turn.end <= length for turn in trajectory.turns)


def outside_turns(trajectory: Trajectory) -> npt.NDArray[np.int64]:
    """Positions that are trained although no turn sampled them."""
    sampled = np.zeros(len(trajectory.token_ids), dtype=np.bool_)
    for turn in trajectory.turns:
        sampled[turn.start : turn.end] = True
    return np.flatnonzero((trajectory.loss_mask != 0) & ~sampled)


def bad_stops(trajectory: Trajectory) -> list[int]:
    """Positions of stop tokens that are not where a sampled stop token is, last of its turn, or that are not trained there.

    A turn without one ended by the environment's word, or at its limit.
    """
    stops = trajectory.sampling.stop_token_ids
    if not stops:
        return []
    bad: list[int] = []
    for turn in trajectory.turns:
        found = turn.start + np.flatnonzero(np.isin(trajectory.token_ids[turn.start : turn.end], stops))
        bad += [int(position) for position in found if position != turn.end - 1]
        if len(found) and int(found[-1]) == turn.end - 1 and not _is_trained_like_its_turn(trajectory, turn.end - 1):
            bad.append(turn.end - 1)
    return bad


def _is_trained_like_its_turn(trajectory: Trajectory, position: int) -> bool:
    """A stop token is trained if the token before it is (a masked turn has it masked too)."""
    return bool(trajectory.loss_mask[position]) or position == 0 or not trajectory.loss_mask[position - 1]


def record_fault(trajectory: Trajectory) -> RecordFault | None:
    """The first fault of the record, in the order of RecordFault; None: none."""
    if not layout_is_consistent(trajectory):
        return RecordFault.LENGTH_MISMATCH
    if outside_turns(trajectory).size:
        return RecordFault.TRAINED_OUTSIDE_TURNS
    if bad_stops(trajectory):
        return RecordFault.STOP_TOKEN
    trained = trajectory.behavior_logprobs[trajectory.loss_mask != 0]
    if not np.isfinite(trained).all():
        return RecordFault.NON_FINITE_LOGPROB
    if trained.size and float(trained.max()) > POSITIVE_LOGPROB:
        return RecordFault.POSITIVE_LOGPROB
    return None


def explain(trajectory: Trajectory, fault: RecordFault) -> str:
    """The fault in words: what is wrong, where, and what usually causes it."""
    if fault is RecordFault.LENGTH_MISMATCH:
        return (
            f"{len(trajectory.token_ids)} token ids, {len(trajectory.loss_mask)} mask values, "
            f"{len(trajectory.behavior_logprobs)} logprobs, {len(trajectory.turns)} turns and "
            f"{len(trajectory.versions)} version spans do not fit each other"
        )
    if fault is RecordFault.TRAINED_OUTSIDE_TURNS:
        where = _positions(outside_turns(trajectory).tolist())
        return (
            f"tokens of the prompt, a tool or the environment are in the loss mask, at {where}: the policy did not sample them"
        )
    if fault is RecordFault.STOP_TOKEN:
        where = _positions(bad_stops(trajectory))
        return f"stop tokens at {where} are untrained, or inside a turn"
    values, trained = trajectory.behavior_logprobs, trajectory.loss_mask != 0
    if fault is RecordFault.NON_FINITE_LOGPROB:
        where = _positions(np.flatnonzero(trained & ~np.isfinite(values)).tolist())
        return f"behavior logprobs at {where} are not finite: the engine computed NaN, or a token that it could not sample"
    where = _positions(np.flatnonzero(trained & (values > POSITIVE_LOGPROB)).tolist())
    return f"behavior logprobs at {where} are above 0: they are no logprobs (raw logits, or losses with their sign turned)"


def _positions(positions: list[int]) -> str:
    shown = ", ".join(str(position) for position in positions[:5])
    return f"position {shown}" if len(positions) == 1 else f"positions {shown}" + (" …" if len(positions) > 5 else "")
