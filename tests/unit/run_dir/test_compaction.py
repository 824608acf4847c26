"""Compaction of the intake log: what is forgotten, what is not, and every point at which it may be interrupted."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

import pytest

from async_rl.checks.audit import audit_index
from async_rl.errors import IntakeLogError
from async_rl.run_dir import compaction
from async_rl.run_dir.intake_log import IntakeLog, LogIndex, read_log, segment_names, task_ends, trained_twice
from async_rl.run_dir.records import DeadRecord, EndRecord, GroupRecord, GroupUse, SkipRecord, StepRecord
from protocol.messages import EndReason

ROTATE = 200  # bytes: one group and its step fill a segment


def step_record(step: int, *tasks: str, end: EndReason = EndReason.TRAINED, verdict: str = "train", lag: int = 1) -> StepRecord:
    trained = 3 if end is EndReason.TRAINED else 0
    use = {"trajectories": [[verdict, lag, 0, 3, trained, None]]}
    return StepRecord(step, step, step, end is EndReason.TRAINED, tuple(GroupUse(task, end, use) for task in tasks), seed=step)


def write_run(directory: Path, *, steps: int, epoch: int = 1) -> IntakeLog:
    """One group and one step per segment: t0 trained by step 0, and so on; step 2 is skipped, tX is dead."""
    log = IntakeLog.open(directory, epoch=epoch, rotate_bytes=ROTATE)
    for number in range(log.index.num_steps, steps):
        log.append([GroupRecord(f"t{number}", bytes(150)), step_record(number, f"t{number}")])
        if number == 2:
            log.append([SkipRecord(2, "nan")])
        if number == 1:
            log.append([DeadRecord("tX", "poison")])
        log.sync()
    return log


ENDS = {"t0": "trained", "t1": "trained", "t2": "dropped", "tX": "dead"}


def compact(log: IntakeLog, below: int) -> compaction.Compaction | None:
    log.settle(below)
    return log.compact(below)


def test_segments_below_a_checkpoint_become_ids_and_ends(tmp_path: Path) -> None:
    log = write_run(tmp_path, steps=6)
    assert segment_names(tmp_path) == [f"000001-{number:06d}.log" for number in range(7)]
    done = compact(log, 3)
    assert done is not None
    assert done.segments == ("000001-000000.log", "000001-000001.log", "000001-000002.log")
    assert done.base_step == 3
    assert segment_names(tmp_path) == [f"000001-{number:06d}.log" for number in range(3, 7)]
    for index in (log.index, read_log(tmp_path), IntakeLog.open(tmp_path, epoch=2).index):
        assert index.base_step == 3
        assert index.num_steps == 6
        assert {task: task_ends(index)[task] for task in ENDS} == ENDS
        assert all(index.knows(task) for task in ("t0", "t1", "t2", "t3", "tX"))
        assert not index.knows("t9")
        assert trained_twice(index) == ()
        assert [record.step for record in index.steps_from(4)] == [4, 5]


def test_what_was_compacted_is_not_taken_in_again_and_steps_go_on_counting(tmp_path: Path) -> None:
    log = write_run(tmp_path, steps=6)
    compact(log, 5)
    log.append([GroupRecord("t0", b"again"), GroupRecord("new", b"x"), step_record(6, "new")])
    log.sync()
    later = IntakeLog.open(tmp_path, epoch=2)
    assert "t0" not in later.index.groups
    assert later.index.num_steps == 7


def test_the_audit_of_a_compacted_run_is_as_exact_as_before(tmp_path: Path) -> None:
    log = write_run(tmp_path, steps=6)
    log.append([EndRecord(("left",), issued=8)])
    log.sync()
    before = audit_index("run", read_log(tmp_path))
    assert before.is_exact
    assert before.ends == {"trained": 5, "dropped": 1, "invalid": 0, "dead": 1, "unused": 1}
    compact(log, 6)
    after = audit_index("run", read_log(tmp_path))
    assert (after.ends, after.issued, after.waiting, after.lost) == (before.ends, 8, 0, 0)
    assert after.is_exact


def test_a_task_trained_by_two_steps_is_found_even_if_the_first_was_compacted(tmp_path: Path) -> None:
    log = write_run(tmp_path, steps=4)
    compact(log, 2)
    log.append([step_record(4, "t0")])
    log.sync()
    assert trained_twice(read_log(tmp_path)) == ("t0",)
    compact(log, 5)
    assert trained_twice(read_log(tmp_path)) == ("t0",)
    assert not audit_index("run", read_log(tmp_path)).is_exact


def test_a_segment_with_a_group_that_still_waits_or_a_later_step_trains_is_kept(tmp_path: Path) -> None:
    log = IntakeLog.open(tmp_path, epoch=1, rotate_bytes=ROTATE)
    log.append([GroupRecord("waits", bytes(200))])
    log.sync()
    log.append([GroupRecord("a", bytes(200)), step_record(0, "a")])
    log.sync()
    assert compact(log, 1) is None
    log.append([step_record(1, "waits")])
    log.sync()
    assert compact(log, 1) is None  # step 1 is not below record 1
    done = compact(log, 2)
    assert done is not None
    assert done.segments == ("000001-000000.log", "000001-000001.log")
    assert task_ends(read_log(tmp_path)) == {"waits": "trained", "a": "trained"}


def test_groups_and_steps_in_different_segments_settle_together(tmp_path: Path) -> None:
    log = IntakeLog.open(tmp_path, epoch=1, rotate_bytes=ROTATE)
    log.append([GroupRecord("a", bytes(200))])
    log.sync()
    log.append([GroupRecord("b", bytes(200)), step_record(0, "a")])
    log.sync()
    done = compact(log, 1)
    assert done is not None
    assert done.segments == ("000001-000000.log",)  # the second holds b, which waits; its step is below 1
    index = read_log(tmp_path)
    assert task_ends(index) == {"a": "trained"}
    assert list(index.groups) == ["b"]
    assert trained_twice(index) == ()
    assert index.num_steps == 1


def test_memory_holds_ids_and_ends_of_settled_steps_only(tmp_path: Path) -> None:
    log = write_run(tmp_path, steps=6)
    log.settle(5)
    assert [record.step for record in log.index.steps] == [5]
    assert list(log.index.groups) == ["t5"]
    assert log.index.settled["t0"] == ("trained", 0)
    with pytest.raises(IntakeLogError, match="step record 4 is compacted away: the log has records from 5 on"):
        log.index.steps_from(4)


def crash_before(monkeypatch: pytest.MonkeyPatch, what: str) -> Callable[[IntakeLog], None]:
    """Interrupt a compaction before its file is renamed, or before the first segment is unlinked."""

    def fail(*args: object, **kwargs: object) -> None:
        raise RuntimeError("killed")

    def run(log: IntakeLog) -> None:
        log.settle(3)
        with monkeypatch.context() as patch:
            patch.setattr(*{"rename": (Path, "replace", fail), "unlink": (compaction, "remove_covered", fail)}[what])
            with pytest.raises(RuntimeError, match="killed"):
                log.compact(3)

    return run


@pytest.mark.parametrize("what", ["rename", "unlink"])
def test_a_crash_inside_a_compaction_changes_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, what: str) -> None:
    log = write_run(tmp_path, steps=6)
    before = task_ends(read_log(tmp_path))
    crash_before(monkeypatch, what)(log)
    assert len(segment_names(tmp_path)) == 7
    assert task_ends(read_log(tmp_path)) == before
    resumed = IntakeLog.open(tmp_path, epoch=2, rotate_bytes=ROTATE)
    assert task_ends(resumed.index) == before
    assert resumed.index.num_steps == 6
    assert [record.step for record in resumed.index.steps_from(3)] == [3, 4, 5]
    assert not list(tmp_path.glob(".*.tmp"))
    resumed.settle(4)
    resumed.compact(4)
    assert task_ends(read_log(tmp_path)) == before


def test_covered_segments_are_ignored_and_removed_at_the_next_start(tmp_path: Path) -> None:
    log = write_run(tmp_path, steps=4)
    kept = {name: (tmp_path / name).read_bytes() for name in segment_names(tmp_path)[:2]}
    compact(log, 2)
    for name, content in kept.items():
        (tmp_path / name).write_bytes(content[:-1] + b"?")  # a crash left them; their bytes do not matter any more
    index = read_log(tmp_path)
    assert index.base_step == 2
    assert index.num_steps == 4
    IntakeLog.open(tmp_path, epoch=2)
    assert not any((tmp_path / name).exists() for name in kept)


def test_a_newer_compaction_replaces_the_older_file(tmp_path: Path) -> None:
    log = write_run(tmp_path, steps=6)
    compact(log, 2)
    compact(log, 4)
    assert [path.name for path in tmp_path.glob("*.compact")] == ["000001-000003.compact"]
    assert {task: task_ends(read_log(tmp_path))[task] for task in ENDS} == ENDS


def test_a_fenced_trainer_compacts_nothing(tmp_path: Path) -> None:
    old = write_run(tmp_path, steps=4)
    old.settle(3)
    IntakeLog.open(tmp_path, epoch=2)
    before = sorted(path.name for path in tmp_path.iterdir())
    assert old.compact(3) is None
    assert sorted(path.name for path in tmp_path.iterdir()) == before


def test_a_segment_that_a_fenced_trainer_starts_does_not_exist(tmp_path: Path) -> None:
    old = write_run(tmp_path, steps=2)
    new = IntakeLog.open(tmp_path, epoch=2, rotate_bytes=ROTATE)
    for name in ("ghost1", "ghost2"):
        old.append([GroupRecord(name, bytes(300))])
        old.sync()  # rotates: a segment of epoch 1 that no header of epoch 2 knows
    assert "000001-000003.log" in segment_names(tmp_path)
    new.append([GroupRecord("real", bytes(300))])
    new.sync()
    new.append([step_record(2, "real")])
    new.sync()
    for index in (read_log(tmp_path), IntakeLog.open(tmp_path, epoch=3).index):
        assert set(index.groups) == {"t0", "t1", "real"}
        assert index.num_steps == 3


def test_a_lost_segment_is_an_error_that_names_it(tmp_path: Path) -> None:
    write_run(tmp_path, steps=4)
    (tmp_path / "000001-000001.log").unlink()
    with pytest.raises(IntakeLogError, match=r"000001-000001.log is missing: \d+ bytes .* were sealed in it; restore the file"):
        read_log(tmp_path)


def test_a_damaged_compacted_file_is_an_error_that_names_it(tmp_path: Path) -> None:
    log = write_run(tmp_path, steps=4)
    compact(log, 2)
    (path,) = tmp_path.glob("*.compact")
    content = bytearray(path.read_bytes())
    content[20] ^= 1
    path.write_bytes(content)
    with pytest.raises(IntakeLogError, match=r"000001-000001.compact is damaged.*exported checkpoint"):
        read_log(tmp_path)
    os.truncate(path, 5)
    with pytest.raises(IntakeLogError, match="is damaged"):
        read_log(tmp_path)


def test_a_compacted_file_of_another_version_is_not_called_damaged(tmp_path: Path) -> None:
    log = write_run(tmp_path, steps=4)
    compact(log, 2)
    (path,) = tmp_path.glob("*.compact")
    path.write_bytes(b"ARLCMP01" + path.read_bytes()[8:])
    with pytest.raises(
        IntakeLogError, match=r"another format \(ARLCMP01; this version reads ARLCMP02\): continue the run with"
    ):
        read_log(tmp_path)


def test_figures_of_compacted_steps_are_kept(tmp_path: Path) -> None:
    log = write_run(tmp_path, steps=4)
    compact(log, 3)
    index: LogIndex = read_log(tmp_path)
    assert dict(index.tally) == {("train", 1, True): 2, ("drop", 1, False): 1}  # step 2 was skipped
