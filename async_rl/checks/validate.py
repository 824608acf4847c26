"""What `async-rl validate` found: a line per check, with how much it looked at and what failed."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from rich.console import Console
from rich.table import Table
from rich.text import Text

EXAMPLES = 3


@dataclass(slots=True)
class Check:
    """One check. looked_at: in units of `unit`. failed: how many of them; examples: the first few, in words."""

    name: str
    unit: str
    looked_at: int = 0
    failed: int = 0
    examples: list[str] = field(default_factory=list)
    note: str = ""

    def count(self, number: int = 1) -> None:
        self.looked_at += number

    def fail(self, words: str) -> None:
        self.failed += 1
        if len(self.examples) < EXAMPLES:
            self.examples.append(words)


@dataclass(frozen=True, slots=True)
class ValidationReport:
    """All checks of a run."""

    checks: Sequence[Check]

    @property
    def holds(self) -> bool:
        return not any(check.failed for check in self.checks)


def print_report(report: ValidationReport, console: Console) -> None:
    """A table of the checks, then what failed in words."""
    table = Table(box=None, padding=(0, 2, 0, 0))
    for name in ("", "checked", "looked at", "failed", ""):
        table.add_column(name, justify="right" if name in ("looked at", "failed") else "left")
    for check in report.checks:
        verdict = Text("fail", "bold red") if check.failed else Text("ok", "green") if check.looked_at else Text("–", "dim")
        table.add_row(verdict, check.name, f"{check.looked_at:,} {check.unit}", f"{check.failed:,}", check.note)
    console.print(table)
    for check in report.checks:
        for words in check.examples:
            console.print(Text.assemble((f"{check.name}: ", "bold"), words))
        if check.failed > len(check.examples):
            console.print(f"{check.name}: and {check.failed - len(check.examples)} more", style="dim")
