"""The intake log: once per id, sealed by a newer epoch, whole after any cut."""

from __future__ import annotations

import os
import resource
import signal
import struct
import subprocess
import sys
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from async_rl.errors import IntakeLogError
from async_rl.run_dir.intake_log import IntakeLog, newest_epoch, read_log, segment_names, task_ends
from async_rl.run_dir.records import DeadRecord, EndRecord, GroupRecord, GroupUse, SkipRecord, StepRecord
from protocol.messages import EndReason


def step_record(step: int, *ids: str, end: EndReason = EndReason.TRAINED, trains: bool = True) -> StepRecord:
    uses = tuple(GroupUse(task_id, end, {"current_version": step}) for task_id in ids)
    return StepRecord(step=step, version=step, batch=step, trains=trains, groups=uses, seed=step * 7)


def test_a_group_is_in_the_log_once_however_often_it_is_appended(tmp_path: Path) -> None:
    log = IntakeLog.open(tmp_path, epoch=1)
    log.append([GroupRecord("a", b"first"), GroupRecord("a", b"again")])
    log.append([GroupRecord("a", b"later")])
    log.sync()
    assert log.read_group("a") == b"first"
    again = IntakeLog.open(tmp_path, epoch=2)
    again.append([GroupRecord("a", b"after a restart")])
    assert list(read_log(tmp_path).groups) == ["a"]
    assert again.read_group("a") == b"first"


def test_records_come_back_as_they_were_written(tmp_path: Path) -> None:
    log = IntakeLog.open(tmp_path, epoch=1)
    records = [
        GroupRecord("s:0:1:0", b"\x00\xff payload"),
        step_record(0, "s:0:1:0"),
        SkipRecord(0, "gradient norm is nan"),
        DeadRecord("s:0:2:0", "unreadable"),
        EndRecord(("s:0:3:0",), issued=3),
    ]
    log.append(records)
    log.sync()
    index = read_log(tmp_path)
    assert index.steps == [records[1]]
    assert index.skipped == {0}
    assert index.dead == {"s:0:2:0": "unreadable"}
    assert index.unused == {"s:0:3:0"}
    assert index.issued == 3


def test_ends_are_counted_from_step_records_and_a_skipped_step_trained_nothing(tmp_path: Path) -> None:
    log = IntakeLog.open(tmp_path, epoch=1)
    log.append([GroupRecord(name, b"x") for name in "abcde"])
    log.append(
        [
            step_record(0, "a"),
            step_record(1, "b", end=EndReason.INVALID, trains=False),
            step_record(2, "c"),
            SkipRecord(2, "nan"),
        ]
    )
    log.append([DeadRecord("d", "poison"), EndRecord(("e",), issued=5)])
    assert task_ends(log.index) == {"a": "trained", "b": "invalid", "c": "dropped", "d": "dead", "e": "unused"}


def test_what_an_old_trainer_appends_after_its_seal_does_not_exist(tmp_path: Path) -> None:
    old = IntakeLog.open(tmp_path, epoch=1)
    old.append([GroupRecord("a", b"1")])
    old.sync()
    assert not old.is_superseded()
    new = IntakeLog.open(tmp_path, epoch=2)
    old.append([GroupRecord("b", b"by the old one"), step_record(0, "a")])
    old.sync()
    assert old.is_superseded()
    assert list(new.index.groups) == ["a"]
    new.append([GroupRecord("b", b"by the new one")])
    new.sync()
    third = IntakeLog.open(tmp_path, epoch=3)
    assert list(third.index.groups) == ["a", "b"]
    assert third.read_group("b") == b"by the new one"
    assert third.index.steps == []


def test_an_epoch_that_already_wrote_is_refused(tmp_path: Path) -> None:
    IntakeLog.open(tmp_path, epoch=3)
    with pytest.raises(IntakeLogError, match="start with 4"):
        IntakeLog.open(tmp_path, epoch=3)
    assert newest_epoch(tmp_path) == 3


def test_a_segment_without_a_header_uses_up_its_epoch_and_hides_nothing(tmp_path: Path) -> None:
    log = IntakeLog.open(tmp_path, epoch=1)
    log.append([GroupRecord("a", b"1")])
    log.sync()
    (tmp_path / "000002-000000.log").write_bytes(b"ARLL")  # died while creating it
    assert newest_epoch(tmp_path) == 2
    assert list(IntakeLog.open(tmp_path, epoch=3).index.groups) == ["a"]


def test_a_header_written_after_its_own_segment_was_sealed_seals_nothing(tmp_path: Path) -> None:
    first = IntakeLog.open(tmp_path, epoch=1)
    first.append([GroupRecord("a", b"1")])
    first.sync()
    IntakeLog.open(tmp_path / "elsewhere", epoch=2)
    header_of_two = (tmp_path / "elsewhere" / "000002-000000.log").read_bytes()  # it would know of no older segment
    (tmp_path / "000002-000000.log").touch()  # created, then paused before its header
    IntakeLog.open(tmp_path, epoch=3)
    (tmp_path / "000002-000000.log").write_bytes(header_of_two)  # wakes, and writes it
    assert list(read_log(tmp_path).groups) == ["a"]


@settings(max_examples=60, deadline=None)
@given(data=st.data())
def test_a_cut_at_any_byte_keeps_every_whole_record_before_it(
    tmp_path_factory: pytest.TempPathFactory, data: st.DataObject
) -> None:
    directory = tmp_path_factory.mktemp("log")
    log = IntakeLog.open(directory, epoch=1)
    ends = []
    for number in range(data.draw(st.integers(1, 6))):
        log.append([GroupRecord(f"t{number}", data.draw(st.binary(max_size=40)))])
        ends.append(log.position.offset)
    log.sync()
    path = directory / segment_names(directory)[0]
    cut = data.draw(st.integers(0, path.stat().st_size))
    os.truncate(path, cut)
    expected = [f"t{number}" for number, end in enumerate(ends) if end <= cut]
    after = IntakeLog.open(directory, epoch=2)
    assert list(after.index.groups) == expected


