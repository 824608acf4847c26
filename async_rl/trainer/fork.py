"""A new run out of another one's checkpoint: its weights, moments and schedule; its own log, queue and id."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

from async_rl.errors import CheckpointError
from async_rl.run_dir.layout import RunLayout, fsync_directory, write_atomic
from async_rl.trainer.checkpoint import COMPLETE, META, Checkpoint, checkpoint_of_step, file_hash
from async_rl.trainer.progress import Progress


def fork_origin(layout: RunLayout, step: int) -> Checkpoint:
    """The checkpoint that a fork begins from, verified. Raises: CheckpointError that names those there are."""
    return checkpoint_of_step(layout.checkpoints_dir, step)


def write_fork(origin: Checkpoint, layout: RunLayout, *, same_prompts: bool) -> Path:
    """Copy `origin` into the new run, as its first checkpoint. The origin is only read.

    Versions and schedule go on; step records, groups and tasks are counted anew. same_prompts: the fork goes on at the
    origin's cursor (what the other run had in flight is not sampled again); else at the first prompt of other data.
    Raises: CheckpointError if it cannot be written.
    """
    before = Progress.from_checkpoint(origin)
    cursor = before.cursor if same_prompts else 0
    progress = Progress(version=before.version, cursor=cursor, first_cursor=cursor)
    final = layout.checkpoints_dir / origin.path.name
    temporary = final.with_name(f"{final.name}.e000000.tmp")
    try:
        shutil.copytree(origin.path, temporary)
        write_atomic(temporary / META, json.dumps({"step": origin.step, "meta": progress.to_meta()}, indent=1).encode())
        marker = json.loads((temporary / COMPLETE).read_text())
        marker["files"][META] = {"bytes": (temporary / META).stat().st_size, "xxh3": file_hash(temporary / META)}
        for path in temporary.rglob("*"):
            fsync_directory(path)  # opens read-only and fsyncs: right for files too
        write_atomic(temporary / COMPLETE, json.dumps(marker, indent=1).encode())
        temporary.replace(final)
        fsync_directory(final.parent)
    except OSError as error:
        shutil.rmtree(temporary, ignore_errors=True)
        raise CheckpointError(f"checkpoint {final} cannot be written: {error.strerror or error}; free space") from error
    return final
