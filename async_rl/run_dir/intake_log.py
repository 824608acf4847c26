"""The intake log: the truth about what a run trains.

Append-only segments `{epoch:06d}-{sequence:06d}.log`. A trainer incarnation (epoch) writes only segments that it created
itself; the first record of each is a header that says how long every older segment was when it was sealed. Whatever a
paused old trainer appends later lies beyond its seal and does not exist.

A segment is an 8-byte magic and records: length (u32), crc32 of kind and body (u32), kind (u8), body; little-endian.
Record kinds and bodies are in `async_rl.run_dir.records`.
"""

from __future__ import annotations

import errno
import os
import re
import struct
import zlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from async_rl.errors import IntakeLogError
from async_rl.run_dir.layout import fsync_directory
from async_rl.run_dir.records import (
    DeadRecord,
    EndRecord,
    GroupRecord,
    HeaderRecord,
    Record,
    SkipRecord,
    StepRecord,
    decode_record,
    encode_record,
)

MAGIC = b"ARLLOG01"
FRAME = struct.Struct("<IIB")
SEGMENT_NAME = re.compile(r"^(\d{6})-(\d{6})\.log$")
ROTATE_BYTES = 256 * 2**20


@dataclass(frozen=True, slots=True)
class Position:
    """Where a record ends: everything up to it is `before`."""

    segment: str
    offset: int


@dataclass(slots=True)
class LogIndex:
    """What the valid part of the log says, without the groups' payloads."""

    groups: dict[str, Position] = field(default_factory=dict)
    """task id → where its record starts, in the order of intake."""
    steps: list[StepRecord] = field(default_factory=list)
    skipped: set[int] = field(default_factory=set)
    """Indices of train steps whose gradient was not finite, so that nothing was applied."""
    dead: dict[str, str] = field(default_factory=dict)
    """task id → why it can never be trained."""
    unused: set[str] = field(default_factory=set)
    """Tasks left over when the run ended."""
    issued: int | None = None
    """Tasks ever issued, as the newest end record says; None before the run's first end."""
    sealed: dict[str, int] = field(default_factory=dict)
    """Segment → bytes that count."""
    warnings: list[str] = field(default_factory=list)

    def add(self, record: Record, start: Position) -> None:
        match record:
            case GroupRecord(task_id=task_id):
                self.groups.setdefault(task_id, start)
            case StepRecord():
                self.steps.append(record)
            case SkipRecord(step=step):
                self.skipped.add(step)
            case DeadRecord(task_id=task_id, reason=reason):
                self.dead.setdefault(task_id, reason)
            case EndRecord(unused=unused, issued=issued):
                self.unused.update(unused)
                self.issued = issued
            case HeaderRecord():
                pass

    def knows(self, task_id: str) -> bool:
        """Whether the task's group is in the log, or its end is."""
        return task_id in self.groups or task_id in self.dead or task_id in self.unused


