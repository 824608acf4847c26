"""How far training is, and what a step did."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from async_rl.trainer.checkpoint import Checkpoint


@dataclass(slots=True)
class Progress:
    """How far training is: policy version, step records gone through, groups trained.

    checkpoint_version: version of the newest complete checkpoint; None before the first. cursor, issued: what was issued when
    it was written, for a server that lost it. first_cursor: where the run began (a fork does not begin at 0).
    """

    version: int = 0
    records_applied: int = 0
    groups_trained: int = 0
    checkpoint_version: int | None = None
    cursor: int = 0
    issued: int = 0
    first_cursor: int = 0

    def to_meta(self) -> dict[str, int]:
        """What a checkpoint stores of it."""
        fields = ("version", "records_applied", "groups_trained", "cursor", "issued", "first_cursor")
        return {name: getattr(self, name) for name in fields}

    @staticmethod
    def from_checkpoint(checkpoint: Checkpoint) -> Progress:
        """Inverse of `to_meta`."""
        meta = checkpoint.meta
        return Progress(
            version=meta["version"],
            records_applied=meta["records_applied"],
            groups_trained=meta["groups_trained"],
            checkpoint_version=meta["version"],
            cursor=meta["cursor"],
            issued=meta["issued"],
            first_cursor=meta["first_cursor"],
        )


@dataclass(frozen=True, slots=True)
class StepResult:
    """What a step did; `skip_reason` is set if nothing was applied."""

    skip_reason: str | None
    metrics: Mapping[str, Any]
