"""Messages to maps and back, field by field, in Python: exact about what is wrong and where.

`codec` sends and reads what is right by a faster way; whatever that way does not take comes here, to be explained or accepted.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import numpy as np
from msgspec.structs import replace

from protocol.errors import CodecError
from protocol.messages import (
    SCHEMA_VERSION,
    FinishReason,
    Message,
    PromptTask,
    Reward,
    SamplingParams,
    Timings,
    Trajectory,
    TrajectoryGroup,
    Turn,
    UInt8Array,
)
from protocol.packing import check_json, nearest, pack_array, pack_unchecked, unpack_unchecked
from protocol.records import (
    FieldError,
    Record,
    anything,
    below,
    each,
    integer,
    mapping,
    number,
    optional_number,
    optional_text,
    sequence,
    shown,
    text,
    under,
)
from protocol.versions import VersionSpan

INT32, FLOAT32, UINT8 = np.dtype("<i4"), np.dtype("<f4"), np.dtype("u1")
_SHORT_TOKENS = 4096
_FLOATS, _STRINGS = {float}, {str}
_FINISH = {reason.value: reason for reason in FinishReason}
TASK_KIND, GROUP_KIND = "prompt_task", "trajectory_group"

# Names and order are the dataclasses' own (a test compares them).
FRAME = Record(schema=integer, kind=text, body=anything)
TASK = Record(
    run_id=text, task_id=text, source=text, data_epoch=integer, row=integer, repeat=integer, prompt=anything, columns=anything,
    environment=text, group_size=integer, seed=integer, temperature=number, max_new_tokens=integer, issued_at_s=number,
)  # fmt: skip
SPAN = Record(start=integer, end=integer, version=integer, kv_version=integer)
TURN = Record(start=integer, end=integer, finish_reason=anything)
GROUP = Record(task=anything, trajectories=anything, started_version=integer, published_at_s=number)
TRAJECTORY = Record(
    token_ids=anything, loss_mask=anything, behavior_logprobs=anything, versions=anything, sampling=anything, turns=anything,
    finish_reason=anything, timings=anything, worker_id=text, engine_id=text, reward=anything,
)  # fmt: skip
SAMPLING = Record(
    temperature=number, max_new_tokens=integer, seed=integer, stop_token_ids=anything, top_p=number, top_k=integer
)  # fmt: skip
TIMINGS = Record(
    started_at_s=number, finished_at_s=number, queued_s=number, generate_s=number, environment_s=number, reward_s=number
)  # fmt: skip
REWARD = Record(value=optional_number, components=mapping, invalid_reason=optional_text, error_type=optional_text)


def encode_checked(message: Message) -> bytes:
    """The message's frame. Raises: CodecError naming the first field that cannot be sent."""
    if isinstance(message, TrajectoryGroup):
        kind, body = GROUP_KIND, under(GROUP_KIND, _pack_group, message)
    elif isinstance(message, PromptTask):
        kind, body = TASK_KIND, under(TASK_KIND, _pack_task, message)
    else:
        raise CodecError(f"{type(message).__name__} is not a message; messages: PromptTask, TrajectoryGroup")
    return pack_unchecked({"schema": SCHEMA_VERSION, "kind": kind, "body": body})


def decode_checked(payload: bytes | memoryview) -> Message:
    """The frame's message. Raises: CodecError naming the first thing that is wrong, and where."""
    frame = unpack_unchecked(payload)
    if frame.__class__ is not dict:
        raise CodecError(f"frame is a {type(frame).__name__}, not a map of schema, kind and body")
    if "schema" in frame and not (frame["schema"].__class__ is int and frame["schema"] == SCHEMA_VERSION):
        raise CodecError(
            f"schema version {frame['schema']!r} is not known; this reader knows {SCHEMA_VERSION}: run one release everywhere"
        )
    _, kind, body = FRAME.read(frame)
    if kind == GROUP_KIND:
        return under(kind, _read_group, body)
    if kind == TASK_KIND:
        return under(kind, _read_task, body)
    raise CodecError(f"unknown kind {kind!r}{nearest(kind, (TASK_KIND, GROUP_KIND))}")


# -- to maps -----------------------------------------------------------------------------------------------------
def _pack_task(task: PromptTask) -> dict[str, Any]:
    body = TASK.pack(task)
    body["prompt"] = task.prompt if isinstance(task.prompt, str) else list(task.prompt)
    body["columns"] = dict(task.columns)
    check_task(task)
    return body


def _pack_group(group: TrajectoryGroup) -> dict[str, Any]:
    body = GROUP.pack(group)
    body["task"] = under("task", _pack_task, group.task)
    body["trajectories"] = each("trajectories", _pack_trajectory, group.trajectories)
    return body


