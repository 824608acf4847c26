"""Numbers and durations for people."""

from __future__ import annotations

import shutil
import sys
from pathlib import Path


def share(value: float | None) -> str:
    """0.123 → `12.3 %`; unknown → `–`."""
    return "–" if value is None else f"{value:.1%}".replace("%", " %")


def seconds(value: float | None) -> str:
    """`38 ms`, `4.2 s`, `3:07`, `2:03:07`."""
    if value is None:
        return "–"
    if value < 0.1:
        return f"{value * 1000:.0f} ms"
    if value < 60:
        return f"{value:.2f} s" if value < 10 else f"{value:.0f} s"
    minutes, rest = divmod(round(value), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02d}:{rest:02d}" if hours else f"{minutes}:{rest:02d}"


def number(value: float | None, digits: int = 3) -> str:
    """Fixed digits where that says something, scientific where it does not."""
    if value is None:
        return "–"
    if value != 0 and abs(value) < 10**-digits:
        return f"{value:.1e}"
    return f"{value:,.{digits}f}"


def count(value: float | None) -> str:
    return "–" if value is None else f"{value:,.0f}"


def program() -> str:
    """How `async-rl` is called here: by its name if that is on PATH, else by its path beside this interpreter."""
    beside = Path(sys.executable).with_name("async-rl")
    found = shutil.which("async-rl")
    if found is not None and Path(found).resolve() == beside.resolve():
        return "async-rl"
    try:
        return str(beside.relative_to(Path.cwd()))
    except ValueError:
        return str(beside)
