"""The ledger of a run: what is known of it, and when."""

from __future__ import annotations

from async_rl.checks.audit import audit_index
from async_rl.run_dir.log_index import LogIndex, Position
from async_rl.run_dir.records import DeadRecord, EndRecord, GroupRecord, Record

START = Position("000001-000000.log", 0)


def index_of(*records: Record) -> LogIndex:
    index = LogIndex()
    for record in records:
        index.add(record, START)
    return index


def test_a_run_that_ended_accounts_for_all_that_was_issued() -> None:
    ended = audit_index("run", index_of(DeadRecord("a", "poison"), EndRecord(("b",), 2)))
    assert (ended.issued, ended.lost, ended.is_exact) == (2, 0, True)
    assert audit_index("run", index_of(DeadRecord("a", "poison"), EndRecord((), 2))).lost == 1


def test_a_run_that_was_resumed_after_its_end_is_not_measured_by_that_end() -> None:
    records = (EndRecord(("a",), 1), GroupRecord("b", b""), DeadRecord("c", "poison"))
    resumed = audit_index("run", index_of(*records))
    assert (resumed.issued, resumed.lost, resumed.waiting, resumed.is_exact) == (None, None, 1, True)
    again = audit_index("run", index_of(*records, EndRecord(("b",), 3)))
    assert (again.issued, again.lost, again.is_exact) == (3, 0, True)
