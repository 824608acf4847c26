"""The ledger of a run: every issued task and how it ended. Reads the intake log alone, so it works on a dead run."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from rich.console import Console
from rich.table import Table

from async_rl.run_dir.intake_log import LogIndex, read_log, task_ends, trained_twice
from async_rl.run_dir.layout import open_run
from protocol.messages import EndReason


@dataclass(frozen=True, slots=True)
class Audit:
    """What became of a run's tasks.

    issued: tasks ever issued, known once the run has ended. ends: tasks per EndReason value. waiting: in the log, in no step
    yet. lost: issued, and the log knows neither the group nor an end (only counted when `issued` is known). twice: ids that
    more than one applied step trained.
    """

    run_id: str
    issued: int | None
    ends: Mapping[str, int]
    waiting: int
    lost: int | None
    twice: tuple[str, ...]
    warnings: tuple[str, ...]

    @property
    def is_exact(self) -> bool:
        """Nothing lost, nothing trained twice, and (once the run has ended) every task ended exactly once."""
        ended = sum(self.ends.values())
        return not self.twice and not self.lost and (self.issued is None or (self.issued == ended and self.waiting == 0))


def audit(run_dir: Path) -> Audit:
    """Account for every task of the run. Raises: RunDirError; IntakeLogError if the log is damaged."""
    layout, identity = open_run(run_dir)
    return audit_index(identity.run_id, read_log(layout.intake_dir))


def audit_index(run_id: str, index: LogIndex) -> Audit:
    """`audit` of an index that was read already."""
    ends = task_ends(index)
    waiting = len(index.groups.keys() - ends.keys())
    issued = None if index.goes_on else index.issued
    known = len(ends.keys() | index.groups.keys())
    return Audit(
        run_id=run_id,
        issued=issued,
        ends={reason.value: count for reason, count in _per_reason(ends).items()},
        waiting=waiting,
        lost=None if issued is None else issued - known,
        twice=trained_twice(index),
        warnings=tuple(index.warnings),
    )


def _per_reason(ends: Mapping[str, str]) -> Mapping[EndReason, int]:
    counts = Counter(ends.values())
    return {reason: counts.get(reason.value, 0) for reason in EndReason}


def print_audit(found: Audit, console: Console) -> None:
    """A line per kind of end, and the verdict."""
    table = Table.grid(padding=(0, 2))
    table.add_column(style="dim")
    table.add_column(justify="right")
    table.add_row("issued", "not known before the run's end" if found.issued is None else f"{found.issued:,}")
    for reason, count in found.ends.items():
        table.add_row(reason, f"{count:,}")
    table.add_row("in the log, in no step yet", f"{found.waiting:,}")
    table.add_row("lost", "not known before the run's end" if found.lost is None else f"{found.lost:,}")
    table.add_row("trained twice", f"{len(found.twice):,}")
    console.print(table)
    for warning in found.warnings:
        console.print(f"note: {warning}", style="yellow", markup=False)
    verdict = "every task ended exactly once" if found.issued is not None else "no task was trained twice so far"
    console.print(
        verdict if found.is_exact else "NOT exact: see the counts above", style="green" if found.is_exact else "bold red"
    )
