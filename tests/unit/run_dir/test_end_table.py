"""The table of settled ends is a dict, only smaller."""

from __future__ import annotations

import tracemalloc
from collections import Counter

import msgpack
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from async_rl.run_dir import end_table
from async_rl.run_dir.end_table import REASONS, EndTable, Settled
from protocol.messages import task_id

IDS = st.one_of(
    st.builds(task_id, st.sampled_from(["rows", "a:b", ""]), st.integers(0, 2), st.integers(0, 30), st.integers(0, 1)),
    st.sampled_from(["t0", "rows:0:007:0", "rows:0:-1:0", "rows:0:٣:0", "rows:0:9223372036854775808:0", "rows:0::0", "::", ""]),
)
SETTLED = st.tuples(st.sampled_from(REASONS), st.integers(-1, 2**40))
OPERATIONS = st.lists(st.tuples(st.sampled_from(["set", "default"]), IDS, SETTLED), max_size=60)


@given(operations=OPERATIONS, merge_at=st.integers(1, 9))
@settings(max_examples=150, deadline=None)
def test_it_holds_what_a_dict_would_hold_before_and_after_a_file(
    operations: list[tuple[str, str, Settled]], merge_at: int
) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(end_table, "MERGE_AT", merge_at)
        table, expected = EndTable(), dict[str, Settled]()
        for kind, name, settled in operations:
            if kind == "set":
                table[name] = expected[name] = settled
            else:
                assert table.setdefault(name, settled) == expected.setdefault(name, settled)
            assert (table.get(name), len(table)) == (expected[name], len(expected))
        frozen = table.copy()
        table["later"] = ("dead", -1)
        read = EndTable.from_fields(msgpack.unpackb(msgpack.packb(frozen.to_fields())))
        for one in (frozen, read):
            assert dict(one.pairs()) == dict(one) == expected
            assert len(one) == len(expected)
            assert one.counts() == Counter(end for end, _ in expected.values())
            assert "later" not in one


def test_a_hundred_thousand_ends_take_a_few_bytes_each() -> None:
    tracemalloc.start()
    try:
        table = EndTable()
        for step in range(6250):
            for place in range(16):
                row = (step * 16 + place) * 7919 % 1_000_003  # in no order, as shuffled prompts are
                table[task_id("rows", 0, row, 0)] = ("trained", step)
        held, _ = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert len(table) == 100_000
    # 17 bytes each, and at most a sixteenth of them in a dict, at about 200.
    assert held < 100_000 * 17 + 6250 * 250
