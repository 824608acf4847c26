from __future__ import annotations

import contextlib
import pickle
from pathlib import Path
from typing import Any

import msgpack
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec.structs import fields, replace

from protocol import checked_codec
from protocol.checked_codec import decode_checked, encode_checked
from protocol.codec import decode, decode_group, decode_task, encode, pack, unpack
from protocol.errors import CodecError
from protocol.messages import FinishReason, PromptTask, Reward, SamplingParams, Timings, Trajectory, TrajectoryGroup, Turn
from protocol.packing import ARRAY_DTYPES
from protocol.versions import VersionSpan, spans_from_tokens

TASK = PromptTask(
    run_id="run", task_id="sort:0:7:0", source="sort", data_epoch=0, row=7, repeat=0, prompt="402913>",
    columns={"answer": "012349", "weights": [1, 2.5, None, True], "nested": {"a": {"b": []}}}, environment="sort_digits",
    group_size=2, seed=2**62, temperature=1.0, max_new_tokens=8, issued_at_s=1.5,
)  # fmt: skip


SPAN = {"start": 3, "end": 5, "version": 4, "kv_version": 4}
TURN = {"start": 3, "end": 5, "finish_reason": "stop"}
REWARD = {"value": 1.0, "components": {}, "invalid_reason": None, "error_type": None}


def _trajectory(**changes: Any) -> Trajectory:
    """Eight tokens: prompt 0-2, sampled 3-4, observed 5, sampled 6-7 (of which 7 is not trained)."""
    whole = Trajectory(
        token_ids=np.array([5, 6, 7, 10, 11, 12, 13, 2], np.int32),
        loss_mask=np.array([0, 0, 0, 1, 1, 0, 1, 0], np.uint8),
        behavior_logprobs=np.array([0, 0, 0, -0.5, -1.5, 0, -2.5, -3.5], np.float32),
        versions=(VersionSpan(3, 5, 4, 3), VersionSpan(6, 8, 5, 5)),
        sampling=SamplingParams(0.7, 8, 99, (2, 3), 0.9, 40),
        turns=(Turn(3, 5, FinishReason.LENGTH), Turn(6, 8, FinishReason.STOP)),
        finish_reason=FinishReason.STOP,
        timings=Timings(1.0, 2.0, 0.1, 0.2, 0.3, 0.4),
        worker_id="w0",
        engine_id="w0/0",
        reward=Reward(0.5, {"exact": 1.0, "format": 0.0}),
    )
    return replace(whole, **changes)


def _group(*trajectories: Trajectory) -> TrajectoryGroup:
    return TrajectoryGroup(TASK, trajectories or (_trajectory(),), started_version=3, published_at_s=9.25)


def _assert_same(a: Trajectory, b: Trajectory) -> None:
    for field in fields(Trajectory):
        left, right = getattr(a, field.name), getattr(b, field.name)
        if isinstance(left, np.ndarray):
            assert left.dtype == right.dtype
            assert left.tobytes() == right.tobytes()  # bit for bit, NaN included
        else:
            assert left == right, field.name


def _frame(group: TrajectoryGroup | None = None) -> dict[str, Any]:
    frame: dict[str, Any] = msgpack.unpackb(encode(group or _group()), ext_hook=msgpack.ExtType)
    return frame


def _body_of(**changes: Any) -> bytes:
    """A group's frame whose only trajectory has some raw fields replaced (None removes nothing; `...` removes)."""
    frame = _frame()
    trajectory = frame["body"]["trajectories"][0]
    for name, value in changes.items():
        if value is ...:
            del trajectory[name]
        else:
            trajectory[name] = value
    return bytes(msgpack.packb(frame))


# -- round trips -----------------------------------------------------------------------------------------------------
def test_a_group_comes_back_whole() -> None:
    invalid = _trajectory(reward=Reward.invalid("ZeroDivisionError: 1/0", "ZeroDivisionError"))
    unscored = _trajectory(reward=None)
    sent = _group(_trajectory(), invalid, unscored)
    got = decode_group(encode(sent))
    assert (got.task, got.started_version, got.published_at_s) == (TASK, 3, 9.25)
    assert len(got.trajectories) == 3
    for a, b in zip(sent.trajectories, got.trajectories, strict=True):
        _assert_same(a, b)


