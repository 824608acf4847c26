from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import datasets
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from async_rl.coordinator.rows import open_rows
from async_rl.environments.base import Row
from async_rl.errors import DataError

CHAT = [{"role": "system", "content": "Sort."}, {"role": "user", "content": "31"}]
ROWS: list[dict[str, Any]] = [{"prompt": "12>", "answer": "12", "level": 1}, {"prompt": "31>", "answer": "13", "level": 2}]


@pytest.fixture(autouse=True)
def _cache(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path_factory.mktemp("cache"))
    datasets.disable_progress_bars()


def _jsonl(path: Path, rows: list[Any]) -> Path:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def _parquet(path: Path, rows: list[dict[str, Any]]) -> Path:
    pq.write_table(pa.Table.from_pylist(rows), path)
    return path


def _saved(path: Path, rows: list[dict[str, Any]]) -> Path:
    datasets.Dataset.from_list(rows).save_to_disk(str(path))
    return path


def _saved_splits(path: Path, rows: list[dict[str, Any]]) -> Path:
    other = datasets.Dataset.from_list([{"prompt": "held out"}])
    datasets.DatasetDict({"train": datasets.Dataset.from_list(rows), "test": other}).save_to_disk(str(path))
    return path


def _directory_of_parquet(path: Path, rows: list[dict[str, Any]]) -> Path:
    (path / "data").mkdir(parents=True)
    _parquet(path / "data" / "train-00000-of-00001.parquet", rows)
    _parquet(path / "data" / "test-00000-of-00001.parquet", [{"prompt": "held out", "answer": "", "level": 0}])
    return path


MAKERS = {
    "rows.jsonl": _jsonl,
    "rows.parquet": _parquet,
    "saved": _saved,
    "saved-splits": _saved_splits,
    "directory": _directory_of_parquet,
}


@pytest.mark.parametrize("name", MAKERS)
def test_every_kind_of_source_gives_the_same_rows(name: str, tmp_path: Path) -> None:
    rows = open_rows(MAKERS[name](tmp_path / name, ROWS), prompt_column="prompt", split="train")
    assert rows.num_rows() == 2
    assert rows.row(1) == Row("31>", {"answer": "13", "level": 2})
    assert rows.row(0) == Row("12>", {"answer": "12", "level": 1})


@pytest.mark.parametrize("name", ["rows.jsonl", "rows.parquet", "saved"])
def test_chat_messages_are_kept_and_keys_without_a_value_left_out(name: str, tmp_path: Path) -> None:
    messages = [{**CHAT[0], "name": "tutor"}, {**CHAT[1], "name": None}]
    rows = open_rows(MAKERS[name](tmp_path / name, [{"chat": messages, "n": [1, 2]}]), prompt_column="chat", split="train")
    assert rows.row(0) == Row(({**CHAT[0], "name": "tutor"}, CHAT[1]), {"n": [1, 2]})


def test_blank_lines_are_skipped_and_text_is_read_as_written(tmp_path: Path) -> None:
    path = tmp_path / "rows.jsonl"
    path.write_text('\n{"prompt": "é", "a": null}\r\n   \n{"prompt": "last line without an end"}', encoding="utf-8")
    rows = open_rows(path, prompt_column="prompt", split="train")
    assert [rows.row(index) for index in range(rows.num_rows())] == [Row("é", {"a": None}), Row("last line without an end")]


def test_a_long_table_is_read_in_any_order(tmp_path: Path) -> None:
    path = _parquet(tmp_path / "rows.parquet", [{"prompt": f"{number}>", "n": number} for number in range(10_000)])
    rows = open_rows(path, prompt_column="prompt", split="train")
    for index in (9_999, 0, 4_096, 4_095):
        assert rows.row(index) == Row(f"{index}>", {"n": index})


@pytest.mark.parametrize(
    ("lines", "message"),
    [
        (['{"prompt": "a"}', "{prompt: b}"], r"rows\.jsonl:2: not a line of JSON"),
        (['{"prompt": "a"}', "", "[1]"], r"rows\.jsonl:3: is a list; needs one JSON object"),
        (['{"prompt": "a"}', '{"promt": "b"}'], r"rows\.jsonl:2: no column 'prompt' .*did you mean 'promt'\?\); it has promt"),
        (['{"prompt": 3}'], r"rows\.jsonl:1: column 'prompt' is a number; needs text or a list of chat messages"),
        (['{"prompt": null}'], r"rows\.jsonl:1: column 'prompt' is null"),
        (['{"prompt": ""}'], r"rows\.jsonl:1: column 'prompt' is an empty text"),
        (['{"prompt": []}'], r"rows\.jsonl:1: column 'prompt' is an empty list"),
        (['{"prompt": [{"content": "x"}]}'], r"rows\.jsonl:1: message 0 of column 'prompt' is an object; needs .*role"),
        ([], r"holds no rows"),
    ],
)
def test_a_bad_line_is_named_when_the_file_is_opened(lines: list[str], message: str, tmp_path: Path) -> None:
    path = tmp_path / "rows.jsonl"
    path.write_text("\n".join(lines))
    with pytest.raises(DataError, match=message):
        open_rows(path, prompt_column="prompt", split="train")


