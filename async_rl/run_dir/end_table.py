"""How every settled task ended, in 17 bytes a task: a long run settles millions, and none may be forgotten.

Ids of tasks are `source:data_epoch:row:repeat` (`protocol.messages.task_id`). What they share is kept once; rows, ends, steps
are arrays, sorted by row. New ends are collected in a dict first. Ids of another form are kept as they are.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt

from protocol.messages import EndReason, task_id

Settled: TypeAlias = tuple[str, int]
"""How a task ended (EndReason value), and the index of the step record that ended it (-1: none did)."""

_Family: TypeAlias = tuple[str, int, int]
"""Source, data epoch, repeat: what many ids share."""
REASONS = tuple(reason.value for reason in EndReason)
_CODES = {reason: code for code, reason in enumerate(REASONS)}
MERGE_AT = 4096
LARGEST_ROW = 2**63


@dataclass(frozen=True, slots=True, eq=False)
class _Rows:
    """The ends of one family: ascending rows [N] int64, codes [N] uint8 (index of REASONS), steps [N] int64. Never changed."""

    rows: npt.NDArray[np.int64]
    codes: npt.NDArray[np.uint8]
    steps: npt.NDArray[np.int64]

    def find(self, row: int) -> Settled | None:
        at = int(np.searchsorted(self.rows, row))
        if at == len(self.rows) or self.rows[at] != row:
            return None
        return REASONS[self.codes[at]], int(self.steps[at])

    def merged(self, new: Mapping[int, Settled]) -> _Rows:
        """With what is new; of two ends of one row the new one counts."""
        codes = (_CODES[end] for end, _ in new.values())
        rows = np.concatenate([self.rows, np.fromiter(new, np.int64, len(new))])
        order = np.argsort(rows, kind="stable")
        rows = rows[order]
        is_last = np.append(rows[1:] != rows[:-1], True)
        order = order[is_last]
        all_codes = np.concatenate([self.codes, np.fromiter(codes, np.uint8, len(new))])
        all_steps = np.concatenate([self.steps, np.fromiter((step for _, step in new.values()), np.int64, len(new))])
        return _Rows(rows[is_last], all_codes[order], all_steps[order])


_NO_ROWS = _Rows(np.empty(0, np.int64), np.empty(0, np.uint8), np.empty(0, np.int64))


class EndTable(Mapping[str, Settled]):
    """task id → Settled. Ends are added and replaced, never taken away."""

    def __init__(self, ends: Mapping[str, Settled] | Iterable[tuple[str, Settled]] = ()) -> None:
        self._recent: dict[str, Settled] = {}
        self._odd: dict[str, Settled] = {}
        self._packed: dict[_Family, _Rows] = {}
        self._count = 0
        for name, settled in ends.items() if isinstance(ends, Mapping) else ends:
            self[name] = settled

    def copy(self) -> EndTable:
        """An independent table; what is packed is shared."""
        other = EndTable()
        other._recent, other._odd, other._packed = dict(self._recent), dict(self._odd), dict(self._packed)
        other._count = self._count
        return other

    def __len__(self) -> int:
        return self._count

    def __getitem__(self, name: str) -> Settled:
        found = self._recent.get(name) or self._odd.get(name) or self._find_packed(name)
        if found is None:
            raise KeyError(name)
        return found

    def __setitem__(self, name: str, settled: Settled) -> None:
        if name not in self:
            self._count += 1
        self._recent[name] = settled
        if len(self._recent) >= max(MERGE_AT, self._count // 64):
            self._pack()

    def setdefault(self, name: str, settled: Settled) -> Settled:
        """As a dict's."""
        known = self.get(name)
        if known is None:
            self[name] = known = settled
        return known

    def __iter__(self) -> Iterator[str]:
        return (name for name, _ in self.pairs())

    def pairs(self) -> Iterator[tuple[str, Settled]]:
        """As `items`, without a look-up for each."""
        self._pack()
        yield from self._odd.items()
        for (source, data_epoch, repeat), rows in self._packed.items():
            for row, code, step in zip(rows.rows.tolist(), rows.codes.tolist(), rows.steps.tolist(), strict=True):
                yield task_id(source, data_epoch, row, repeat), (REASONS[code], step)

    def counts(self) -> Counter[str]:
        """Tasks per end."""
        self._pack()
        counted = Counter(end for end, _ in self._odd.values())
        for rows in self._packed.values():
            counted.update(dict(zip(REASONS, np.bincount(rows.codes, minlength=len(REASONS)).tolist(), strict=True)))
        return +counted

    # -- in a file ---------------------------------------------------------------------------------------------------
    def to_fields(self) -> dict[str, Any]:
        """For msgpack; arrays are little-endian bytes."""
        self._pack()
        return {
            "reasons": list(REASONS),
            "odd": [[name, end, step] for name, (end, step) in self._odd.items()],
            "families": [
                [*family, rows.rows.astype("<i8").tobytes(), rows.codes.tobytes(), rows.steps.astype("<i8").tobytes()]
                for family, rows in self._packed.items()
            ],
        }

    @staticmethod
    def from_fields(fields: Mapping[str, Any]) -> EndTable:
        """Inverse of `to_fields`. Raises: KeyError, ValueError, TypeError if they are of something else."""
        table = EndTable((name, (end, step)) for name, end, step in fields["odd"])
        table._pack()
        codes = np.array([_CODES[reason] for reason in fields["reasons"]], np.uint8)
        for source, data_epoch, repeat, rows, coded, steps in fields["families"]:
            family_rows = np.frombuffer(rows, "<i8").astype(np.int64)
            ends = codes[np.frombuffer(coded, np.uint8)]
            table._packed[source, data_epoch, repeat] = _Rows(family_rows, ends, np.frombuffer(steps, "<i8").astype(np.int64))
            table._count += len(family_rows)
        return table

    # -- details -----------------------------------------------------------------------------------------------------
    def _find_packed(self, name: str) -> Settled | None:
        parts = _parts(name)
        if parts is None:
            return None
        family, row = parts
        return self._packed.get(family, _NO_ROWS).find(row)

    def _pack(self) -> None:
        """Move what is recent to where it is small. Another thread may look up meanwhile: it finds an end here or there."""
        families: dict[_Family, dict[int, Settled]] = {}
        for name, settled in self._recent.items():
            parts = _parts(name)
            if parts is None:
                self._odd[name] = settled
            else:
                families.setdefault(parts[0], {})[parts[1]] = settled
        for family, new in families.items():
            self._packed[family] = self._packed.get(family, _NO_ROWS).merged(new)
        self._recent = {}


def _parts(name: str) -> tuple[_Family, int] | None:
    """Family and row of an id, if the id can be made from them again."""
    source, *numbers = name.rsplit(":", 3)
    if len(numbers) != 3 or not all(number.isdecimal() and number.isascii() for number in numbers):
        return None
    data_epoch, row, repeat = map(int, numbers)
    if max(data_epoch, row, repeat) >= LARGEST_ROW or task_id(source, data_epoch, row, repeat) != name:
        return None
    return (source, data_epoch, repeat), row
