"""Names of the shared memory that a run's weight pushes use: outside the run directory, so whoever cleans has to know them."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path


def segment_name(run_id: str, pid: int, number: int) -> str:
    """File name of a segment. A run id holds no character that a file name may not."""
    return f"arl-{run_id}.{pid}.{number}"


def segments_of_run(directory: Path, run_id: str) -> Sequence[Path]:
    """Segments of the run that are there now."""
    if not directory.is_dir():
        return ()
    prefix = f"arl-{run_id}."
    return sorted(path for path in directory.iterdir() if path.name.startswith(prefix) and path.is_file())
