"""Segments of the intake log on disk: their names, their records, and which of their bytes count.

A segment is an 8-byte magic and records: length (u32), crc32 of kind and body (u32), kind (u8), body; little-endian. Its
first record is a header that says how long every older segment was when it was sealed: what lies beyond a seal, and a
segment that an old incarnation made after the seal was written, do not exist.
"""

from __future__ import annotations

import mmap
import os
import re
import struct
import zlib
from collections.abc import Iterator, Sequence
from pathlib import Path

from async_rl.errors import IntakeLogError
from async_rl.run_dir.compacted import Compacted, compacted_paths, newest_compacted
from async_rl.run_dir.log_index import LogIndex, Position
from async_rl.run_dir.records import KINDS, GroupRecord, HeaderRecord, Record, decode_record, encode_record

MAGIC = b"ARLLOG01"
FRAME = struct.Struct("<IIB")
SEGMENT_NAME = re.compile(r"^(\d{6})-(\d{6})\.log$")
READ_TRIES = 5
LOOK_BEHIND_BYTES = 16 * 2**20


def segment_name(epoch: int, sequence: int) -> str:
    return f"{epoch:06d}-{sequence:06d}.log"


def epoch_of(segment: str) -> int:
    return int(segment[:6])


def segment_names(directory: Path) -> list[str]:
    """Names of all segments, oldest first."""
    if not directory.is_dir():
        return []
    return sorted(name for name in os.listdir(directory) if SEGMENT_NAME.match(name))  # noqa: PTH208 - the hot path of is_superseded


def newest_epoch(directory: Path) -> int:
    """The highest epoch that ever created a segment (0: none), with or without a header. By names alone: it is cheap."""
    names = segment_names(directory)
    newest = epoch_of(names[-1]) if names else 0
    return max([newest, *(epoch_of(path.name) for path in compacted_paths(directory))])


def read_log(directory: Path) -> LogIndex:
    """Index the log for reading, as a trainer that started now would see it. Raises: IntakeLogError if it is damaged."""
    for tries_left in reversed(range(READ_TRIES)):
        compacted, names = newest_compacted(directory), segment_names(directory)
        try:
            return scan(directory, names, compacted)
        except (FileNotFoundError, IntakeLogError):
            # Its trainer may have compacted meanwhile: what was listed is covered by now.
            if tries_left == 0 or newest_compacted(directory) == compacted:
                raise
    raise AssertionError("unreachable: the last try returns or raises")


def scan(directory: Path, names: Sequence[str], compacted: Compacted | None) -> LogIndex:
    """Index `names`, newest first for the seals, then oldest first for the contents; what `compacted` covers is not read."""
    index = LogIndex() if compacted is None else compacted.to_index()
    through = "" if compacted is None else compacted.through
    live = [name for name in names if name > through]
    seals: dict[str, int] | None = None
    contents: list[tuple[str, list[tuple[Record, int]]]] = []
    for name in reversed(live):
        limit = None if seals is None else seals.get(name, 0)
        records, end, damage = read_segment(directory / name, limit)
        if damage is not None:
            index.warnings.append(damage)
        index.sealed[name] = end
        contents.append((name, records))
        header = records[0][0] if records else None
        if isinstance(header, HeaderRecord):
            _require_present(directory, header, live, through)
            seals = dict(header.sealed) if seals is None else seals  # the newest header knew what the older ones said
    for name, records in reversed(contents):
        for record, start in records:
            index.add(record, Position(name, start))
    _require_every_step(directory, index)
    return index


def _require_present(directory: Path, header: HeaderRecord, names: Sequence[str], through: str) -> None:
    known = set(names)
    for name, size in header.sealed.items():
        if name > through and size > 0 and name not in known:
            raise IntakeLogError(
                f"{directory / name} is missing: {size} bytes of the intake log were sealed in it; "
                f"restore the file, or start another run from an exported checkpoint"
            )


def _require_every_step(directory: Path, index: LogIndex) -> None:
    for expected, record in enumerate(index.steps, start=index.base_step):
        if record.step != expected:
            raise IntakeLogError(
                f"{directory}: step record {record.step} stands where {expected} is due; the log is damaged: "
                f"restore it, or start another run from an exported checkpoint"
            )


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
            f"{path} at {start.offset}: the record of group {task_id} is damaged; restore the file, "
            f"or start another run from an exported checkpoint"
        )
    record = decode_record(kind, body)
    if not isinstance(record, GroupRecord) or record.task_id != task_id:
        raise IntakeLogError(f"{path} at {start.offset}: expected group {task_id}, found another record")
    return bytes(record.payload)


def frame(record: Record) -> bytes:
    kind, body = encode_record(record)
    return FRAME.pack(len(body), _crc(kind, body), kind) + body


def _crc(kind: int, body: bytes | memoryview) -> int:
    return zlib.crc32(body, kind)


def read_segment(path: Path, limit: int | None) -> tuple[list[tuple[Record, int]], int, str | None]:
    """Records of a segment with their offsets, the end of the last whole one, and a warning if a tail was cut.

    limit: bytes that were sealed; None if nobody sealed it. Raises: IntakeLogError if the sealed part is damaged.
    """
    length = path.stat().st_size
    size = length if limit is None else min(limit, length)
    if limit is not None and length < limit:
        raise IntakeLogError(
            f"{path} has {length} bytes, but {limit} were sealed: part of the log is gone; restore the file, "
            f"or start another run from an exported checkpoint"
        )
    if size < len(MAGIC):
        return [], 0, None
    with path.open("rb") as file:
        data = mmap.mmap(file.fileno(), size, access=mmap.ACCESS_READ)  # no copy of payloads that nobody asks for
    if data[: len(MAGIC)] != MAGIC:
        raise IntakeLogError(f"{path} is not an intake log segment (bad magic); move it out of the log's directory")
    records: list[tuple[Record, int]] = []
    offset, torn = len(MAGIC), None
    for record, start, end in _records(data, offset, size):
        if record is None:
            _refuse_records_behind(path, data, start, size, sealed=limit is not None)
            torn = f"{path.name}: {size - start} bytes after offset {start} are torn and were cut"
            break
        records.append((record, start))
        offset = end
    if torn is not None and limit is not None:
        raise IntakeLogError(
            f"{path}: the record at {offset} is damaged inside its sealed part; restore the file, "
            f"or start another run from an exported checkpoint"
        )
    return records, offset if records else 0, torn


def _refuse_records_behind(path: Path, data: mmap.mmap, start: int, size: int, *, sealed: bool) -> None:
    """A tail that a crash cut has nothing whole behind it. Raises: IntakeLogError if there is: that is damage, not a tail."""
    if sealed:
        return  # the caller says what is wrong with a sealed segment
    with memoryview(data) as view:
        for offset in range(start + 1, min(size - FRAME.size, start + LOOK_BEHIND_BYTES)):
            length, crc, kind = FRAME.unpack_from(data, offset)
            body_start = offset + FRAME.size
            end = body_start + length
            # No record is empty; and the checksum of nothing is the kind itself, which small integers in a payload look like.
            if length > 0 and kind in KINDS and end <= size and _crc(kind, view[body_start:end]) == crc:
                raise IntakeLogError(
                    f"{path}: the record at {start} is damaged, and whole ones stand behind it (at {offset}); restore the "
                    f"file. If this machine lost its power, cut it to {start} bytes: nothing that was acknowledged is lost"
                )


def _records(data: mmap.mmap, offset: int, size: int) -> Iterator[tuple[Record | None, int, int]]:
    with memoryview(data) as view:
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
