"""The intake log: the truth about what a run trains.

Append-only segments `{epoch:06d}-{sequence:06d}.log`. A trainer incarnation (epoch) writes only segments that it created
itself; the first record of each is a header that says how long every older segment was when it was sealed. Whatever a
paused old trainer appends later lies beyond its seal and does not exist. Segments that no checkpoint needs any more become
ids and ends (`async_rl.run_dir.compaction`).

The files are described in `async_rl.run_dir.segments`, record kinds and bodies in `async_rl.run_dir.records`.
"""

from __future__ import annotations

import errno
import os
from collections.abc import Iterable
from pathlib import Path

from async_rl.errors import IntakeLogError
from async_rl.run_dir.compacted import newest_compacted
from async_rl.run_dir.compaction import Compaction, compact, remove_covered
from async_rl.run_dir.layout import fsync_directory
from async_rl.run_dir.log_index import LogIndex, Position, count_ends, task_ends, trained_twice, unsettled_ends
from async_rl.run_dir.records import GroupRecord, HeaderRecord, Record
from async_rl.run_dir.segments import (
    FRAME,
    MAGIC,
    frame,
    newest_epoch,
    read_group,
    read_log,
    scan,
    segment_name,
    segment_names,
)

__all__ = [
    "FRAME",
    "MAGIC",
    "Compaction",
    "IntakeLog",
    "LogIndex",
    "Position",
    "count_ends",
    "newest_epoch",
    "read_group",
    "read_log",
    "segment_name",
    "segment_names",
    "task_ends",
    "trained_twice",
    "unsettled_ends",
]

ROTATE_BYTES = 256 * 2**20


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
            data = frame(record)
            placed.append((record, offset))
            chunks.append(data)
            offset += len(data)
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

    def settle(self, below: int) -> None:
        """Forget the contents of steps below record `below`; a complete checkpoint has their effect."""
        self.index.settle(below)

    def compact(self, below: int) -> Compaction | None:
        """Replace closed segments wholly below step record `below` by ids and ends. May run beside `append`.

        below: what the oldest checkpoint that is kept has applied, so that falling back to it loses nothing. Everything below
        it must be settled. Raises: OSError, IntakeLogError.
        """
        sealed = dict(self.index.sealed)
        done = compact(
            self.directory, sealed, self.index.settled, self.index.skipped, below=below, is_fenced=self.is_superseded
        )
        for name in () if done is None else done.segments:
            self.index.sealed.pop(name, None)
        return done

    def close(self) -> None:
        if self._file >= 0:
            os.close(self._file)
            self._file = -1

    def _start_segment(self, *, scan_first: bool) -> None:
        """Create the next segment and write its header. The file exists before the older ones are measured."""
        previous = self._segment_name
        if self._file >= 0:
            os.close(self._file)
            self.index.sealed[previous] = self._offset
        self._sequence += 1
        path = self.directory / self._segment_name
        self._file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_APPEND, 0o644)
        self._offset = 0
        fsync_directory(self.directory)
        if scan_first:
            self._index_older()
        header = HeaderRecord(epoch=self.epoch, sequence=self._sequence, sealed=dict(self.index.sealed))
        self._write(MAGIC + frame(header))
        os.fsync(self._file)

    def _index_older(self) -> None:
        """Read what counts of the older segments, and end a compaction that a crash cut short."""
        compacted = newest_compacted(self.directory)
        if compacted is not None:
            remove_covered(self.directory, compacted.through)
        for leftover in self.directory.glob(".*.compact.*.tmp"):
            leftover.unlink(missing_ok=True)
        older = [name for name in segment_names(self.directory) if name < self._segment_name]
        for name in older:
            _fsync_path(self.directory / name)
        self.index = scan(self.directory, older, compacted)

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


def _fsync_path(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
