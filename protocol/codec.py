"""Messages to bytes and back: msgpack maps with raw arrays, every field named, typed and checked in both directions.

A frame is `{"schema": SCHEMA_VERSION, "kind": "prompt_task" | "trajectory_group", "body": {...}}`, the bodies maps from field
name to value. See docs/wire-protocol.md.

Two ways lead to the same bytes. The fast one (msgspec, in C) knows every field and its type, and takes messages that are
exactly right. Everything else goes field by field through `checked_codec`, which explains or accepts it.

What cannot be true (lengths that differ, a span outside its tokens) is refused. What is merely bad (NaN logprobs, nothing
sampled) passes: the trainer quarantines it with a reason instead of losing it.
"""

from __future__ import annotations

from typing import Any, Literal

import msgspec
import numpy as np

from protocol.checked_codec import (
    FLOAT32,
    GROUP_KIND,
    INT32,
    TASK_KIND,
    UINT8,
    check_task,
    check_trajectory,
    decode_checked,
    encode_checked,
    require_array,
)
from protocol.errors import CodecError
from protocol.messages import SCHEMA_VERSION, Message, PromptTask, Trajectory, TrajectoryGroup
from protocol.packing import array_code, pack, read_array, unpack
from protocol.records import each, under

__all__ = ["decode", "decode_group", "decode_task", "encode", "pack", "unpack"]

_SMALL_BYTES = 2**15


# -- public ------------------------------------------------------------------------------------------------------
def encode(message: Message) -> bytes:
    """The message's frame. Raises: CodecError naming the field."""
    try:
        if isinstance(message, TrajectoryGroup):
            _check_group(message)
            return _encoder.encode(_GroupFrame(SCHEMA_VERSION, "trajectory_group", message))
        if isinstance(message, PromptTask):
            check_task(message)
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
class _TaskFrame(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    schema: Literal[1]
    kind: Literal["prompt_task"]
    body: PromptTask


class _GroupFrame(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    schema: Literal[1]
    kind: Literal["trajectory_group"]
    body: TrajectoryGroup


def _send_array(array: object) -> msgspec.msgpack.Ext:
    """Called for what msgspec does not know itself; `_check_arrays` has seen every array."""
    if not isinstance(array, np.ndarray):
        raise TypeError(f"{type(array).__name__} cannot be sent")
    if array.nbytes <= _SMALL_BYTES:  # copying it costs less than making a view
        return msgspec.msgpack.Ext(array_code(array), array.tobytes())
    return msgspec.msgpack.Ext(array_code(array), np.ascontiguousarray(array).data.cast("B"))


def _read_ext(code: int, body: memoryview) -> Any:
    return read_array(code, body)


def _keep(annotation: type, value: Any) -> Any:
    return value  # an array; `_check_arrays` compares its dtype with the field's


_encoder = msgspec.msgpack.Encoder(enc_hook=_send_array)
_task_decoder = msgspec.msgpack.Decoder(_TaskFrame, ext_hook=_read_ext, dec_hook=_keep)
_group_decoder = msgspec.msgpack.Decoder(_GroupFrame, ext_hook=_read_ext, dec_hook=_keep)
_NOT_TAKEN = (msgspec.MsgspecError, CodecError, TypeError, ValueError, OverflowError, RecursionError)
_GROUP_HEAD, _TASK_HEAD = (
    msgspec.msgpack.encode({"schema": SCHEMA_VERSION, "kind": kind, "body": None})[:-1] for kind in (GROUP_KIND, TASK_KIND)
)


def _decode_task(data: bytes) -> Message:
    try:
        task = _task_decoder.decode(data).body
    except _NOT_TAKEN:
        return decode_checked(data)
    under(TASK_KIND, check_task, task)
    return task


def _decode_group(data: bytes) -> Message:
    try:
        group = _group_decoder.decode(data).body
    except _NOT_TAKEN:
        return decode_checked(data)
    under(GROUP_KIND, _check_group, group)
    return group


def _check_group(group: TrajectoryGroup) -> None:
    under("task", check_task, group.task)
    each("trajectories", _check_trajectory, group.trajectories)


def _check_trajectory(t: Trajectory) -> None:
    require_array(t.token_ids, INT32, "token_ids")
    require_array(t.loss_mask, UINT8, "loss_mask")
    require_array(t.behavior_logprobs, FLOAT32, "behavior_logprobs")
    check_trajectory(t)
