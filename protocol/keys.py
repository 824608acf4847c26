"""Every Redis key of a run. All begin with `arl:{run_id}:`; the braces are literal, so a cluster keeps them in one slot."""

from __future__ import annotations

import re
from dataclasses import dataclass

from protocol.errors import QueueRefused
from protocol.streams import Stream

_RUN_ID = re.compile(r"[A-Za-z0-9._-]{1,128}")
_TRAINER = re.compile(r"trainer-(\d+)")


@dataclass(frozen=True, slots=True)
class Keys:
    """The keys of one run."""

    run_id: str

    def __post_init__(self) -> None:
        if not _RUN_ID.fullmatch(self.run_id):
            raise QueueRefused(f"run_id={self.run_id!r} cannot name keys: use 1 to 128 of letters, digits, '.', '_' and '-'")

    @property
    def prefix(self) -> str:
        return f"arl:{{{self.run_id}}}:"

    def stream(self, stream: Stream) -> str:
        """Stream: one entry per message (fields: `d` payload, `t` task id)."""
        return f"{self.prefix}{stream.value}"

    @property
    def state(self) -> str:
        """Hash: status, epoch, cursor, issued, discarded, and lost_from, lost_below while lost tasks wait to be readmitted."""
        return f"{self.prefix}state"

    @property
    def outstanding(self) -> str:
        """Hash: task id → where its entry is, as `stream entry_id`."""
        return f"{self.prefix}outstanding"

    @property
    def started(self) -> str:
        """Hash: outstanding task id → `version worker_id`, of who began it last."""
        return f"{self.prefix}started"

    @property
    def newly_dead(self) -> str:
        """Hash: task id → reason, of tasks in `dead` whose end is not in the intake log yet."""
        return f"{self.prefix}newly_dead"

    @property
    def none(self) -> str:
        """Never exists. A PEXPIRE of it changes nothing, but decides what a full server does with a script."""
        return f"{self.prefix}none"

    @property
    def workers(self) -> str:
        """Set: ids of the workers that ever sent a heartbeat and did not leave."""
        return f"{self.prefix}workers"

    @property
    def pulse(self) -> str:
        """Hash: `at`, when the last lease was renewed; `since`, since when without a gap (server's ms)."""
        return f"{self.prefix}pulse"

    def lease(self, worker_id: str) -> str:
        """String with a time to live: role and info of a live worker."""
        return f"{self.prefix}lease:{worker_id}"

    @property
    def registry(self) -> str:
        """Hash: the version registry's state."""
        return f"{self.prefix}registry"

    @property
    def registry_trained(self) -> str:
        """Hash: version → groups trained up to it."""
        return f"{self.prefix}registry:trained"

    @property
    def registry_manifest(self) -> str:
        """Hash: `epoch:version` → encoded manifest, while it may be asked for."""
        return f"{self.prefix}registry:manifest"

    @property
    def registry_changes(self) -> str:
        """Stream of one entry, `{revision}-0`: whoever waits for a change reads it with XREAD BLOCK."""
        return f"{self.prefix}registry:changes"


def trainer_consumer(epoch: int) -> str:
    """The consumer name under which the trainer of `epoch` reads `groups` (also its worker id for `own_pending`)."""
    return f"trainer-{epoch}"


def epoch_of_consumer(name: str) -> int | None:
    """The epoch in a trainer's consumer name; None for any other name."""
    match = _TRAINER.fullmatch(name)
    return int(match[1]) if match else None