def _pack_trajectory(t: Trajectory) -> dict[str, Any]:
    at = "token_ids"  # which field is in hand, for the path of an error; cheaper than a call per field
    try:
        token_ids = pack_array(t.token_ids, INT32)
        at = "loss_mask"
        loss_mask = pack_array(t.loss_mask, UINT8)
        at = "behavior_logprobs"
        behavior_logprobs = pack_array(t.behavior_logprobs, FLOAT32)
        at = "sampling"
        sampling = _pack_sampling(t.sampling)
        at = "timings"
        timings = TIMINGS.pack(t.timings)
        at = "reward"
        reward = None if t.reward is None else _pack_reward(t.reward)
    except CodecError as error:
        raise below(at, error) from None
    check_trajectory(t)
    return {
        "token_ids": token_ids,
        "loss_mask": loss_mask,
        "behavior_logprobs": behavior_logprobs,
        "versions": each("versions", SPAN.pack, t.versions),
        "sampling": sampling,
        "turns": each("turns", _pack_turn, t.turns),
        "finish_reason": _finish_reason(t.finish_reason).value,
        "timings": timings,
        "worker_id": text(t.worker_id, "worker_id"),
        "engine_id": text(t.engine_id, "engine_id"),
        "reward": reward,
    }


def _pack_turn(turn: Turn) -> dict[str, Any]:
    return TURN.pack(turn) | {"finish_reason": _finish_reason(turn.finish_reason).value}


def _pack_sampling(sampling: SamplingParams) -> dict[str, Any]:
    return {
        "temperature": number(sampling.temperature, "temperature"),
        "max_new_tokens": integer(sampling.max_new_tokens, "max_new_tokens"),
        "seed": integer(sampling.seed, "seed"),
        "stop_token_ids": [integer(token_id, "stop_token_ids") for token_id in sampling.stop_token_ids],
        "top_p": number(sampling.top_p, "top_p"),
        "top_k": integer(sampling.top_k, "top_k"),
    }


def _pack_reward(reward: Reward) -> dict[str, Any]:
    return {
        "value": optional_number(reward.value, "value"),
        "components": _components(reward.components),
        "invalid_reason": optional_text(reward.invalid_reason, "invalid_reason"),
        "error_type": optional_text(reward.error_type, "error_type"),
    }


# -- from maps ---------------------------------------------------------------------------------------------------
def _read_task(body: Any) -> PromptTask:
    task = PromptTask(*TASK.read(body))
    mapping(task.columns, "columns")
    if not isinstance(task.prompt, str):
        task = replace(task, prompt=tuple(sequence(task.prompt, "prompt")))
    check_task(task)
    return task


def _read_group(body: Any) -> TrajectoryGroup:
    task, trajectories, started_version, published_at_s = GROUP.read(body)
    return TrajectoryGroup(
        under("task", _read_task, task),
        tuple(each("trajectories", _read_trajectory, sequence(trajectories, "trajectories"))),
        started_version,
        published_at_s,
    )


def _read_trajectory(body: Any) -> Trajectory:
    (token_ids, loss_mask, logprobs, versions, sampling, turns, finish_reason, timings, worker_id, engine_id, reward) = (
        TRAJECTORY.read(body)
    )
    at = "sampling"  # which field is in hand, for the path of an error; cheaper than a call per field
    try:
        sampling = _read_sampling(sampling)
        at = "timings"
        timings = Timings(*TIMINGS.read(timings))
        at = "reward"
        reward = None if reward is None else _read_reward(reward)
    except CodecError as error:
        raise below(at, error) from None
    trajectory = Trajectory(
        require_array(token_ids, INT32, "token_ids"),
        require_array(loss_mask, UINT8, "loss_mask"),
        require_array(logprobs, FLOAT32, "behavior_logprobs"),
        tuple(each("versions", _read_span, sequence(versions, "versions"))),
        sampling,
        tuple(each("turns", _read_turn, sequence(turns, "turns"))),
        _finish_reason(finish_reason),
        timings,
        worker_id,
        engine_id,
        reward,
    )
    check_trajectory(trajectory)
    return trajectory


def _read_span(body: Any) -> VersionSpan:
    try:
        return VersionSpan(*SPAN.read(body))
    except ValueError as error:
        raise CodecError(str(error)) from error


def _read_turn(body: Any) -> Turn:
    start, end, finish_reason = TURN.read(body)
    return Turn(start, end, _finish_reason(finish_reason))


def _read_sampling(body: Any) -> SamplingParams:
    temperature, max_new_tokens, seed, stop_token_ids, top_p, top_k = SAMPLING.read(body)
    stops = tuple([integer(token_id, "stop_token_ids") for token_id in sequence(stop_token_ids, "stop_token_ids")])
    return SamplingParams(temperature, max_new_tokens, seed, stops, top_p, top_k)