class IntakeLog:
    """The log, opened for writing by one trainer incarnation. Not thread-safe: one caller at a time."""

    def __init__(self, directory: Path, epoch: int, index: LogIndex, *, rotate_bytes: int) -> None:
        self.directory = directory
        self.epoch = epoch
        self.index = index
        self._rotate_bytes = rotate_bytes
        self._sequence = -1
        self._file = -1
        self._offset = 0
        self._dirty = False

    @classmethod
    def open(cls, directory: Path, *, epoch: int, rotate_bytes: int = ROTATE_BYTES) -> IntakeLog:
        """Create this epoch's first segment, seal every older one, and index what counts.

        Raises: IntakeLogError if the epoch (or a later one) already wrote here.
        """
        directory.mkdir(parents=True, exist_ok=True)
        newest = newest_epoch(directory)
        if newest >= epoch:
            raise IntakeLogError(
                f"epoch={epoch} cannot write to {directory}: epoch {newest} already did; start with {newest + 1}"
            )
        log = cls(directory, epoch, LogIndex(), rotate_bytes=rotate_bytes)
        log._start_segment(scan_first=True)
        return log

    @property
    def position(self) -> Position:
        return Position(self._segment_name, self._offset)

    @property
    def _segment_name(self) -> str:
        return segment_name(self.epoch, self._sequence)

    def append(self, records: Iterable[Record]) -> None:
        """Append without fsync. A group whose id the log knows is left out.

        Raises: IntakeLogError if the disk is full; the file then ends at the last whole record.
        """
        chunks: list[bytes] = []
        placed: list[tuple[Record, int]] = []
        offset, seen = self._offset, set[str]()
        for record in records:
            if isinstance(record, GroupRecord):
                if record.task_id in seen or self.index.knows(record.task_id):
                    continue
                seen.add(record.task_id)
            frame = _frame(record)
            placed.append((record, offset))
            chunks.append(frame)
            offset += len(frame)
        if not chunks:
            return
        self._write(b"".join(chunks))
        for record, start in placed:
            self.index.add(record, Position(self._segment_name, start))
        self._dirty = True

    def sync(self) -> None:
        """Make everything appended durable, then rotate if the segment is large."""
        if self._dirty:
            os.fsync(self._file)
            self._dirty = False
        if self._offset >= self._rotate_bytes:
            self._start_segment(scan_first=False)

    def is_superseded(self) -> bool:
        """Whether a newer incarnation has begun: then our segment may be sealed, and nothing may be acknowledged."""
        return newest_epoch(self.directory) > self.epoch

    def read_group(self, task_id: str) -> bytes:
        """The payload of a group in the log. Raises: IntakeLogError if it is damaged; KeyError if it is not there."""
        start = self.index.groups[task_id]
        return read_group(self.directory, task_id, start)

    def close(self) -> None:
        if self._file >= 0:
            os.close(self._file)
            self._file = -1

    def _start_segment(self, *, scan_first: bool) -> None:
        """Create the next segment and write its header. The file exists before the older ones are measured."""
        if self._file >= 0:
            os.close(self._file)
        self._sequence += 1
        path = self.directory / self._segment_name
        self._file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_APPEND, 0o644)
        self._offset = 0
        fsync_directory(self.directory)
        older = [name for name in segment_names(self.directory) if name < self._segment_name]
        for name in older:
            _fsync_path(self.directory / name)
        if scan_first:
            self.index = scan(self.directory, [name for name in older if name < self._segment_name])
            sealed = dict(self.index.sealed)
        else:
            sealed = {
                **self.index.sealed,
                **{name: (self.directory / name).stat().st_size for name in older if name not in self.index.sealed},
            }
            self.index.sealed = sealed
        self._write(MAGIC + _frame(HeaderRecord(epoch=self.epoch, sequence=self._sequence, sealed=sealed)))
        os.fsync(self._file)

    def _write(self, data: bytes) -> None:
        view = memoryview(data)
        try:
            while view:
                view = view[os.write(self._file, view) :]
        except OSError as error:
            self._cut_back(error)
        self._offset += len(data)

    def _cut_back(self, error: OSError) -> None:
        os.ftruncate(self._file, self._offset)
        if error.errno in {errno.ENOSPC, errno.EDQUOT, errno.EFBIG}:
            raise IntakeLogError(f"{self.directory}: the disk is full ({error.strerror}); free space and resume with --resume, "
                                 f"nothing was lost: what is not in the log stays in the queue") from error  # fmt: skip
        raise IntakeLogError(f"{self.directory}: cannot write: {error.strerror}") from error


def segment_name(epoch: int, sequence: int) -> str:
    return f"{epoch:06d}-{sequence:06d}.log"


def segment_names(directory: Path) -> list[str]:
    """Names of all segments, oldest first."""
    if not directory.is_dir():
        return []
    return sorted(name for name in os.listdir(directory) if SEGMENT_NAME.match(name))  # noqa: PTH208 - the hot path of is_superseded


def newest_epoch(directory: Path) -> int:
    """The highest epoch that ever created a segment (0: none), whether or not it wrote a header."""
    names = segment_names(directory)
    return int(names[-1][:6]) if names else 0


