"""A run's checkpoint as a Hugging Face model directory."""

from __future__ import annotations

from pathlib import Path


def export_run(run_dir: Path, to: Path, *, step: int | None = None) -> Path:
    """Write the newest complete checkpoint (or that of `step`) to the new directory `to`. Imports torch.

    Raises: RunDirError, CheckpointError.
    """
    from async_rl.run_dir.layout import open_run
    from async_rl.trainer.export import export_hf

    open_run(run_dir)
    return export_hf(run_dir, to, step=step)
