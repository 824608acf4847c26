"""What a check found, and what to change."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum


class Verdict(StrEnum):
    OK = "ok"
    WARN = "warn"  # works, but not as well or as safely as it could
    FAIL = "fail"  # a run would fail, or lose work


@dataclass(frozen=True, slots=True)
class Finding:
    """One line of a report. `advice` is empty where nothing is to be changed."""

    name: str
    verdict: Verdict
    found: str
    advice: str = ""


def ok(name: str, found: str) -> Finding:
    return Finding(name, Verdict.OK, found)


def warn(name: str, found: str, advice: str) -> Finding:
    return Finding(name, Verdict.WARN, found, advice)


def fail(name: str, found: str, advice: str) -> Finding:
    return Finding(name, Verdict.FAIL, found, advice)