@pytest.mark.parametrize(
    "prompt", ["", "text ✓", ({"role": "user", "content": "hi"}, {"role": "tool", "content": [{"x": 1}]}), ()]
)
def test_a_task_comes_back_whole(prompt: Any) -> None:
    task = replace(TASK, prompt=prompt)
    assert decode_task(encode(task)) == task


def test_arrays_are_read_only_views() -> None:
    got = decode_group(encode(_group())).trajectories[0]
    for array in (got.token_ids, got.loss_mask, got.behavior_logprobs):
        assert not array.flags.writeable
        assert not array.flags.owndata
        with pytest.raises(ValueError, match="read-only"):
            array[0] = 1


def test_a_memoryview_is_read_like_bytes() -> None:
    assert decode_task(memoryview(b"xx" + encode(TASK))[2:]) == TASK


def test_a_strided_array_is_sent_as_its_values() -> None:
    every_second = np.arange(16, dtype=np.int32)[::2]
    got = decode_group(encode(_group(_trajectory(token_ids=every_second))))
    assert got.trajectories[0].token_ids.tolist() == [0, 2, 4, 6, 8, 10, 12, 14]


def test_numpy_scalars_are_sent_as_numbers() -> None:
    task = decode_task(encode(replace(TASK, row=np.int64(3), temperature=np.float32(0.5))))  # type: ignore[arg-type]  # on purpose
    assert (task.row, type(task.row), task.temperature, type(task.temperature)) == (3, int, 0.5, float)


def test_what_is_merely_bad_survives_for_the_trainer_to_quarantine() -> None:
    logprobs = np.array([0, 0, 0, np.nan, -np.inf, 0, np.inf, -3.5], np.float32)
    nothing_sampled = _trajectory(
        loss_mask=np.zeros(8, np.uint8),
        versions=(),
        turns=(Turn(8, 8, FinishReason.ABORTED),),
        finish_reason=FinishReason.ABORTED,
    )
    no_turn = _trajectory(loss_mask=np.zeros(8, np.uint8), versions=(), turns=())
    no_token = replace(
        no_turn, token_ids=np.zeros(0, np.int32), loss_mask=np.zeros(0, np.uint8), behavior_logprobs=np.zeros(0, np.float32)
    )
    nan_reward = _trajectory(reward=Reward(float("nan"), {"x": float("inf")}))
    sent = _group(_trajectory(behavior_logprobs=logprobs), nothing_sampled, no_turn, no_token)
    for a, b in zip(sent.trajectories, decode_group(encode(sent)).trajectories, strict=True):
        _assert_same(a, b)
    reward = decode_group(encode(_group(nan_reward))).trajectories[0].reward
    assert reward is not None
    assert reward.value is not None
    assert np.isnan(reward.value)


@st.composite
def _trajectories(draw: st.DrawFn) -> Trajectory:
    """Any split of tokens into prompt, sampled turns and observations, with versions per token."""
    kinds = draw(st.lists(st.sampled_from(["sampled", "observed"]), max_size=40))
    positions = [index for index, kind in enumerate(kinds) if kind == "sampled"]
    versions = [draw(st.integers(0, 5)) for _ in positions]
    turns, start = [], None
    for index, kind in enumerate([*kinds, "observed"]):
        if kind == "sampled" and start is None:
            start = index
        elif kind == "observed" and start is not None:
            turns.append(Turn(start, index, draw(st.sampled_from(FinishReason))))
            start = None
    mask = np.array([int(kind == "sampled" and draw(st.booleans())) for kind in kinds], np.uint8)
    floats = st.floats(width=32, allow_nan=True, allow_infinity=True)
    return _trajectory(
        token_ids=np.array([draw(st.integers(0, 2**31 - 1)) for _ in kinds], np.int32),
        loss_mask=mask,
        behavior_logprobs=np.array([draw(floats) for _ in kinds], np.float32),
        versions=spans_from_tokens(positions, versions, versions),
        turns=tuple(turns),
    )


@settings(max_examples=60, deadline=None)
@given(_trajectories())
def test_both_ways_of_encoding_and_decoding_agree(trajectory: Trajectory) -> None:
    frame = encode(_group(trajectory))
    assert encode_checked(_group(trajectory)) == frame
    by_field = decode_checked(frame)
    assert isinstance(by_field, TrajectoryGroup)
    _assert_same(decode_group(frame).trajectories[0], by_field.trajectories[0])


