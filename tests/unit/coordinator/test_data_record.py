"""Prompt files that somebody changed between two starts of a run: what joins, what is refused, and that nothing is lost."""

from __future__ import annotations

import json
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from async_rl.config.rollout import DataConfig
from async_rl.config.run import ModelConfig, RunConfig
from async_rl.coordinator.data_record import read_records, settle
from async_rl.coordinator.prompts import PromptSource, TaskTemplate
from async_rl.coordinator.sources import TaskSource, open_source
from async_rl.environments.sort_digits import SortDigits
from async_rl.errors import ConfigError, DataError, RunDirError
from async_rl.testing.environments import NumberedRows

TEMPLATE = TaskTemplate("run", "rows", "e", run_seed=7, group_size=4, temperature=1.0, max_new_tokens=9)


def write(path: Path, prompts: list[str]) -> None:
    """The rows as the path's suffix says."""
    if path.suffix == ".parquet":
        pq.write_table(pa.table({"prompt": prompts, "answer": list(range(len(prompts)))}), path)
    else:
        lines = (json.dumps({"prompt": prompt, "answer": index}) for index, prompt in enumerate(prompts))
        path.write_text("\n".join(lines) + "\n")


def source(*paths: Path, shuffle: bool = True, data_epochs: int | None = None) -> TaskSource:
    one = len(paths) == 1
    data = DataConfig(
        source=str(paths[0]) if one else "environment",
        mix=[] if one else [{"source": str(path)} for path in paths],
        shuffle=shuffle,
        data_epochs=data_epochs,
    )
    return open_source(RunConfig(model=ModelConfig(path=Path("/m")), data=data), "run", SortDigits())


def ids(of: TaskSource, cursors: range) -> list[str]:
    return [task.task_id for cursor in cursors if (task := of.task_at(cursor)) is not None]


def prompts(count: int) -> list[str]:
    return [f"{index}>" for index in range(count)]


@pytest.fixture(params=["rows.jsonl", "rows.parquet"])
def path(request: pytest.FixtureRequest, tmp_path: Path) -> Path:
    return tmp_path / str(request.param)


@pytest.mark.parametrize("shuffle", [True, False])
def test_appended_rows_are_all_used_and_nothing_is_lost_or_repeated(path: Path, tmp_path: Path, shuffle: bool) -> None:
    write(path, prompts(10))
    record = tmp_path / "data.json"
    before, _ = settle(source(path, shuffle=shuffle), record, cursor=0, known_ids=list)
    issued = ids(before, range(14))  # into the second data epoch
    write(path, prompts(13))
    after, grown = settle(source(path, shuffle=shuffle), record, cursor=14, known_ids=lambda: issued[:9])
    joins = 2 if shuffle else 1
    assert grown == [f"data.source='{path}': 3 rows were appended; they are used from data epoch {joins} on"]
    assert ids(after, range(14)) == issued
    lengths = [10, 10, 13, 13] if shuffle else [10, 13, 13, 13]
    everything = [f"rows:{epoch}:{row}:0" for epoch, rows in enumerate(lengths) for row in range(rows)]
    assert sorted(ids(after, range(sum(lengths)))) == sorted(everything)
    again, grown = settle(source(path, shuffle=shuffle), record, cursor=20, known_ids=list)
    assert grown == []
    assert ids(again, range(60)) == ids(after, range(60))


def test_before_anything_is_issued_new_rows_belong_to_the_first_epoch(path: Path, tmp_path: Path) -> None:
    record = tmp_path / "data.json"
    write(path, prompts(4))
    settle(source(path), record, cursor=0, known_ids=list)
    write(path, prompts(6))
    after, _ = settle(source(path), record, cursor=0, known_ids=list)
    assert len({name.rsplit(":", 2)[1] for name in ids(after, range(6))}) == 6


def test_a_server_that_forgot_the_cursor_does_not_reshuffle_what_the_log_knows(path: Path, tmp_path: Path) -> None:
    record = tmp_path / "data.json"
    write(path, prompts(8))
    before, _ = settle(source(path), record, cursor=0, known_ids=list)
    logged = ids(before, range(11))
    write(path, prompts(9))
    after, _ = settle(source(path), record, cursor=0, known_ids=lambda: logged)
    assert ids(after, range(16)) == ids(before, range(16))
    assert len(set(ids(after, range(16, 25)))) == 9


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        (prompts(9), r"has 9 rows, and had 10 when the run was last started; .* start another run"),
        ([*prompts(4), "4=", *prompts(10)[5:]], r"row 4 \(from 0\) changed since"),
        (["x>", *prompts(11)[1:]], r"row 0 \(from 0\) changed since"),
    ],
)
def test_rows_that_were_removed_or_changed_are_refused(path: Path, tmp_path: Path, changed: list[str], message: str) -> None:
    record = tmp_path / "data.json"
    write(path, prompts(10))
    settle(source(path), record, cursor=0, known_ids=list)
    kept = record.read_bytes()
    write(path, changed)
    with pytest.raises(DataError, match=message):
        settle(source(path), record, cursor=3, known_ids=list)
    assert record.read_bytes() == kept


