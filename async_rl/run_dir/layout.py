"""Where everything of a run lies. One file owns every path below the run directory."""

from __future__ import annotations

import json
import os
import re
import secrets
import shutil
import time
from dataclasses import asdict, dataclass
from pathlib import Path

from async_rl.errors import RunDirError

RUN_SCHEMA_VERSION = 1
_LONGEST_NAME = 100  # of the directory, in a run id


@dataclass(frozen=True, slots=True)
class RunLayout:
    """Paths of a run directory."""

    root: Path

    @property
    def run_json(self) -> Path:
        """Identity of the run (RunIdentity)."""
        return self.root / "run.json"

    @property
    def config_toml(self) -> Path:
        """The resolved config."""
        return self.root / "config.toml"

    @property
    def data_json(self) -> Path:
        """What the run's prompt files held, and where rows joined later."""
        return self.root / "data.json"

    @property
    def metrics_jsonl(self) -> Path:
        """A line per optimizer step, written by the trainer."""
        return self.root / "metrics.jsonl"

    @property
    def events_jsonl(self) -> Path:
        """A line per event, written by every role."""
        return self.root / "events.jsonl"

    @property
    def summary_json(self) -> Path:
        return self.root / "summary.json"

    @property
    def logs_dir(self) -> Path:
        """JSON lines per role, and what the role processes printed."""
        return self.root / "logs"

    @property
    def intake_dir(self) -> Path:
        """Segments of the intake log."""
        return self.root / "intake"

    @property
    def checkpoints_dir(self) -> Path:
        return self.root / "checkpoints"

    @property
    def redis_dir(self) -> Path:
        """Data of the embedded server."""
        return self.root / "redis"

    @property
    def weights_dir(self) -> Path:
        """Versions pushed by the disk backend."""
        return self.root / "weights"

    @property
    def model_dir(self) -> Path:
        """A model that the run made itself (demo)."""
        return self.root / "model"

    @property
    def quarantine_dir(self) -> Path:
        """Trajectories whose records cannot be trusted, a text file each."""
        return self.root / "quarantine"

    @property
    def evaluations_jsonl(self) -> Path:
        """A line per held-out evaluation."""
        return self.root / "evaluations.jsonl"

    @property
    def evaluation_dir(self) -> Path:
        """The policy that is evaluated now, and what was sampled from it so far."""
        return self.root / "evaluation"

    @property
    def evaluation_start_json(self) -> Path:
        """Accuracy before training (demo)."""
        return self.root / "evaluation_start.json"

    def worker_metrics_jsonl(self, worker_id: str) -> Path:
        """Busy and idle seconds of one worker, a line every few seconds."""
        return self.logs_dir / f"{worker_id}.metrics.jsonl"


@dataclass(frozen=True, slots=True)
class RunIdentity:
    """What makes a run this run; never changes after its creation."""

    run_id: str
    created_at_s: float
    schema_version: int = RUN_SCHEMA_VERSION
    forked_from: str | None = None
    """`run id@step` of the checkpoint that it began from."""
    first_version: int = 0
    """Policy version that it began from."""


def create_run(
    root: Path, *, overwrite: bool = False, forked_from: str | None = None, first_version: int = 0
) -> tuple[RunLayout, RunIdentity]:
    """Make a new run directory.

    Raises: RunDirError if the directory holds a run (and not `overwrite`), or anything else that is not ours.
    """
    layout = RunLayout(root)
    if layout.run_json.exists():
        if not overwrite:
            raise RunDirError(f"run_dir={root} holds a run already; continue it with --resume, replace it with --overwrite, "
                              f"or name another --run_dir")  # fmt: skip
        shutil.rmtree(root)
    elif root.exists() and (not root.is_dir() or any(root.iterdir())):
        raise RunDirError(f"run_dir={root} exists and is not a run directory; name another --run_dir")
    try:
        for directory in (root, layout.logs_dir, layout.intake_dir, layout.checkpoints_dir):
            directory.mkdir(parents=True, exist_ok=True)
        identity = RunIdentity(
            run_id=new_run_id(root), created_at_s=time.time(), forked_from=forked_from, first_version=first_version
        )
        write_atomic(layout.run_json, json.dumps(asdict(identity), indent=2).encode())
    except OSError as error:
        raise RunDirError(f"run_dir={root} cannot be written: {error.strerror}; name another --run_dir") from error
    return layout, identity


def new_run_id(root: Path) -> str:
    """An id for a new run: the directory's name, as far as Redis keys may carry it, and a random part."""
    name = re.sub(r"[^A-Za-z0-9._-]+", "-", root.resolve().name).strip("-")[:_LONGEST_NAME]
    return f"{name or 'run'}-{secrets.token_hex(4)}"


def open_run(root: Path) -> tuple[RunLayout, RunIdentity]:
    """Open an existing run directory. Raises: RunDirError if there is none, or it is of another schema."""
    layout = RunLayout(root)
    try:
        fields = json.loads(layout.run_json.read_text())
        identity = RunIdentity(**fields)
    except FileNotFoundError as error:
        raise RunDirError(f"run_dir={root} holds no run (no run.json); start one with `async-rl run CONFIG`") from error
    except (ValueError, TypeError) as error:
        raise RunDirError(f"{layout.run_json} is damaged: {error}") from error
    if identity.schema_version != RUN_SCHEMA_VERSION:
        raise RunDirError(
            f"{layout.run_json} has schema_version={identity.schema_version}, this version reads {RUN_SCHEMA_VERSION}"
        )
    return layout, identity


def write_atomic(path: Path, data: bytes) -> None:
    """Write a whole file or nothing: temporary file, fsync, rename, fsync of the directory."""
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    with temporary.open("wb") as file:
        file.write(data)
        file.flush()
        os.fsync(file.fileno())
    temporary.replace(path)
    fsync_directory(path.parent)


def fsync_directory(directory: Path) -> None:
    """Make renames and creations in `directory` durable."""
    descriptor = os.open(directory, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
