"""Prompt rows in files: JSONL, Parquet, and Hugging Face dataset directories. Read at random, checked whole at start.

What a row must hold is checked when the source is opened, so that a bad last line stops a run before its first step and
not after a day. Memory is one offset per JSONL line, or an Arrow table (mapped from disk where its format allows it).
"""

from __future__ import annotations

import difflib
import json
import re
from array import array
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, Protocol, runtime_checkable

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import xxhash

from async_rl.environments.base import Row
from async_rl.errors import CodecError, DataError
from protocol.messages import ChatMessage
from protocol.packing import pack

_CHECK_BATCH_ROWS = 4096
_PARQUET = ".parquet"
_SUSPECT = re.compile(rb"\\u[dD][89a-fA-F]|[0-9]{19}")
"""JSON that messages may not be able to carry: half of a surrogate pair, an integer beyond 64 bits."""
_SUFFIXES = (".jsonl", ".ndjson", _PARQUET)


class Rows(Protocol):
    """A finite sequence of prompts; `row(index)` is the same at every call."""

    def num_rows(self) -> int: ...

    def row(self, index: int) -> Row: ...


@runtime_checkable
class FileRows(Rows, Protocol):
    """Rows that somebody may change between two starts of a run."""

    @property
    def where(self) -> str:
        """The setting and the path, for messages."""
        ...

    def digest(self, start: int, stop: int) -> str:
        """xxh3-128 of rows [start, stop), hex: the same for the same contents, however the file was written."""
        ...


def require_rows(path: Path) -> None:
    """Raises: DataError if nothing is there, or it is of an unknown kind. Reads nothing."""
    if not path.exists():
        raise DataError(f"data.source={str(path)!r} does not exist{_nearest_file(path)}")
    if not path.is_dir() and path.suffix not in _SUFFIXES:
        raise DataError(
            f"data.source={str(path)!r} has {path.suffix or 'no'} suffix; "
            f"use a .jsonl or .parquet file or a Hugging Face dataset directory"
        )


def open_rows(path: Path, *, prompt_column: str, split: str) -> FileRows:
    """Open a .jsonl or .parquet file, or a Hugging Face dataset directory.

    Raises: DataError for what is missing, empty, malformed or of an unknown kind; it names the file, line and column.
    """
    require_rows(path)
    if path.is_dir():
        return TableRows(_dataset_table(path, split), path, prompt_column)
    if path.suffix == _PARQUET:
        return TableRows(_parquet_table(path), path, prompt_column)
    return JsonlRows(path, prompt_column)


class JsonlRows:
    """One JSON object per line; blank lines are skipped."""

    def __init__(self, path: Path, prompt_column: str) -> None:
        self._path, self._prompt_column = path, prompt_column
        spans = array("q")  # offset, length, line number of each row
        offset = 0
        with path.open("rb") as lines:
            for number, line in enumerate(lines, start=1):
                if line.strip():
                    _split(_parse_line(line, f"{path}:{number}"), prompt_column, f"{path}:{number}")
                    spans.extend((offset, len(line), number))
                offset += len(line)
        if not spans:
            raise DataError(f"data.source={str(path)!r} holds no rows")
        self._spans = np.frombuffer(spans, dtype=np.int64).reshape(-1, 3)

    def num_rows(self) -> int:
        return len(self._spans)

    @property
    def where(self) -> str:
        return f"data.source={str(self._path)!r}"

    def digest(self, start: int, stop: int) -> str:
        hasher = xxhash.xxh3_128()
        with self._path.open("rb") as file:
            for offset, length, _ in self._spans[start:stop].tolist():
                file.seek(offset)
                hasher.update(file.read(length).strip() + b"\n")
        return hasher.hexdigest()

    def row(self, index: int) -> Row:
        offset, length, number = (int(part) for part in self._spans[index])
        with self._path.open("rb") as file:
            file.seek(offset)
            line = file.read(length)
        where = f"{self._path}:{number}"
        return _split(_parse_line(line, where), self._prompt_column, where)


class TableRows:
    """The rows of an Arrow table."""

    def __init__(self, table: pa.Table, path: Path, prompt_column: str) -> None:
        self._table, self._path, self._prompt_column = table, path, prompt_column
        if prompt_column not in table.column_names:
            raise DataError(_missing_column(prompt_column, table.column_names, str(path)))
        if table.num_rows == 0:
            raise DataError(f"data.source={str(path)!r} holds no rows")
        for column in table.schema:
            if not _is_json_type(column.type):
                raise DataError(
                    f"{path}: column {column.name!r} has type {column.type}, which a task cannot carry; "
                    f"remove it or convert it to text"
                )
        for index, value in enumerate(self._prompts()):
            check_prompt(value, prompt_column, f"{path} row {index}")

    def num_rows(self) -> int:
        return int(self._table.num_rows)

    @property
    def where(self) -> str:
        return f"data.source={str(self._path)!r}"

    def digest(self, start: int, stop: int) -> str:
        hasher = xxhash.xxh3_128()
        for batch in self._table.slice(start, stop - start).to_batches(max_chunksize=_CHECK_BATCH_ROWS):
            for values in batch.to_pylist():
                hasher.update(json.dumps(values, sort_keys=True).encode() + b"\n")
        return hasher.hexdigest()

    def row(self, index: int) -> Row:
        values: dict[str, Any] = self._table.slice(index, 1).to_pylist()[0]
        return _split(values, self._prompt_column, f"{self._path} row {index}")

    def _prompts(self) -> Iterator[Any]:
        for batch in self._table.select([self._prompt_column]).to_batches(max_chunksize=_CHECK_BATCH_ROWS):
            yield from batch.column(0).to_pylist()