@settings(max_examples=60, deadline=None)
@given(_trajectories())
def test_any_consistent_trajectory_comes_back_bit_for_bit(trajectory: Trajectory) -> None:
    _assert_same(trajectory, decode_group(encode(_group(trajectory))).trajectories[0])


def test_the_records_name_exactly_the_dataclasses_fields_in_order() -> None:
    for record, message in (
        (checked_codec.TASK, PromptTask), (checked_codec.GROUP, TrajectoryGroup), (checked_codec.TRAJECTORY, Trajectory),
        (checked_codec.SAMPLING, SamplingParams), (checked_codec.TIMINGS, Timings), (checked_codec.REWARD, Reward),
    ):  # fmt: skip
        assert record.names == tuple(field.name for field in fields(message))
    assert set(_frame()["body"]["trajectories"][0]) == {field.name for field in fields(Trajectory)}


# -- what cannot be true ---------------------------------------------------------------------------------------------
INCONSISTENT: list[tuple[dict[str, Any], str]] = [
    ({"loss_mask": np.zeros(7, np.uint8)}, r"one length; they have 8, 7 and 8"),
    ({"behavior_logprobs": np.zeros(9, np.float32)}, r"one length; they have 8, 8 and 9"),
    ({"versions": (VersionSpan(3, 5, 4, 4),)}, r"versions: cover tokens \[3, 5\), but turns sampled \[3, 5\) \[6, 8\)"),
    ({"versions": (VersionSpan(3, 8, 4, 4),)}, r"versions: cover tokens \[3, 8\)"),
    ({"versions": (VersionSpan(6, 8, 4, 4), VersionSpan(3, 5, 4, 4))}, r"versions\[1\]: \[3, 5\) must lie in \[8, 8\)"),
    ({"versions": (VersionSpan(3, 5, 4, 4), VersionSpan(6, 9, 4, 4))}, r"versions\[1\]: \[6, 9\) must lie in \[5, 8\)"),
    ({"turns": (Turn(3, 5, FinishReason.STOP), Turn(4, 8, FinishReason.STOP))}, r"turns\[1\]: \[4, 8\) must lie in \[5, 8\)"),
    ({"turns": (Turn(5, 3, FinishReason.STOP),)}, r"turns\[0\]: \[5, 3\)"),
    ({"turns": ()}, r"but turns sampled none"),
    ({"loss_mask": np.array([0, 0, 1, 1, 1, 0, 1, 0], np.uint8)}, r"loss_mask: trains 1 tokens outside the sampled"),
    ({"loss_mask": np.array([0, 0, 0, 2, 1, 0, 1, 0], np.uint8)}, r"loss_mask: holds 2"),
]  # fmt: skip