@pytest.mark.parametrize(
    "row",
    [
        '{"prompt": "half of a pair \\ud83d"}',
        '{"prompt": "1>", "tags": [{"name": "\\uDFFF"}]}',
        '{"prompt": "1>", "number": 123456789012345678901234567890}',
        '{"prompt": "1>", "number": -9223372036854775809}',
    ],
)
def test_a_row_that_no_message_can_carry_is_named_when_the_file_is_opened(row: str, tmp_path: Path) -> None:
    path = tmp_path / "rows.jsonl"
    path.write_text(f'{{"prompt": "a"}}\n{row}\n')
    with pytest.raises(DataError, match=r"rows\.jsonl:2: a task cannot carry this row"):
        open_rows(path, prompt_column="prompt", split="train")


def test_whole_pairs_and_the_largest_numbers_are_carried(tmp_path: Path) -> None:
    path = tmp_path / "rows.jsonl"
    path.write_text('{"prompt": "\\ud83d\\ude00", "n": 18446744073709551615, "x": 0.12345678901234567890}\n')
    row = open_rows(path, prompt_column="prompt", split="train").row(0)
    assert (row.prompt, row.columns) == ("😀", {"n": 2**64 - 1, "x": 0.12345678901234568})


def test_bytes_that_are_no_text_are_named(tmp_path: Path) -> None:
    path = tmp_path / "rows.jsonl"
    path.write_bytes(b'{"prompt": "a"}\n{"prompt": "\xff"}\n')
    with pytest.raises(DataError, match=r"rows\.jsonl:2: not a line of JSON"):
        open_rows(path, prompt_column="prompt", split="train")


@pytest.mark.parametrize(
    ("rows", "message"),
    [
        ([{"promt": "a"}], r"no column 'prompt' .*did you mean 'promt'"),
        ([{"prompt": "a"}, {"prompt": None}], r"row 1: column 'prompt' is null"),
        ([{"prompt": 1}], r"row 0: column 'prompt' is a number"),
        ([{"prompt": "a", "image": b"\x00"}], r"column 'image' has type binary, which a task cannot carry"),
    ],
)
def test_a_bad_table_is_named_when_it_is_opened(rows: list[dict[str, Any]], message: str, tmp_path: Path) -> None:
    with pytest.raises(DataError, match=message):
        open_rows(_parquet(tmp_path / "rows.parquet", rows), prompt_column="prompt", split="train")


def test_an_empty_table_is_refused(tmp_path: Path) -> None:
    pq.write_table(pa.table({"prompt": pa.array([], pa.string())}), tmp_path / "rows.parquet")
    with pytest.raises(DataError, match="holds no rows"):
        open_rows(tmp_path / "rows.parquet", prompt_column="prompt", split="train")


def test_a_split_that_is_missing_is_named_with_those_that_exist(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"data\.split='trian' .*did you mean 'train'\?\); it has test, train"):
        open_rows(_saved_splits(tmp_path / "saved", ROWS), prompt_column="prompt", split="trian")


def test_what_is_missing_or_of_an_unknown_kind_is_refused(tmp_path: Path) -> None:
    _jsonl(tmp_path / "rows.jsonl", ROWS)
    (tmp_path / "rows.csv").write_text("prompt\na\n")
    (tmp_path / "broken.parquet").write_bytes(b"PAR1")
    (tmp_path / "empty").mkdir()
    for name, message in {
        "row.jsonl": r"does not exist \(did you mean 'rows.jsonl'\?\)",
        "no/rows.jsonl": r"does not exist; nor does the directory",
        "rows.csv": r"has \.csv suffix; use a \.jsonl or \.parquet file",
        "broken.parquet": r"cannot be read as Parquet",
        "empty": r"cannot be read as a dataset",
    }.items():
        with pytest.raises(DataError, match=message):
            open_rows(tmp_path / name, prompt_column="prompt", split="train")


def test_reading_a_dataset_directory_does_not_import_torch(tmp_path: Path) -> None:
    program = (
        "import sys; from pathlib import Path; from async_rl.coordinator.rows import open_rows\n"
        f"rows = open_rows(Path({str(_saved(tmp_path / 'saved', ROWS))!r}), prompt_column='prompt', split='train')\n"
        "assert rows.num_rows() == 2\n"
        "sys.exit('torch' in sys.modules)\n"
    )
    assert subprocess.run([sys.executable, "-c", program], check=False, timeout=60).returncode == 0
