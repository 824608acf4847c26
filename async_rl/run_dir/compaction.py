"""Replace old segments of the intake log by their ids and ends, once no checkpoint needs their contents."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from async_rl.run_dir.compacted import Compacted, compacted_paths, newest_compacted, write_compacted
from async_rl.run_dir.end_table import Settled
from async_rl.run_dir.layout import fsync_directory
from async_rl.run_dir.log_index import NO_STEP
from async_rl.run_dir.records import DeadRecord, EndRecord, GroupRecord, Record, StepRecord
from async_rl.run_dir.segments import read_segment, segment_names
from protocol.messages import EndReason


@dataclass(frozen=True, slots=True)
class Compaction:
    """What one compaction replaced."""

    segments: tuple[str, ...]
    base_step: int
    freed_bytes: int


def compact(
    directory: Path,
    sealed: Mapping[str, int],
    settled: Mapping[str, Settled],
    skipped: Collection[int],
    *,
    below: int,
    is_fenced: Callable[[], bool],
) -> Compaction | None:
    """Replace the oldest segments that lie wholly below step record `below`; None if there are none.

    sealed: the closed segments, and their bytes that count. settled: at least every end that a step below `below` brought.
    skipped: steps that applied nothing.
    is_fenced: whether a newer trainer has begun, which then owns the log. Raises: OSError, IntakeLogError.
    """
    before = newest_compacted(directory)
    through = "" if before is None else before.through
    compacted = Compacted(through) if before is None else before
    replaced: list[str] = []
    for name in sorted(name for name in sealed if name > through):
        records = [record for record, _ in read_segment(directory / name, sealed[name])[0]]
        if not _lies_below(records, settled, below):
            break
        _fold(compacted, records, settled, skipped)
        compacted.through = name
        replaced.append(name)
    if not replaced or is_fenced():
        return None
    freed = sum((directory / name).stat().st_size for name in replaced)
    written = write_compacted(directory, compacted)
    remove_covered(directory, compacted.through)
    return Compaction(tuple(replaced), compacted.base_step, freed - written.stat().st_size)


def remove_covered(directory: Path, through: str) -> None:
    """Unlink the segments up to `through`, and older compacted files. What a crash leaves is ignored, and removed later."""
    newest = compacted_paths(directory)[-1:]
    for path in [*(directory / name for name in segment_names(directory) if name <= through), *compacted_paths(directory)]:
        if path not in newest:
            path.unlink(missing_ok=True)
    fsync_directory(directory)


def _lies_below(records: Sequence[Record], settled: Mapping[str, Settled], below: int) -> bool:
    """Whether a replay from step record `below` on needs nothing of these records."""
    for record in records:
        match record:
            case StepRecord(step=step) if step >= below:
                return False
            case GroupRecord(task_id=task_id):
                end = settled.get(task_id)
                if end is None or end[1] >= below:
                    return False
    return True


def _fold(compacted: Compacted, records: Sequence[Record], settled: Mapping[str, Settled], skipped: Collection[int]) -> None:
    """Add the facts of one segment. `settled` has the ends of its groups, wherever their records stand."""
    for record in records:
        match record:
            case GroupRecord(task_id=task_id):
                compacted.ends.setdefault(task_id, settled[task_id])
            case StepRecord():
                _fold_step(compacted, record, was_skipped=record.step in skipped)
            case DeadRecord(task_id=task_id):
                compacted.ends.setdefault(task_id, (EndReason.DEAD.value, NO_STEP))
            case EndRecord(unused=unused, issued=issued):
                compacted.issued = max(issued, compacted.issued or 0)
                for task_id in unused:
                    compacted.ends.setdefault(task_id, (EndReason.UNUSED.value, NO_STEP))


def _fold_step(compacted: Compacted, record: StepRecord, *, was_skipped: bool) -> None:
    compacted.base_step = record.step + 1
    compacted.tally.update(record.tally(skipped=was_skipped))
    if was_skipped:
        compacted.skipped.add(record.step)
    for task_id, end in record.ends(skipped=was_skipped).items():
        known = compacted.ends.setdefault(task_id, (end, record.step))
        if known[0] == end == EndReason.TRAINED.value and known[1] != record.step:
            compacted.twice.add(task_id)
