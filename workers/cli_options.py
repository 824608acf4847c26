"""What the commands of `async-rl` have in common: options, and how they say what is next."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, TypeAlias

import typer

Debug: TypeAlias = Annotated[bool, typer.Option("--debug", help="Show tracebacks.")]
RunDir: TypeAlias = Annotated[Path, typer.Argument(metavar="RUN", help="The run directory.", show_default=False)]


def say(what: str, then: str) -> None:
    """What was done, and the command that makes sense now."""
    print(what)
    print(f"next: {then}")
