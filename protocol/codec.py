"""Messages to bytes and back: msgpack maps with raw arrays, every field named, typed and checked in both directions.

A frame is `{"schema": SCHEMA_VERSION, "kind": "prompt_task" | "trajectory_group", "body": {...}}`, the bodies maps from field
name to value. See docs/wire-protocol.md.

Two ways lead to the same bytes. The fast one (msgspec, in C) takes messages that are exactly right: the sender compares the
types first; the reader decodes into the dataclasses and encodes again, and only equal bytes are taken, so nothing unknown,
doubled or left over passes. Everything else goes field by field through `checked_codec`, which explains or accepts it.

What cannot be true (lengths that differ, a span outside its tokens) is refused. What is merely bad (NaN logprobs, nothing
sampled) passes: the trainer quarantines it with a reason instead of losing it.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

import msgspec
import numpy as np

from protocol.checked_codec import (
    FLOAT32,
    GROUP,
    GROUP_KIND,
    INT32,
    REWARD,
    SAMPLING,
    SPAN,
    TASK,
    TASK_KIND,
    TIMINGS,
    TRAJECTORY,
    TURN,
    UINT8,
    check_task,
    check_trajectory,
    decode_checked,
    encode_checked,
)
from protocol.errors import CodecError
from protocol.messages import SCHEMA_VERSION, FinishReason, Message, PromptTask, Trajectory, TrajectoryGroup
from protocol.packing import array_code, pack, read_array, unpack
from protocol.records import each, under

__all__ = ["decode", "decode_group", "decode_task", "encode", "pack", "unpack"]

_DTYPES = (INT32, UINT8, FLOAT32)
_INTS, _FLOATS, _REASONS = {int}, {float}, {FinishReason}


# -- public ------------------------------------------------------------------------------------------------------
def encode(message: Message) -> bytes:
    """The message's frame. Raises: CodecError naming the field."""
    try:
        if isinstance(message, TrajectoryGroup) and _group_fits(message):
            return _encoder.encode(_GroupFrame(SCHEMA_VERSION, "trajectory_group", message))
        if isinstance(message, PromptTask) and _task_fits(message):
            return _encoder.encode(_TaskFrame(SCHEMA_VERSION, "prompt_task", message))
    except _NOT_TAKEN:
        pass  # explained below
    return encode_checked(message)


def decode(payload: bytes | memoryview) -> Message:
    """The frame's message; its arrays are read-only views. Raises: CodecError naming what and where."""
    data = payload if isinstance(payload, bytes) else bytes(payload)
    if data.startswith(_GROUP_HEAD):
        return _decode_group(data)
    if data.startswith(_TASK_HEAD):
        return _decode_task(data)
    return decode_checked(data)


def decode_task(payload: bytes | memoryview) -> PromptTask:
    """Like `decode`; refuses everything but a PromptTask."""
    message = decode(payload)
    if not isinstance(message, PromptTask):
        raise CodecError(f"expected a {TASK_KIND}, got a {GROUP_KIND}")
    return message


def decode_group(payload: bytes | memoryview) -> TrajectoryGroup:
    """Like `decode`; refuses everything but a TrajectoryGroup."""
    message = decode(payload)
    if not isinstance(message, TrajectoryGroup):
        raise CodecError(f"expected a {GROUP_KIND}, got a {TASK_KIND}")
    return message


# -- the fast way ------------------------------------------------------------------------------------------------
@dataclass(frozen=True, slots=True)
class _TaskFrame:
    schema: Literal[1]
    kind: Literal["prompt_task"]
    body: PromptTask


@dataclass(frozen=True, slots=True)
class _GroupFrame:
    schema: Literal[1]
    kind: Literal["trajectory_group"]
    body: TrajectoryGroup


def _send_array(array: object) -> msgspec.msgpack.Ext:
    """Called for what msgspec does not know itself; `_arrays_fit` has seen every array."""
    if not isinstance(array, np.ndarray):
        raise TypeError(f"{type(array).__name__} cannot be sent")
    return msgspec.msgpack.Ext(array_code(array), np.ascontiguousarray(array).data.cast("B") if array.size else b"")


def _read_ext(code: int, body: memoryview) -> Any:
    return read_array(code, body)


def _keep(annotation: type, value: Any) -> Any:
    return value  # an array; `_arrays_fit` compares its dtype with the field's


_encoder = msgspec.msgpack.Encoder(enc_hook=_send_array)
_task_decoder = msgspec.msgpack.Decoder(_TaskFrame, ext_hook=_read_ext, dec_hook=_keep)
_group_decoder = msgspec.msgpack.Decoder(_GroupFrame, ext_hook=_read_ext, dec_hook=_keep)
_NOT_TAKEN = (msgspec.MsgspecError, CodecError, TypeError, ValueError, OverflowError, RecursionError)
_GROUP_HEAD, _TASK_HEAD = (
    msgspec.msgpack.encode({"schema": SCHEMA_VERSION, "kind": kind, "body": None})[:-1] for kind in (GROUP_KIND, TASK_KIND)
)


def _decode_task(data: bytes) -> Message:
    try:
        frame = _task_decoder.decode(data)
        if _encoder.encode(frame) != data:
            return decode_checked(data)
    except _NOT_TAKEN:
        return decode_checked(data)
    under(TASK_KIND, check_task, frame.body)
    return frame.body


def _decode_group(data: bytes) -> Message:
    try:
        frame = _group_decoder.decode(data)
        if not all(map(_arrays_fit, frame.body.trajectories)) or _encoder.encode(frame) != data:
            return decode_checked(data)
    except _NOT_TAKEN:
        return decode_checked(data)
    under(GROUP_KIND, _check_group, frame.body)
    return frame.body


def _check_group(group: TrajectoryGroup) -> None:
    under("task", check_task, group.task)
    each("trajectories", check_trajectory, group.trajectories)


# -- may this message be sent as it is? `encode_checked` says why not ----------------------------------------------
def _task_fits(task: PromptTask) -> bool:
    if not TASK.fits(task) or task.columns.__class__ is not dict:
        return False
    check_task(task)
    return True


def _group_fits(group: TrajectoryGroup) -> bool:
    return GROUP.fits(group) and _task_fits(group.task) and all(map(_trajectory_fits, group.trajectories))


def _trajectory_fits(t: Trajectory) -> bool:
    fits = (
        TRAJECTORY.fits(t)
        and _arrays_fit(t)
        and SAMPLING.fits(t.sampling)
        and TIMINGS.fits(t.timings)
        and {*map(type, t.sampling.stop_token_ids)} <= _INTS
        and all(map(SPAN.fits, t.versions))
        and all(map(TURN.fits, t.turns))
        and {type(t.finish_reason), *[type(turn.finish_reason) for turn in t.turns]} == _REASONS
        and (t.reward is None or (REWARD.fits(t.reward) and {*map(type, t.reward.components.values())} <= _FLOATS))
    )
    if fits:
        check_trajectory(t)
    return fits


def _arrays_fit(t: Trajectory) -> bool:
    for array, dtype in zip((t.token_ids, t.loss_mask, t.behavior_logprobs), _DTYPES, strict=True):
        if array.__class__ is not np.ndarray or array.ndim != 1 or array.dtype != dtype:
            return False
    return True