def check_prompt(value: object, column: str, where: str) -> str | tuple[ChatMessage, ...]:
    """The prompt of a row: text, or chat messages as a tuple (keys without a value left out). Raises: DataError."""
    if isinstance(value, str):
        if not value:
            raise DataError(f"{where}: column {column!r} is an empty text; remove the row")
        return value
    if not isinstance(value, list):
        raise DataError(f"{where}: column {column!r} is {_kind(value)}; needs text or a list of chat messages")
    if not value:
        raise DataError(f"{where}: column {column!r} is an empty list; needs at least one chat message")
    messages: list[ChatMessage] = []
    for position, message in enumerate(value):
        if not isinstance(message, Mapping) or not isinstance(message.get("role"), str) or "content" not in message:
            raise DataError(
                f"{where}: message {position} of column {column!r} is {_kind(message)}; "
                f"needs an object with role (text) and content"
            )
        messages.append({key: part for key, part in message.items() if part is not None})
    return tuple(messages)


def _split(values: dict[str, Any], prompt_column: str, where: str) -> Row:
    if prompt_column not in values:
        raise DataError(_missing_column(prompt_column, list(values), where))
    prompt = check_prompt(values.pop(prompt_column), prompt_column, where)
    return Row(prompt=prompt, columns=values)


def _parse_line(line: bytes, where: str) -> dict[str, Any]:
    try:
        values = json.loads(line)
    except (ValueError, RecursionError) as error:  # also bytes that are not UTF-8
        raise DataError(f"{where}: not a line of JSON: {error}") from error
    if not isinstance(values, dict):
        raise DataError(f"{where}: is {_kind(values)}; needs one JSON object per line")
    if _SUSPECT.search(line):  # trying every line would take twice as long as reading it
        try:
            pack(values)
        except CodecError as error:
            raise DataError(f"{where}: a task cannot carry this row: {error}; mend or remove it") from error
    return values


def _parquet_table(path: Path) -> pa.Table:
    try:
        return pq.read_table(path, memory_map=True)
    except (pa.ArrowException, OSError) as error:
        raise DataError(f"data.source={str(path)!r} cannot be read as Parquet: {error}") from error


def _dataset_table(path: Path, split: str) -> pa.Table:
    import datasets  # a second to import, and only directories need it

    saved = (path / "dataset_dict.json").exists() or (path / "state.json").exists()
    try:
        found: Any = datasets.load_from_disk(str(path)) if saved else datasets.load_dataset(str(path))
    except Exception as error:  # the library raises many kinds for one cause: it is no dataset
        raise DataError(f"data.source={str(path)!r} cannot be read as a dataset: {type(error).__name__}: {error}") from error
    if isinstance(found, Mapping):
        if split not in found:
            matches = difflib.get_close_matches(split, list(found), n=1)
            hint = f" (did you mean {matches[0]!r}?)" if matches else ""
            raise DataError(f"data.split={split!r} is not in {str(path)!r}{hint}; it has {', '.join(sorted(found))}")
        found = found[split]
    return found.with_format("arrow")[:]


def _is_json_type(kind: pa.DataType) -> bool:
    types = pa.types
    if types.is_list(kind) or types.is_large_list(kind) or types.is_fixed_size_list(kind) or types.is_dictionary(kind):
        return _is_json_type(kind.value_type)
    if types.is_struct(kind):
        return all(_is_json_type(field.type) for field in kind)
    return bool(
        types.is_null(kind)
        or types.is_boolean(kind)
        or types.is_integer(kind)
        or types.is_floating(kind)
        or types.is_string(kind)
        or types.is_large_string(kind)
    )


def _missing_column(column: str, known: list[str], where: str) -> str:
    matches = difflib.get_close_matches(column, known, n=1)
    hint = f" (did you mean {matches[0]!r}?)" if matches else ""
    return f"{where}: no column {column!r} (data.prompt_column){hint}; it has {', '.join(known) or 'none'}"


def _nearest_file(path: Path) -> str:
    if not path.parent.is_dir():
        return f"; nor does the directory {str(path.parent)!r}"
    matches = difflib.get_close_matches(path.name, [entry.name for entry in path.parent.iterdir()], n=1)
    return f" (did you mean {matches[0]!r}?)" if matches else ""


def _kind(value: object) -> str:
    names = {
        type(None): "null",
        bool: "a boolean",
        int: "a number",
        float: "a number",
        str: "text",
        dict: "an object",
        list: "a list",
    }
    return names.get(type(value), type(value).__name__)