@pytest.mark.parametrize(("changes", "message"), INCONSISTENT)
def test_an_inconsistent_trajectory_is_refused_by_the_sender(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(CodecError, match=rf"trajectory_group\.trajectories\[1\].*{message}"):
        encode(_group(_trajectory(), _trajectory(**changes)))


@pytest.mark.parametrize(("changes", "message"), INCONSISTENT)
def test_an_inconsistent_trajectory_is_refused_by_the_reader(changes: dict[str, Any], message: str) -> None:
    raw: dict[str, Any] = {}
    for name, value in changes.items():
        if isinstance(value, np.ndarray):
            raw[name] = msgpack.ExtType({"u1": 3, "f4": 2}[value.dtype.str[1:]], value.tobytes())
        elif name == "versions":
            raw[name] = [SPAN | {"start": s.start, "end": s.end} for s in value]
        else:
            raw[name] = [TURN | {"start": t.start, "end": t.end} for t in value]
    with pytest.raises(CodecError, match=rf"trajectory_group\.trajectories\[0\].*{message}"):
        decode(_body_of(**raw))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"token_ids": np.zeros(8, np.int64)}, r"token_ids: dtype int64.*is not int32"),
        ({"token_ids": np.zeros(8, ">i4")}, r"token_ids: dtype >i4 .*is not int32"),
        ({"behavior_logprobs": np.zeros(8, np.float64)}, r"behavior_logprobs: dtype float64.*is not float32"),
        ({"loss_mask": np.zeros(8, bool)}, r"loss_mask: dtype bool.*is not uint8"),
        ({"token_ids": np.zeros((2, 4), np.int32)}, r"token_ids: array of shape \(2, 4\) is not 1-D"),
        ({"token_ids": [1, 2, 3]}, r"token_ids: expected a numpy array, got list"),
        ({"worker_id": 3}, r"worker_id: expected a string, got 3 \(int\)"),
        ({"sampling": SamplingParams(1.0, 8, "x")}, r"sampling\.seed: expected an int, got 'x' \(str\)"),  # type: ignore[arg-type]
        ({"sampling": SamplingParams(1.0, 8, True)}, r"sampling\.seed: expected an int, got True \(bool\)"),
        ({"timings": Timings(1.0, "late")}, r"timings\.finished_at_s: expected a float, got 'late'"),  # type: ignore[arg-type]
        ({"reward": Reward(1.0, {"a": "b"})}, r"reward\.components\.a: expected a float"),  # type: ignore[dict-item]
    ],
)  # fmt: skip
def test_wrong_types_never_pass(changes: dict[str, Any], message: str) -> None:
    """Arrays and maps are refused by the sender, plain numbers and strings by whoever reads them."""
    with pytest.raises(CodecError, match=rf"trajectories\[0\]\.{message}"):
        decode(encode(_group(_trajectory(**changes))))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"columns": {(1, 2): 0}}, r"columns: map key \(1, 2\) is a tuple, not a string"),
        ({"columns": {"a": {3: 0}}}, r"columns\.a: map key 3 is a int"),
        ({"columns": {"a": (1, 2)}}, r"columns\.a: a tuple is not JSON"),
        ({"columns": {"a": [b"raw"]}}, r"columns\.a\[0\]: a bytes is not JSON"),
        ({"columns": {"a": np.float64(1)}}, r"columns\.a: a float64 is not JSON"),
        ({"columns": {"a": 2**64}}, r"cannot pack the int 18446744073709551616: it is out of range"),
        ({"prompt": ({"role": {1: 2}},)}, r"prompt\[0\]\.role: map key 1"),
        ({"row": 1.0}, r"row: expected an int, got 1\.0 \(float\)"),
        ({"run_id": b"run"}, r"run_id: expected a string"),
    ],
)
def test_a_task_that_is_no_task_never_passes(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(CodecError, match=message):
        decode(encode(replace(TASK, **changes)))


@pytest.mark.parametrize("key", [(1, 2), 3, None, b"k"])
def test_a_key_that_is_no_string_is_refused_by_the_sender(key: object) -> None:
    with pytest.raises(CodecError, match="map key"):
        encode(replace(TASK, columns={key: 0}))  # type: ignore[dict-item]  # on purpose


def test_only_messages_are_encoded() -> None:
    with pytest.raises(CodecError, match="Trajectory is not a message; messages: PromptTask, TrajectoryGroup"):
        encode(_trajectory())  # type: ignore[arg-type]  # on purpose


@pytest.mark.parametrize("length", [4096, 4097, 20_000])
@pytest.mark.parametrize(
    ("position", "value", "message"), [(2, 1, "trains 1 tokens outside"), (-1, 1, "outside"), (50, 2, "holds 2")]
)
def test_masks_of_any_length_are_checked(length: int, position: int, value: int, message: str) -> None:
    mask = np.zeros(length, np.uint8)
    mask[10 : length - 1] = 1
    long = _trajectory(
        token_ids=np.zeros(length, np.int32),
        behavior_logprobs=np.zeros(length, np.float32),
        loss_mask=mask,
        turns=(Turn(10, length - 1, FinishReason.STOP),),
        versions=(VersionSpan(10, length - 1, 1, 1),),
    )
    _assert_same(long, decode_group(encode(_group(long))).trajectories[0])
    wrong = mask.copy()
    wrong[position] = value
    with pytest.raises(CodecError, match=message):
        encode(_group(replace(long, loss_mask=wrong)))


# -- frames that are not ours ----------------------------------------------------------------------------------------
@pytest.mark.parametrize(
    ("raw", "message"),
    [
        ({"finish_reason": "stopp"}, r"finish_reason: unknown 'stopp' \(str\); nearest known: 'stop'"),
        ({"loss_mak": 1}, r"trajectories\[0\]: unknown field 'loss_mak'; nearest known: 'loss_mask'"),
        ({"loss_mask": ...}, r"trajectories\[0\]: missing field 'loss_mask'"),
        ({"token_ids": [1, 2]}, r"token_ids: expected an array of int32, got \[1, 2\] \(list\)"),
        ({"token_ids": msgpack.ExtType(2, bytes(32))}, r"token_ids: dtype float32 is not int32"),
        ({"token_ids": msgpack.ExtType(1, bytes(30))}, r"array of int32 has 30 bytes, not a multiple of 4"),
        ({"token_ids": msgpack.ExtType(9, bytes(32))}, r"unknown ext code 9; known: 1 \(int32\)"),
        ({"timings": msgpack.Timestamp(1)}, r"timings: expected a map, got Timestamp"),
        ({"sampling": {"temperature": 1.0}}, r"sampling: missing field 'max_new_tokens'"),
        ({"sampling": [1.0]}, r"sampling: expected a map, got \[1\.0\] \(list\)"),
        ({"versions": [[3, 5, 4]]}, r"versions\[0\]: expected a map"),
        ({"versions": [SPAN, SPAN | {"start": 6, "end": 8, "version": 3}]}, r"versions\[1\]: VersionSpan kv_version=4"),
        ({"turns": [TURN, TURN | {"end": True}]}, r"turns\[1\]\.end: expected an int, got True"),
        ({"turns": {"a": 1}}, r"turns: expected a list"),
        ({"reward": REWARD | {"value": None}}, r"reward: Reward needs either"),
        ({"reward": REWARD | {"components": []}}, r"reward\.components: expected a map"),
        ({"worker_id": b"w0"}, r"worker_id: expected a string, got b'w0' \(bytes\)"),
    ],
)  # fmt: skip
def test_a_wrong_field_is_named_with_its_place(raw: dict[str, Any], message: str) -> None:
    with pytest.raises(CodecError, match=message):
        decode(_body_of(**raw))


def test_other_schema_versions_and_kinds_are_refused() -> None:
    frame = _frame()
    with pytest.raises(CodecError, match=r"schema version 2 is not known; this reader knows 1"):
        decode(msgpack.packb(frame | {"schema": 2}))
    with pytest.raises(CodecError, match=r"schema version 3"):
        decode(msgpack.packb({"schema": 3, "new": "layout"}))
    with pytest.raises(CodecError, match=r"unknown kind 'trajectory_grop'; nearest known: 'trajectory_group'"):
        decode(msgpack.packb(frame | {"kind": "trajectory_grop"}))
    with pytest.raises(CodecError, match=r"unknown field 'knd'; nearest known: 'kind'"):
        decode(msgpack.packb({"schema": 1, "knd": 1, "body": {}}))
    with pytest.raises(CodecError, match=r"missing field 'schema'"):
        decode(msgpack.packb({"kind": "prompt_task", "body": {}}))
    with pytest.raises(CodecError, match=r"frame is a list"):
        decode(msgpack.packb([1, 2]))


def test_the_typed_readers_refuse_the_other_kind() -> None:
    with pytest.raises(CodecError, match="expected a prompt_task, got a trajectory_group"):
        decode_task(encode(_group()))
    with pytest.raises(CodecError, match="expected a trajectory_group, got a prompt_task"):
        decode_group(encode(TASK))


def test_every_truncation_and_every_tail_is_refused() -> None:
    frame = encode(_group())
    for length in range(len(frame)):
        with pytest.raises(CodecError):
            decode(frame[:length])
    with pytest.raises(CodecError, match=r"3 trailing bytes"):
        decode(frame + b"\xc0\xc0\xc0")


@settings(max_examples=300, deadline=None)
@given(st.data())
def test_damaged_bytes_never_raise_anything_but_a_codec_error(data: st.DataObject) -> None:
    frame = bytearray(encode(_group()))
    for _ in range(data.draw(st.integers(1, 3))):
        frame[data.draw(st.integers(0, len(frame) - 1))] = data.draw(st.integers(0, 255))
    with contextlib.suppress(CodecError):  # damage inside a number is not visible
        decode(bytes(frame))


@settings(max_examples=200, deadline=None)
@given(st.binary(max_size=200))
def test_random_bytes_never_raise_anything_but_a_codec_error(junk: bytes) -> None:
    for read in (decode, unpack):
        with contextlib.suppress(CodecError):
            read(junk)


class _Explodes:
    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> tuple[object, ...]:
        return (Path.touch, (self.path,))


@pytest.mark.parametrize("protocol", range(6))
def test_a_pickle_is_refused_and_never_executed(tmp_path: Path, protocol: int) -> None:
    payload = pickle.dumps({"token_ids": _Explodes(tmp_path / "executed")}, protocol=protocol)
    for hostile in (
        payload,
        msgpack.packb({"nd": True, "type": "O", "kind": b"O", "data": payload}),
        msgpack.packb(_frame() | {"body": payload}),
        _body_of(token_ids={"nd": True, "type": "|O", "kind": b"O", "shape": [1], "data": payload}),
        _body_of(token_ids=msgpack.ExtType(42, payload)),
    ):
        with pytest.raises(CodecError):
            decode(hostile)
    assert not (tmp_path / "executed").exists()
    if protocol >= 2:
        with pytest.raises(CodecError, match="looks like a pickle"):
            decode(payload)


# -- pack and unpack -------------------------------------------------------------------------------------------------
def test_pack_keeps_values_and_arrays() -> None:
    arrays = {dtype.name: np.arange(3).astype(dtype) for dtype in ARRAY_DTYPES.values()}
    sent: dict[str, Any] = {"none": None, "list": [1, -2, 2**63, 0.5, "x", b"y", True], "deep": {"er": [{}]}, "arrays": arrays}
    got = unpack(pack(sent))
    for name, array in arrays.items():
        assert got["arrays"][name].dtype == array.dtype
        assert got["arrays"][name].tolist() == [0, 1, 2]
        assert not got["arrays"][name].flags.writeable
    assert {name: value for name, value in got.items() if name != "arrays"} == {k: v for k, v in sent.items() if k != "arrays"}
    assert unpack(pack((1, (2,)))) == [1, [2]]


@pytest.mark.parametrize(
    ("value", "message"),
    [
        ({(1, 2): 0}, r"message: map key \(1, 2\) is a tuple, not a string"),
        ({"a": [{"b": {1: 0}}]}, r"a\[0\]\.b: map key 1 is a int, not a string"),
        ({b"a": 0}, r"map key b'a' is a bytes"),
        ({"a": [object()]}, r"a\[0\]: cannot pack a builtins\.object"),
        ({"a": {1, 2}}, r"a: cannot pack a builtins\.set"),
        ({"a": np.zeros(2, np.complex64)}, r"a: dtype complex64"),
        ({"a": np.array([object()])}, r"a: dtype object"),
        ({"a": np.zeros((2, 2), np.float32)}, r"a: array of shape \(2, 2\)"),
        ({"a": np.float32(1)}, r"a: cannot pack a numpy\.float32"),
        ([2**64], r"out of range"),
    ],
)
def test_pack_refuses_what_could_not_be_read_back(value: Any, message: str) -> None:
    with pytest.raises(CodecError, match=message):
        pack(value)


@pytest.mark.parametrize(
    ("raw", "message"),
    [
        (msgpack.packb({1: 2}), "not allowed for map key|not a string"),
        (msgpack.packb({b"a": 2}), "map key b'a' is a bytes"),
        (b"\x82\xa1a\x01\xa1a\x02", "map names 'a' twice"),
        (msgpack.packb({"t": msgpack.Timestamp(1)}), r"t: unknown ext code -1 \(timestamp\)"),
        (msgpack.packb([msgpack.ExtType(7, b"")]), "unknown ext code 7"),
        (b"\xc1", "not a whole msgpack message"),
        (b"", "not a whole msgpack message"),
        (b"\x91" * 5000, "nested too deeply|not a whole"),
        (b"\xa1\xff", "not a whole msgpack message"),  # no UTF-8
    ],
)
def test_unpack_refuses_what_pack_cannot_have_written(raw: bytes, message: str) -> None:
    with pytest.raises(CodecError, match=message):
        unpack(raw)


@pytest.mark.parametrize("schema", [np.ones(2, np.int32), True, 1.0, "1", None, [1], {"v": 1}])
def test_a_schema_that_is_no_number_is_refused_like_an_unknown_one(schema: object) -> None:
    """An array compares element by element: its comparison with a number is no truth value."""
    with pytest.raises(CodecError, match="schema version"):
        decode(pack({"schema": schema, "kind": "prompt_task", "body": {}}))
