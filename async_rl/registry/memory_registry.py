"""The version registry within one process, for tests and for runs without Redis. Behaves as redis_registry does."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import replace

from async_rl.errors import EpochFenced, WeightPushError
from async_rl.registry.versions import (
    Announcement,
    EngineRecord,
    EngineStatus,
    FinishedPush,
    ProofReport,
    PushPlan,
    PushStatus,
    RegistryState,
)


class MemoryRegistry:
    """VersionRegistry for the tasks of one event loop. `stream_epoch` says what the streams hold as the trainer's epoch."""

    def __init__(self, stream_epoch: Callable[[], int]) -> None:
        self._stream_epoch = stream_epoch
        self._changed = asyncio.Condition()
        self._revision = 0
        self._announced: Announcement | None = None
        self._pushable: Announcement | None = None
        self._manifests: dict[tuple[int, int], bytes] = {}
        self._trained: dict[int, int] = {}
        self._engines: dict[str, EngineRecord] = {}
        self._plan: PushPlan | None = None
        self._ready: set[str] = set()
        self._confirmed: dict[str, ProofReport] = {}
        self._failed: dict[str, str] = {}
        self._finished: FinishedPush | None = None

    async def close(self) -> None:
        """Nothing is held between calls."""

    async def announce(self, announcement: Announcement) -> None:
        a, before, pushed = announcement, self._announced, self._pushable
        if a.epoch < self._epoch():
            raise EpochFenced(
                f"announcement of version {a.version} by epoch {a.epoch}: a newer trainer has started; stop this one"
            )
        if a.push is not None and pushed is not None and pushed.epoch == a.epoch and a.version < pushed.version:
            raise WeightPushError(
                f"version {a.version} is below the one that epoch {a.epoch} pushed before; versions only grow"
            )
        if before is None or before.epoch != a.epoch or a.version >= before.version:
            self._announced = a
        self._trained[a.version] = a.trained_through
        if a.push is not None:
            self._pushable = a
            kept = {(a.epoch, a.version)} | ({(p.epoch, p.version)} if (p := self._running()) else set())
            self._manifests = {key: push for key, push in self._manifests.items() if key in kept}
            self._manifests[a.epoch, a.version] = a.push
        self._forget_unserved()
        await self._note()

    async def manifest(self, epoch: int, version: int) -> bytes | None:
        return self._manifests.get((epoch, version))

    async def join(self, engine_id: str, worker_id: str) -> None:
        if (plan := self._running()) is not None and engine_id in plan.participants:
            self._failed.setdefault(engine_id, "joined anew")
            self._confirmed.pop(engine_id, None)
            self._ready.discard(engine_id)
        self._engines[engine_id] = EngineRecord(engine_id, worker_id)
        await self._note()

    async def leave(self, engine_id: str) -> None:
        if self._engines.pop(engine_id, None) is None:
            return
        if self._plan is not None and engine_id in self._plan.participants and engine_id not in self._confirmed:
            self._failed[engine_id] = "left"
        await self._note()

    async def freeze(self, plan: PushPlan) -> bool:
        pushable, old = self._pushable, self._plan
        if plan.epoch != self._epoch() or pushable is None or (pushable.epoch, pushable.version) != (plan.epoch, plan.version):
            return False
        if old is not None:
            if plan.epoch < old.epoch or plan.generation < old.generation:
                return False
            if plan.epoch == old.epoch and (
                plan.version < old.version or (plan.version, plan.generation) == (old.version, old.generation)
            ):
                return False
        self._plan = plan
        self._ready, self._confirmed, self._failed = set(), {}, {}
        await self._note()
        return True

    async def ready(self, engine_id: str, plan: PushPlan) -> bool:
        running = self._running()
        if running is None or not _same(running, plan) or engine_id not in running.participants or engine_id in self._failed:
            return False
        self._ready.add(engine_id)
        await self._note()
        return True

    async def interrupt(self, plan: PushPlan, reason: str) -> None:
        if (running := self._running()) is not None and _same(running, plan):
            self._plan = replace(running, status=PushStatus.BROKEN)
            await self._note()

    async def confirm(self, engine_id: str, epoch: int, version: int, proof: ProofReport) -> bool:
        plan, record = self._plan, self._engines.get(engine_id)
        if plan is None or (plan.epoch, plan.version) != (epoch, version):
            return False
        if engine_id not in plan.participants or engine_id in self._failed:
            return False
        if record is None or record.status is EngineStatus.FENCED:
            return False
        self._confirmed[engine_id] = proof
        self._engines[engine_id] = replace(
            record, status=EngineStatus.SERVING, serving_version=version, serving_epoch=epoch, reason=""
        )
        await self._note()
        return True

    async def fail(self, engine_id: str, epoch: int, version: int, reason: str) -> None:
        plan = self._plan
        if plan is not None and (plan.epoch, plan.version) == (epoch, version) and engine_id in plan.participants:
            self._failed[engine_id] = reason
            self._confirmed.pop(engine_id, None)
        self._fence(engine_id, reason)
        await self._note()

    async def evict(self, engine_ids: Sequence[str], reason: str) -> None:
        plan = self._running()
        for engine_id in engine_ids:
            self._fence(engine_id, reason)
            if plan is not None and engine_id in plan.participants and engine_id not in self._confirmed:
                self._failed.setdefault(engine_id, reason)
        await self._note()

    async def complete(self, plan: PushPlan, status: PushStatus) -> None:
        newest = self._plan
        if newest is None or not _same(newest, plan) or newest.status not in (PushStatus.PLANNED, PushStatus.BROKEN):
            return
        self._plan = replace(newest, status=status)
        self._finished = FinishedPush(self._plan, dict(self._confirmed), dict(self._failed))
        await self._note()

    async def state(self) -> RegistryState:
        epoch = self._epoch()
        pushable = self._pushable if self._pushable is not None and self._pushable.epoch == epoch else None
        return RegistryState(
            revision=self._revision,
            epoch=epoch,
            announced_version=None if self._announced is None else self._announced.version,
            pushable_version=None if pushable is None else pushable.version,
            store_address="" if pushable is None else pushable.store_address,
            trained_through=dict(self._trained),
            discarded=0 if self._announced is None else self._announced.discarded,
            engines=dict(self._engines),
            plan=self._plan,
            confirmed=dict(self._confirmed),
            failed=dict(self._failed),
            ready=frozenset(self._ready),
            finished=self._finished,
        )

    async def wait_change(self, revision: int, *, timeout_s: float) -> None:
        try:
            async with asyncio.timeout(timeout_s), self._changed:
                await self._changed.wait_for(lambda: self._revision != revision)
        except TimeoutError:
            return

    def _epoch(self) -> int:
        return max(self._stream_epoch(), 0 if self._announced is None else self._announced.epoch)

    def _running(self) -> PushPlan | None:
        return self._plan if self._plan is not None and self._plan.status is PushStatus.PLANNED else None

    def _fence(self, engine_id: str, reason: str) -> None:
        if (record := self._engines.get(engine_id)) is not None:
            self._engines[engine_id] = EngineRecord(engine_id, record.worker_id, EngineStatus.FENCED, reason=reason)

    def _forget_unserved(self) -> None:
        """Drop the counts of versions that nobody serves, and nobody will."""
        floors = [record.serving_version for record in self._engines.values() if record.serving_version is not None]
        floors += [a.version for a in (self._announced, self._pushable) if a is not None]
        if (plan := self._running()) is not None:
            floors.append(plan.version)
        floor = min(floors)
        self._trained = {version: groups for version, groups in self._trained.items() if version >= floor}

    async def _note(self) -> None:
        self._revision += 1
        async with self._changed:
            self._changed.notify_all()


def _same(a: PushPlan, b: PushPlan) -> bool:
    return (a.epoch, a.version, a.generation) == (b.epoch, b.version, b.generation)
