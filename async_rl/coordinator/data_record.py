"""What a run's prompt files held when it began, and where rows joined later: so that a cursor means one task, whatever grows.

Kept in the run directory. Rows that were appended join at a data epoch: one that has begun keeps its order. Rows that were
removed or changed are refused: an id of the log would mean another prompt.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TypeAlias

from async_rl.coordinator.prompts import PromptSource
from async_rl.coordinator.rows import FileRows
from async_rl.coordinator.sources import TaskSource
from async_rl.errors import ConfigError, DataError, RunDirError
from async_rl.run_dir.layout import write_atomic

NUM_DIGESTS = 64
"""Of one source: what changed is named to a 64th of its rows."""


@dataclass(frozen=True, slots=True)
class SourceRecord:
    """The rows of one source."""

    lengths: tuple[tuple[int, int], ...]
    """(data epoch, rows that it and those after it have), ascending."""
    digests: tuple[str, ...]
    """xxh3-128 of every 64th of the rows, in order; see `_spans`."""

    @property
    def num_rows(self) -> int:
        return self.lengths[-1][1]


Records: TypeAlias = Mapping[str, SourceRecord]
"""By the name that a source's tasks carry. Only files: what an environment makes is named by its settings."""


def read_records(path: Path) -> Records:
    """Nothing if there is no record yet. Raises: RunDirError if it is damaged."""
    try:
        found = json.loads(path.read_bytes())
        return {
            name: SourceRecord(tuple((int(epoch), int(rows)) for epoch, rows in fields["lengths"]), tuple(fields["digests"]))
            for name, fields in found["sources"].items()
        }
    except FileNotFoundError:
        return {}
    except (ValueError, TypeError, KeyError, AttributeError) as error:
        raise RunDirError(f"{path} is damaged: {error}; without it the run's data cannot be told from other data") from error


def write_records(path: Path, records: Records) -> None:
    fields = {name: asdict(record) for name, record in records.items()}
    write_atomic(path, json.dumps({"sources": fields}, indent=2).encode())


def lengths_of(records: Records) -> Mapping[str, Sequence[tuple[int, int]]]:
    return {name: record.lengths for name, record in records.items()}


def appended(rows: FileRows, record: SourceRecord, where: str) -> int:
    """Rows that came after those of the record. Raises: DataError if some of those were removed or changed."""
    before, now = record.num_rows, rows.num_rows()
    remedy = "tasks are named by their place in the data: bring the rows back as they were, or start another run (--run_dir)"
    if now < before:
        raise DataError(f"{where} has {now:,} rows, and had {before:,} when the run was last started; {remedy}")
    for index, (start, stop) in enumerate(_spans(before)):
        if rows.digest(start, stop) != record.digests[index]:
            which = f"row {start:,}" if stop == start + 1 else f"some of rows {start:,} to {stop - 1:,}"
            raise DataError(f"{where}: {which} (from 0) changed since the run was last started; {remedy}")
    return now - before


def settle(
    source: TaskSource, path: Path, *, cursor: int, known_ids: Callable[[], Iterable[str]]
) -> tuple[TaskSource, Sequence[str]]:
    """The source with the order that this run's cursor stands for, and a sentence for each file that grew.

    The record is written before anything is issued from the new rows. cursor: of the queue. known_ids: tasks of the intake log,
    asked only if a file grew: a server that lost its data knows no cursor.
    Raises: DataError for rows that were removed or changed; ConfigError if new rows could never be used.
    """
    records = read_records(path)
    now: dict[str, SourceRecord] = {}
    grown: list[str] = []
    epochs: Mapping[str, int] | None = None
    for part, part_cursor in zip(source.parts, source.cursors(cursor), strict=True):
        if not isinstance(rows := part.rows, FileRows):
            continue
        record = records.get(part.name)
        if record is None:
            now[part.name] = SourceRecord(((0, rows.num_rows()),), _digests(rows))
            continue
        now[part.name] = record
        if more := appended(rows, record, rows.where):
            epochs = _data_epochs(known_ids()) if epochs is None else epochs
            known = part.with_lengths({part.name: record.lengths})
            begun = max(known.epochs_begun(part_cursor), epochs.get(part.name, -1) + 1)
            first = _joins_at(part, begun, rows.where, more)
            now[part.name] = SourceRecord(_extended(record.lengths, first, rows.num_rows()), _digests(rows))
            grown.append(f"{rows.where}: {more:,} rows were appended; they are used from data epoch {first} on")
    if now != records:
        write_records(path, now)
    return source.with_lengths(lengths_of(now)), grown


def _joins_at(part: PromptSource, begun: int, where: str, more: int) -> int:
    """The data epoch that new rows join. In file order the newest that has begun goes on; a shuffled one keeps its order."""
    if not part.shuffle:
        return max(0, begun - 1)
    if part.data_epochs is not None and begun >= part.data_epochs:
        raise ConfigError(
            f"{where}: {more:,} rows were appended, and would be used from data epoch {begun} on, but data.data_epochs="
            f"{part.data_epochs} ends before (an epoch that has begun keeps its shuffled order); set --data.data_epochs="
            f"{begun + 1}, or take the new rows out of the file"
        )
    return begun


def _extended(lengths: Sequence[tuple[int, int]], first: int, rows: int) -> tuple[tuple[int, int], ...]:
    return (*(pair for pair in lengths if pair[0] < first), (first, rows))


def _data_epochs(ids: Iterable[str]) -> Mapping[str, int]:
    """The newest data epoch of each source among task ids (source:data_epoch:row:repeat)."""
    newest: dict[str, int] = {}
    for name in ids:
        source, *numbers = name.rsplit(":", 3)
        if len(numbers) == 3 and numbers[0].isdecimal():
            newest[source] = max(newest.get(source, 0), int(numbers[0]))
    return newest


def _digests(rows: FileRows) -> tuple[str, ...]:
    return tuple(rows.digest(start, stop) for start, stop in _spans(rows.num_rows()))


def _spans(num_rows: int) -> Iterable[tuple[int, int]]:
    """[start, stop) of the rows of each digest; the last one may have fewer."""
    step = max(1, -(-num_rows // NUM_DIGESTS))
    return ((start, min(start + step, num_rows)) for start in range(0, num_rows, step))