def read_log(directory: Path) -> LogIndex:
    """Index the log for reading, as a trainer that started now would see it."""
    return scan(directory, segment_names(directory))


def scan(directory: Path, names: Sequence[str]) -> LogIndex:
    """Index `names`, newest first for the seals, then oldest first for the contents."""
    index = LogIndex()
    seals: dict[str, int] = {}
    contents: list[tuple[str, list[tuple[Record, int]]]] = []
    for name in reversed(names):
        records, end, damage = _read_segment(directory / name, seals.get(name))
        if damage is not None:
            index.warnings.append(damage)
        index.sealed[name] = end
        contents.append((name, records))
        header = records[0][0] if records else None
        if isinstance(header, HeaderRecord):
            for older, size in header.sealed.items():
                seals[older] = min(size, seals.get(older, size))
    for name, records in reversed(contents):
        for record, start in records:
            index.add(record, Position(name, start))
    return index


def read_group(directory: Path, task_id: str, start: Position) -> bytes:
    """Read one group's payload at its position. Raises: IntakeLogError if the record there is damaged or another one."""
    path = directory / start.segment
    with path.open("rb") as file:
        file.seek(start.offset)
        head = file.read(FRAME.size)
        length, crc, kind = FRAME.unpack(head)
        body = file.read(length)
    if len(body) < length or _crc(kind, body) != crc:
        raise IntakeLogError(
            f"{path} at {start.offset}: the record of group {task_id} is damaged; restore the file or fork from a checkpoint"
        )
    record = decode_record(kind, body)
    if not isinstance(record, GroupRecord) or record.task_id != task_id:
        raise IntakeLogError(f"{path} at {start.offset}: expected group {task_id}, found another record")
    return bytes(record.payload)


def _frame(record: Record) -> bytes:
    kind, body = encode_record(record)
    return FRAME.pack(len(body), _crc(kind, body), kind) + body


def _crc(kind: int, body: bytes | memoryview) -> int:
    return zlib.crc32(body, kind)


def _read_segment(path: Path, limit: int | None) -> tuple[list[tuple[Record, int]], int, str | None]:
    """Records of a segment with their offsets, the end of the last whole one, and a warning if a tail was cut."""
    data = path.read_bytes()
    size = len(data) if limit is None else min(limit, len(data))
    if limit is not None and len(data) < limit:
        raise IntakeLogError(
            f"{path} has {len(data)} bytes, but {limit} were sealed: part of the log is gone; restore it or fork"
        )
    if size < len(MAGIC):
        return [], 0, None
    if data[: len(MAGIC)] != MAGIC:
        raise IntakeLogError(f"{path} is not an intake log segment (bad magic)")
    records: list[tuple[Record, int]] = []
    offset, torn = len(MAGIC), None
    for record, start, end in _records(data, offset, size):
        if record is None:
            torn = f"{path.name}: {size - start} bytes after offset {start} are torn and were cut"
            break
        records.append((record, start))
        offset = end
    if torn is not None and limit is not None:
        raise IntakeLogError(
            f"{path}: the record at {offset} is damaged inside its sealed part; restore the file or fork from a checkpoint"
        )
    return records, offset if records else 0, torn


def _records(data: bytes, offset: int, size: int) -> Iterator[tuple[Record | None, int, int]]:
    view = memoryview(data)
    while offset < size:
        body_start = offset + FRAME.size
        if body_start > size:
            yield None, offset, size
            return
        length, crc, kind = FRAME.unpack_from(data, offset)
        end = body_start + length
        if end > size or _crc(kind, view[body_start:end]) != crc:
            yield None, offset, size
            return
        yield decode_record(kind, view[body_start:end], keep_payload=False), offset, end
        offset = end


def _fsync_path(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def task_ends(index: LogIndex) -> Mapping[str, str]:
    """task id → EndReason value, for every task whose end the log knows."""
    ends: dict[str, str] = {}
    for record in index.steps:
        ends.update(record.ends(skipped=record.step in index.skipped))
    ends.update(dict.fromkeys(index.dead, "dead"))
    ends.update({task_id: "unused" for task_id in index.unused if task_id not in ends})
    return ends
