"""The version registry: which versions exist, which are live, and which engine serves what. Torch-free.

announce (trainer) → freeze a plan with its participants (coordinator) → every participant ready → bytes move
→ confirm or fail per engine (receivers) → complete: live or failed (coordinator). A transport that breaks on the way
(interrupt) is planned again with the survivors. State only; whoever waits for a change calls `wait_change`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Protocol


class EngineStatus(StrEnum):
    JOINING = "joining"  # holds no proven version yet
    SERVING = "serving"
    FENCED = "fenced"  # evicted or failed its proof: must take a complete push before it serves again


class PushStatus(StrEnum):
    PLANNED = "planned"
    BROKEN = "broken"  # the transport failed: plan again with those who answer
    LIVE = "live"  # at least one participant serves it
    FAILED = "failed"


@dataclass(frozen=True, slots=True)
class Announcement:
    """A new policy version. `push` is the encoded Manifest when a push is due, else None."""

    epoch: int
    version: int
    trained_through: int  # groups trained up to this version
    discarded: int  # groups ended untrained up to this version
    push: bytes | None
    store_address: str = ""  # host:port of the publisher's rendezvous store, for backends that need one


@dataclass(frozen=True, slots=True)
class EngineRecord:
    """One engine (its worker's heartbeat decides whether it is alive)."""

    engine_id: str
    worker_id: str
    status: EngineStatus = EngineStatus.JOINING
    serving_version: int | None = None
    serving_epoch: int = 0
    reason: str = ""  # why it is fenced


@dataclass(frozen=True, slots=True)
class PushPlan:
    """Who takes part in one push. Frozen: a change of membership is a new generation."""

    epoch: int
    version: int
    generation: int  # of the process group: same participants keep theirs from push to push
    participants: tuple[str, ...]  # engine ids, rank i + 1 each; the publisher is rank 0
    store_address: str
    deadline_s: float
    planned_at_s: float  # Unix time
    status: PushStatus = PushStatus.PLANNED


@dataclass(frozen=True, slots=True)
class ProofReport:
    """What an engine measured after a push."""

    parity_max_abs: float
    parity_mean_abs: float
    parity_tokens: int
    seconds: Mapping[str, float] = field(default_factory=dict)  # per phase: receive, swap, digest, probe


@dataclass(frozen=True, slots=True)
class FinishedPush:
    """How a plan ended."""

    plan: PushPlan
    confirmed: Mapping[str, ProofReport]
    failed: Mapping[str, str]  # engine id → reason


@dataclass(frozen=True, slots=True)
class RegistryState:
    """A consistent snapshot."""

    revision: int  # grows with every change
    epoch: int
    announced_version: int | None  # newest version, pushed or not
    pushable_version: int | None  # newest version with a manifest, if the current epoch announced it
    store_address: str
    trained_through: Mapping[int, int]  # version → groups trained up to it; versions that nobody serves any more are left out
    discarded: int
    engines: Mapping[str, EngineRecord]
    plan: PushPlan | None  # newest plan
    confirmed: Mapping[str, ProofReport]  # of the newest plan
    failed: Mapping[str, str]  # engine id → reason, of the newest plan
    ready: frozenset[str] = frozenset()  # engine ids that checked the newest plan's manifest and can receive
    finished: FinishedPush | None = None  # the newest plan that was completed


class VersionRegistry(Protocol):
    """State shared by trainer, coordinator and receivers. What a trainer writes is fenced by its epoch.

    Every method may raise `protocol.errors.QueueUnavailable`; none waits without a bound.
    """

    async def close(self) -> None: ...

    async def announce(self, announcement: Announcement) -> None:
        """Make a version known, and pushable if it brings a manifest. Announcing the same again is harmless; a push may be
        announced after a later version without one.

        Raises: EpochFenced; WeightPushError if a push is below one that this epoch announced before.
        """
        ...

    async def manifest(self, epoch: int, version: int) -> bytes | None:
        """The encoded manifest of a version, while it is the newest pushable or the planned one."""
        ...

    async def join(self, engine_id: str, worker_id: str) -> None:
        """Enter as JOINING, whatever was known of it: holds no proven version. A fenced engine asks for its next push so."""
        ...

    async def leave(self, engine_id: str) -> None: ...

    async def freeze(self, plan: PushPlan) -> bool:
        """Make `plan` the newest plan, with nobody ready, confirmed or failed.

        False if its epoch is not current, its version not the pushable one, or (version, generation) goes backwards.
        """
        ...

    async def ready(self, engine_id: str, plan: PushPlan) -> bool:
        """The engine checked the manifest and can receive. False if `plan` is not running any more, or does not name it."""
        ...

    async def interrupt(self, plan: PushPlan, reason: str) -> None:
        """The transport broke (said by whoever saw it): the plan is BROKEN, if it still runs."""
        ...

    async def confirm(self, engine_id: str, epoch: int, version: int, proof: ProofReport) -> bool:
        """The engine serves `version`. False, and it must not serve, if the newest plan is not of (epoch, version), does not
        name it, or the engine was evicted."""
        ...

    async def fail(self, engine_id: str, epoch: int, version: int, reason: str) -> None:
        """The engine could not take `version`; it is FENCED."""
        ...

    async def evict(self, engine_ids: Sequence[str], reason: str) -> None:
        """FENCED by the coordinator; failed in the running plan unless confirmed in it."""
        ...

    async def complete(self, plan: PushPlan, status: PushStatus) -> None:
        """End the newest plan as LIVE or FAILED. A no-op if `plan` is not the newest or has ended."""
        ...

    async def state(self) -> RegistryState: ...

    async def wait_change(self, revision: int, *, timeout_s: float) -> None:
        """Return when the revision is above `revision`, or after `timeout_s`."""
        ...


def min_served(state: RegistryState, alive_workers: frozenset[str]) -> int | None:
    """Oldest version that a healthy engine serves; None if none does."""
    served = [
        engine.serving_version
        for engine in state.engines.values()
        if engine.status is EngineStatus.SERVING and engine.worker_id in alive_workers and engine.serving_version is not None
    ]
    return min(served, default=None)
