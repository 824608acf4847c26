"""`async-rl replay` with a progress bar."""

from __future__ import annotations

from typing import TYPE_CHECKING

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from async_rl.config import RunConfig

if TYPE_CHECKING:
    from async_rl.trainer.replay import ReplayResult


def replay_with_progress(config: RunConfig, *, start: int | None = None, console: Console | None = None) -> ReplayResult:
    """See `async_rl.trainer.replay.replay`. Imports torch."""
    from async_rl.launch.inputs import require_model
    from async_rl.trainer.replay import replay

    require_model(config)
    columns = (TextColumn("replay"), BarColumn(), MofNCompleteColumn(), TextColumn("steps"), TimeRemainingColumn())
    with Progress(*columns, console=console, transient=True) as bar:
        task = bar.add_task("replay", total=None)
        return replay(config, start=start, on_step=lambda done, total: bar.update(task, completed=done, total=total))