def test_a_flipped_bit_inside_the_sealed_part_is_an_error_not_a_shorter_log(tmp_path: Path) -> None:
    log = IntakeLog.open(tmp_path, epoch=1)
    log.append([GroupRecord("a", b"payload"), GroupRecord("b", b"payload")])
    log.sync()
    start = log.index.groups["a"].offset
    IntakeLog.open(tmp_path, epoch=2)
    path = tmp_path / "000001-000000.log"
    content = bytearray(path.read_bytes())
    content[start + 12] ^= 1
    path.write_bytes(content)
    with pytest.raises(IntakeLogError, match="damaged inside its sealed part"):
        read_log(tmp_path)


def test_damage_with_whole_records_behind_it_is_no_torn_tail(tmp_path: Path) -> None:
    log = IntakeLog.open(tmp_path, epoch=1)
    log.append([GroupRecord("a", b"payload"), GroupRecord("b", b"payload"), GroupRecord("c", b"payload")])
    log.sync()
    start = log.index.groups["b"].offset
    path = tmp_path / "000001-000000.log"
    content = bytearray(path.read_bytes())
    content[start + 12] ^= 1
    path.write_bytes(content)
    with pytest.raises(IntakeLogError, match=rf"record at {start} is damaged, and whole ones stand behind it"):
        read_log(tmp_path)
    with pytest.raises(IntakeLogError, match="restore the file"):
        IntakeLog.open(tmp_path, epoch=2)


def test_small_integers_in_a_torn_payload_are_no_record_behind_the_damage(tmp_path: Path) -> None:
    """An empty body's checksum is its kind: three small numbers in a row look like a record without one."""
    log = IntakeLog.open(tmp_path, epoch=1)
    log.append([GroupRecord("a", b"payload"), GroupRecord("b", struct.pack("<4I", 0, 2, 2, 9) * 8)])
    log.sync()
    start = log.index.groups["b"].offset
    path = tmp_path / "000001-000000.log"
    path.write_bytes(path.read_bytes()[:-3])
    index = IntakeLog.open(tmp_path, epoch=2).index
    assert list(index.groups) == ["a"]
    assert any(f"after offset {start} are torn" in warning for warning in index.warnings)


def test_a_sealed_segment_that_got_shorter_is_an_error(tmp_path: Path) -> None:
    log = IntakeLog.open(tmp_path, epoch=1)
    log.append([GroupRecord("a", b"payload")])
    log.sync()
    IntakeLog.open(tmp_path, epoch=2)
    os.truncate(tmp_path / "000001-000000.log", log.position.offset - 1)
    with pytest.raises(IntakeLogError, match="part of the log is gone"):
        read_log(tmp_path)


def test_rotation_keeps_one_log_over_many_segments(tmp_path: Path) -> None:
    log = IntakeLog.open(tmp_path, epoch=1, rotate_bytes=200)
    for number in range(12):
        log.append([GroupRecord(f"t{number}", bytes(50))])
        log.sync()
    assert len(segment_names(tmp_path)) > 3
    log.append([GroupRecord("t0", b"again")])
    assert log.read_group("t0") == bytes(50)
    assert list(read_log(tmp_path).groups) == [f"t{number}" for number in range(12)]


def test_a_full_disk_is_one_clear_error_and_leaves_whole_records(tmp_path: Path) -> None:
    log = IntakeLog.open(tmp_path, epoch=1)
    log.append([GroupRecord("a", bytes(100))])
    log.sync()
    old_handler = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    limit = resource.getrlimit(resource.RLIMIT_FSIZE)
    try:
        resource.setrlimit(resource.RLIMIT_FSIZE, (log.position.offset + 50, limit[1]))
        with pytest.raises(IntakeLogError, match=r"disk is full.*nothing was lost"):
            log.append([GroupRecord("b", bytes(1000))])
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limit)
        signal.signal(signal.SIGXFSZ, old_handler)
    assert not log.index.knows("b")
    log.append([GroupRecord("c", b"room again")])
    log.sync()
    assert list(read_log(tmp_path).groups) == ["a", "c"]


WRITER = """
import sys
from pathlib import Path
from async_rl.run_dir.intake_log import IntakeLog
from async_rl.run_dir.records import GroupRecord
log = IntakeLog.open(Path(sys.argv[1]), epoch=int(sys.argv[2]))
number = len(log.index.groups)
while True:
    log.append([GroupRecord(f"t{number}", bytes(3000)), GroupRecord(f"t{number + 1}", bytes(3000))])
    log.sync()
    print(number + 1, flush=True)
    number += 2
"""


def test_what_was_synced_before_a_kill_9_is_there_after_it(tmp_path: Path) -> None:
    for epoch in range(1, 6):
        process = subprocess.Popen([sys.executable, "-c", WRITER, str(tmp_path), str(epoch)], stdout=subprocess.PIPE, text=True)
        assert process.stdout is not None
        acknowledged = [int(process.stdout.readline()) for _ in range(3 + epoch)]
        process.kill()
        acknowledged += [int(line) for line in process.stdout.read().split()]
        process.wait()
        process.stdout.close()
        known = list(read_log(tmp_path).groups)
        assert known == [f"t{number}" for number in range(len(known))]
        assert len(known) >= acknowledged[-1] + 1