def _read_reward(body: Any) -> Reward:
    value, components, invalid_reason, error_type = REWARD.read(body)
    try:
        return Reward(value, _components(components), invalid_reason, error_type)
    except ValueError as error:
        raise CodecError(str(error)) from error


def _components(components: Mapping[str, float]) -> dict[str, float]:
    if {*map(type, components.values())} <= _FLOATS and {*map(type, components)} <= _STRINGS:
        return dict(components)
    return {text(name, "components"): number(value, f"components.{name}") for name, value in components.items()}


def require_array(value: Any, dtype: np.dtype[Any], name: str) -> Any:
    """`value`, a 1-D array of `dtype`. Raises: CodecError."""
    if value.__class__ is not np.ndarray:
        raise FieldError(name, f"expected an array of {dtype.name}, got {shown(value)}")
    if value.dtype != dtype:
        raise FieldError(name, f"dtype {value.dtype.name} is not {dtype.name}")
    return value


def _finish_reason(value: Any) -> FinishReason:
    reason = _FINISH.get(value) if isinstance(value, str) else None
    if reason is None:
        raise FieldError("finish_reason", f"unknown {shown(value)}{nearest(value, _FINISH)}")
    return reason


# -- what must hold beside the types ---------------------------------------------------------------------------------
def check_task(task: PromptTask) -> None:
    """Raise CodecError unless prompt and columns are JSON."""
    if not isinstance(task.prompt, str):
        for index, chat_message in enumerate(task.prompt):
            check_json(mapping(chat_message, f"prompt[{index}]"), f"prompt[{index}]")
    check_json(dict(task.columns), "columns")


def check_trajectory(t: Trajectory) -> None:
    """Raise CodecError unless lengths agree, spans cover exactly the sampled tokens, and only sampled tokens are trained."""
    length, mask = len(t.token_ids), t.loss_mask
    if len(mask) != length or len(t.behavior_logprobs) != length:
        raise CodecError(
            f"token_ids, loss_mask and behavior_logprobs must have one length; "
            f"they have {length}, {len(mask)} and {len(t.behavior_logprobs)}"
        )
    one_turn = _single_range(t, length)
    if one_turn is not None:
        _check_mask(mask, [one_turn])
        return
    sampled = _merged("turns", t.turns, length)
    covered = _merged("versions", t.versions, length)
    if sampled != covered:
        raise FieldError(
            "versions", f"cover tokens {_ranges(covered)}, but turns sampled {_ranges(sampled)}; they must be equal"
        )
    _check_mask(mask, sampled)


def _single_range(t: Trajectory, length: int) -> tuple[int, int] | None:
    """The usual case, quickly: one turn, covered by spans that follow each other. None: look closer."""
    if len(t.turns) != 1 or not t.versions:
        return None
    turn = t.turns[0]
    position = start = turn.start
    for span in t.versions:
        if span.start != position:
            return None
        position = span.end
    return (start, position) if position == turn.end <= length else None


def _check_mask(mask: UInt8Array, sampled: list[tuple[int, int]]) -> None:
    """0 or 1 everywhere, 1 only where sampled. Short masks as bytes: numpy costs more per call than the work."""
    if len(mask) <= _SHORT_TOKENS:
        flags = mask.tobytes()
        if flags.translate(None, b"\x00\x01"):
            raise FieldError("loss_mask", f"holds {max(flags)}; it may hold 0 and 1 only")
        outside, last = 0, 0
        for start, end in sampled:
            outside += flags.count(1, last, start)
            last = end
        outside += flags.count(1, last)
    else:
        if mask.max() > 1:
            raise FieldError("loss_mask", f"holds {mask.max()}; it may hold 0 and 1 only")
        outside = int(np.count_nonzero(mask)) - sum([int(np.count_nonzero(mask[start:end])) for start, end in sampled])
    if outside:
        raise FieldError("loss_mask", f"trains {outside} tokens outside the sampled ranges {_ranges(sampled)}")


def _merged(name: str, parts: Iterable[Turn | VersionSpan], length: int) -> list[tuple[int, int]]:
    """The parts' token ranges, empty ones left out and touching ones joined; they must ascend inside [0, length)."""
    merged: list[tuple[int, int]] = []
    last = 0
    for index, part in enumerate(parts):
        start, end = part.start, part.end
        if not last <= start <= end <= length:
            raise FieldError(
                f"{name}[{index}]",
                f"[{start}, {end}) must lie in [{last}, {length}) "
                f"({name} ascend without overlap inside the {length} token_ids)",
            )
        if start < end:
            if merged and merged[-1][1] == start:
                start = merged.pop()[0]
            merged.append((start, end))
        last = end
    return merged


def _ranges(ranges: list[tuple[int, int]]) -> str:
    return " ".join(f"[{start}, {end})" for start, end in ranges) or "none"
