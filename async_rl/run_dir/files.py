"""JSON-lines files of the run directory: append one line at a time, read what is whole."""

from __future__ import annotations

import json
import math
import os
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any


class JsonLinesWriter:
    """Appends one JSON object per line, each in a single write, so that several processes may share a file."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._descriptor = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o644)
        if not ends_with_newline(path):
            os.write(self._descriptor, b"\n")  # a crash cut the last line short; start on a line of our own

    def write(self, record: Mapping[str, Any]) -> None:
        """Append a record; numbers that JSON cannot hold (NaN, infinities) become null."""
        line = json.dumps(finite(record), separators=(",", ":"), allow_nan=False)
        os.write(self._descriptor, line.encode() + b"\n")

    def close(self) -> None:
        os.close(self._descriptor)


def ends_with_newline(path: Path) -> bool:
    """Whether the file is empty or its last line is whole."""
    with path.open("rb") as file:
        if file.seek(0, os.SEEK_END) == 0:
            return True
        file.seek(-1, os.SEEK_END)
        return file.read(1) == b"\n"


def finite(value: Any) -> Any:
    """`value` with every non-finite float replaced by None, however deep."""
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, Mapping):
        return {str(key): finite(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [finite(item) for item in value]
    return value


def read_json_lines(path: Path) -> Iterator[dict[str, Any]]:
    """Yield the whole records of a file; a missing file has none, a line cut short is left out."""
    try:
        with path.open("rb") as file:
            for line in file:
                try:
                    record = json.loads(line)
                except ValueError:
                    continue
                if isinstance(record, dict):
                    yield record
    except FileNotFoundError:
        return
