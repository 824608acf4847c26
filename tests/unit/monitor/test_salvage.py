"""What can be read of a frame that the codec refuses."""

from __future__ import annotations

import msgpack
import pytest

from async_rl.monitor.salvage import salvage
from async_rl.testing.builders import make_group
from protocol.codec import encode


def test_a_frame_that_was_cut_is_read_up_to_the_cut() -> None:
    frame = encode(make_group(row=7))
    found = salvage(frame[: len(frame) // 2])
    values = dict(found.values)
    assert (values["kind"], values["body.task.row"], values["body.task.task_id"]) == ("trajectory_group", 7, "test:0:7:0")
    assert found.problem.startswith("at byte ")
    assert f"of {len(frame) // 2}" in found.problem


def test_whole_msgpack_has_no_problem_and_trailing_bytes_are_counted() -> None:
    packed = msgpack.packb({"a": [1, {"b": None}], "c": "d"})
    assert salvage(packed).values == [("a[0]", 1), ("a[1].b", None), ("c", "d")]
    assert salvage(packed).problem == ""
    assert salvage(packed + b"xyz").problem == "3 bytes follow the message"


@pytest.mark.parametrize(
    "payload",
    [
        b"",
        b"\xc1",
        b"\xdf\xff\xff\xff\xff",
        b"\x91" * 100_000,
        b"\xdd\x00\xff\xff\xff" + b"\x01" * 70_000,
    ],
)
def test_hopeless_bytes_end_with_a_problem_not_with_a_crash(payload: bytes) -> None:
    found = salvage(payload)
    assert found.problem
    assert len(found.values) <= 2000