def test_of_many_rows_the_changed_ones_are_named_to_a_64th(tmp_path: Path) -> None:
    path = tmp_path / "rows.jsonl"
    write(path, prompts(640))
    settle(source(path), tmp_path / "data.json", cursor=0, known_ids=list)
    write(path, [*prompts(105), "?", *prompts(640)[106:]])
    with pytest.raises(DataError, match=r"some of rows 100 to 109 \(from 0\) changed"):
        settle(source(path), tmp_path / "data.json", cursor=3, known_ids=list)


def test_the_same_rows_written_otherwise_are_the_same(tmp_path: Path) -> None:
    jsonl, parquet = tmp_path / "rows.jsonl", tmp_path / "rows.parquet"
    write(jsonl, prompts(5))
    settle(source(jsonl), tmp_path / "a.json", cursor=0, known_ids=list)
    jsonl.write_text("\n\n" + jsonl.read_text().replace("\n", "  \n\n"))
    assert settle(source(jsonl), tmp_path / "a.json", cursor=2, known_ids=list)[1] == []
    write(parquet, prompts(5))
    settle(source(parquet), tmp_path / "b.json", cursor=0, known_ids=list)
    pq.write_table(pq.read_table(parquet), parquet, row_group_size=2, compression="gzip")
    assert settle(source(parquet), tmp_path / "b.json", cursor=2, known_ids=list)[1] == []


def test_new_rows_that_could_never_be_used_are_refused_with_the_remedy(path: Path, tmp_path: Path) -> None:
    record = tmp_path / "data.json"
    write(path, prompts(5))
    settle(source(path, data_epochs=1), record, cursor=0, known_ids=list)
    write(path, prompts(7))
    with pytest.raises(ConfigError, match=r"2 rows were appended.*data\.data_epochs=1 ends before.*--data\.data_epochs=2"):
        settle(source(path, data_epochs=1), record, cursor=2, known_ids=list)
    after, _ = settle(source(path, data_epochs=2), record, cursor=2, known_ids=list)
    assert after.num_tasks == 5 + 7


def test_in_file_order_the_only_epoch_goes_on_with_the_new_rows(path: Path, tmp_path: Path) -> None:
    record = tmp_path / "data.json"
    write(path, prompts(5))
    settle(source(path, shuffle=False, data_epochs=1), record, cursor=0, known_ids=list)
    write(path, prompts(7))
    after, _ = settle(source(path, shuffle=False, data_epochs=1), record, cursor=5, known_ids=list)
    assert ids(after, range(5, 9)) == ["rows:0:5:0", "rows:0:6:0"]


def test_of_a_mix_each_file_grows_by_itself(tmp_path: Path) -> None:
    first, second, record = tmp_path / "first.jsonl", tmp_path / "second.jsonl", tmp_path / "data.json"
    write(first, prompts(3))
    write(second, prompts(50))
    before, _ = settle(source(first, second), record, cursor=0, known_ids=list)
    issued = ids(before, range(20))  # ten of each: four epochs of the first have begun
    write(first, prompts(5))
    after, grown = settle(source(first, second), record, cursor=20, known_ids=list)
    assert grown == [f"data.source='{first}': 2 rows were appended; they are used from data epoch 4 on"]
    assert ids(after, range(20)) == issued
    assert read_records(record)["second"].lengths == ((0, 50),)


def test_a_damaged_record_is_named(path: Path, tmp_path: Path) -> None:
    write(path, prompts(3))
    (tmp_path / "data.json").write_text('{"sources": 3}')
    with pytest.raises(RunDirError, match=r"data\.json is damaged"):
        settle(source(path), tmp_path / "data.json", cursor=0, known_ids=list)


@settings(max_examples=60, deadline=None)
@given(data=st.data(), shuffle=st.booleans())
def test_lengths_by_epoch_give_every_row_of_every_epoch_once(data: st.DataObject, shuffle: bool) -> None:
    epochs = data.draw(st.integers(1, 6))
    lengths = sorted(
        {0: data.draw(st.integers(1, 9)), **data.draw(st.dictionaries(st.integers(1, 5), st.integers(1, 9)))}.items()
    )
    source = PromptSource(NumberedRows(9), TEMPLATE, shuffle=shuffle, data_epochs=epochs, lengths=lengths)
    rows_in = [next(rows for first, rows in reversed(lengths) if first <= epoch) for epoch in range(epochs)]
    assert source.num_tasks == sum(rows_in)
    found = ids(source, range(sum(rows_in) + 3))
    assert sorted(found) == sorted(f"rows:{epoch}:{row}:0" for epoch, rows in enumerate(rows_in) for row in range(rows))
    assert [int(name.split(":")[1]) for name in found] == [epoch for epoch, rows in enumerate(rows_in) for _ in range(rows)]
    for cursor, name in enumerate(found):
        made_again = source.task_of(name)
        assert made_again is not None
        assert made_again.task_id == name
        assert source.epochs_begun(cursor + 1) == int(name.split(":")[1]) + 1
