"""What is left of old segments of the intake log: ids and ends, in one file that replaces them.

`{segment}.compact` covers every segment up to that one. It is written whole (temporary file, fsync, rename) before the
segments go; until they are gone they are ignored. The newest file counts, and holds what the older ones held.
"""

from __future__ import annotations

import re
import zlib
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import msgpack

from async_rl.errors import IntakeLogError
from async_rl.run_dir.end_table import EndTable
from async_rl.run_dir.layout import write_atomic
from async_rl.run_dir.log_index import LogIndex, Tally

FAMILY = b"ARLCMP"
MAGIC = FAMILY + b"02"
COMPACTED_NAME = re.compile(r"^(\d{6}-\d{6})\.compact$")


@dataclass(slots=True)
class Compacted:
    """The facts of every segment up to `through`."""

    through: str
    """Name of the newest segment that is replaced."""
    base_step: int = 0
    ends: EndTable = field(default_factory=EndTable)
    tally: Tally = field(default_factory=Counter)
    skipped: set[int] = field(default_factory=set)
    twice: set[str] = field(default_factory=set)
    issued: int | None = None

    def to_index(self) -> LogIndex:
        """A fresh index that knows these facts."""
        return LogIndex(
            base_step=self.base_step,
            settled=self.ends.copy(),
            tally=Counter(self.tally),
            skipped=set(self.skipped),
            twice=set(self.twice),
            issued=self.issued,
        )


def compacted_path(directory: Path, through: str) -> Path:
    return directory / through.replace(".log", ".compact")


def compacted_paths(directory: Path) -> list[Path]:
    """Every compacted file, oldest first."""
    return sorted(path for path in directory.glob("*.compact") if COMPACTED_NAME.match(path.name))


def newest_compacted(directory: Path) -> Compacted | None:
    """The compacted file that counts, if there is one. Raises: IntakeLogError if it is damaged."""
    paths = compacted_paths(directory)
    while paths:
        try:
            return read_compacted(paths[-1])
        except FileNotFoundError:  # a newer one has taken its place
            paths = compacted_paths(directory)
    return None


def write_compacted(directory: Path, compacted: Compacted) -> Path:
    """Write it whole or not at all. Raises: OSError."""
    body = msgpack.packb(
        {
            "through": compacted.through,
            "base_step": compacted.base_step,
            "ends": compacted.ends.to_fields(),
            "tally": [[*key, count] for key, count in compacted.tally.items()],
            "skipped": sorted(compacted.skipped),
            "twice": sorted(compacted.twice),
            "issued": compacted.issued,
        }
    )
    path = compacted_path(directory, compacted.through)
    write_atomic(path, MAGIC + zlib.crc32(body).to_bytes(4, "little") + body)
    return path


def read_compacted(path: Path) -> Compacted:
    """Raises: IntakeLogError that names the file if it is damaged, or of another format than this version's."""
    data = path.read_bytes()
    start = len(MAGIC) + 4
    found = data[: len(MAGIC)]
    if found != MAGIC and len(found) == len(MAGIC) and found.startswith(FAMILY):
        raise IntakeLogError(
            f"{path} has another format ({found.decode(errors='replace')}; this version reads {MAGIC.decode()}): "
            f"continue the run with the version that wrote it, or start another run from an exported checkpoint"
        )
    body = data[start:]
    if found != MAGIC or zlib.crc32(body).to_bytes(4, "little") != data[len(MAGIC) : start]:
        raise IntakeLogError(
            f"{path} is damaged: it holds the ends of old tasks; restore the file, "
            f"or start another run from an exported checkpoint"
        )
    return _from_fields(msgpack.unpackb(body, strict_map_key=True))


def _from_fields(fields: Mapping[str, Any]) -> Compacted:
    return Compacted(
        through=fields["through"],
        base_step=fields["base_step"],
        ends=EndTable.from_fields(fields["ends"]),
        tally=Counter({(verdict, lag, trained): count for verdict, lag, trained, count in fields["tally"]}),
        skipped=set(fields["skipped"]),
        twice=set(fields["twice"]),
        issued=fields["issued"],
    )
