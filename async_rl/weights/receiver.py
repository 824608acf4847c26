"""The engine's end of weight pushes: takes part in the plans that name it, proves what it got, and only then serves it.

What never happens: serving without a confirmed proof, serving a lower epoch, going back to a lower version. An engine that the
registry has fenced stops sampling and asks for a complete push.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Mapping
from dataclasses import replace

import torch

from async_rl.config.trainer import WeightsConfig
from async_rl.errors import ManifestMismatch, ProofFailed, QueueUnavailable, WeightPushError
from async_rl.logs import Event, get_logger
from async_rl.registry.versions import (
    EngineRecord,
    EngineStatus,
    ProofReport,
    PushPlan,
    PushStatus,
    RegistryState,
    VersionRegistry,
)
from async_rl.weights import backends
from async_rl.weights.canary import try_canary
from async_rl.weights.interfaces import PushTarget
from async_rl.weights.manifest import Manifest, decode_manifest
from async_rl.weights.proof import prove

RETRY_S = 0.2
WAIT_S = 1.0
MAX_BACKOFF_DEADLINES = 8

_PlanKey = tuple[int, int, int]


class Receiver:
    """Keeps one engine at the newest version. `run` beside the engine's work, in the same event loop.

    `backend`: how bytes arrive, if not as `weights.backend` says.
    """

    def __init__(
        self,
        engine: PushTarget,
        registry: VersionRegistry,
        config: WeightsConfig,
        *,
        engine_id: str,
        worker_id: str,
        backend: backends.Receiver | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._engine = engine
        self._registry = registry
        self._deadline_s = config.deadline_s
        self._engine_id = engine_id
        self._worker_id = worker_id
        self._clock = clock
        self._log = get_logger().bind(engine_id=engine_id)
        self._backend = backend or backends.make_receiver(config)
        self._joined = False
        self._epoch = 0  # highest that pushed here
        self._version = -1  # highest served
        self._canary_passed = False
        self._serving: tuple[int, int] | None = None  # epoch and version that are held, proven and served
        self._manifest: Manifest | None = None  # of the plan that was prepared
        self._prepared: _PlanKey | None = None
        self._done: _PlanKey | None = None
        self._lost_group: tuple[int, int] | None = None  # epoch, generation
        self._failures = 0
        self._refused: tuple[int, int | None] | None = None  # epoch and version that this engine reported as failed
        self._rejoin_at: float | None = None

    async def run(self) -> None:
        """Until cancelled. A registry that is away is waited for; what is served meanwhile stays served.

        Raises: what the engine raises when it is broken (its failure is in the registry then).
        """
        try:
            while True:
                try:
                    state = await self._registry.state()
                    if not await self._step(state):
                        await self._registry.wait_change(state.revision, timeout_s=self._patience_s())
                except QueueUnavailable as error:
                    self._log.debug("receiver.registry_away", error=str(error))
                    await asyncio.sleep(RETRY_S)
        finally:
            self._backend.close()

    async def _step(self, state: RegistryState) -> bool:
        """React to a state. True if something was done; then the state is another."""
        record = state.engines.get(self._engine_id)
        if record is None or record.worker_id != self._worker_id or not self._joined:
            return await self._join(record)
        if record.status is EngineStatus.FENCED:
            return await self._ask_again(record, state)
        plan = state.plan
        if plan is None or plan.status is not PushStatus.PLANNED or self._engine_id not in plan.participants:
            return False
        if plan.epoch < state.epoch:  # its publisher is gone: a newer trainer has started
            return False
        key = (plan.epoch, plan.version, plan.generation)
        if key == self._done or self._engine_id in state.failed:
            return False
        if key != self._prepared:
            await self._prepare(plan, key)
            return True
        if not state.ready.issuperset(plan.participants):
            return False
        self._done = key
        await self._take(plan, self._manifest)
        return True

    # -- membership --------------------------------------------------------------------------------------------------
    async def _join(self, record: EngineRecord | None) -> bool:
        """Enter the registry (the worker may have done so already), also after it lost its data."""
        known = record is not None and record.worker_id == self._worker_id and record.status is EngineStatus.JOINING
        if not known:
            await self._registry.join(self._engine_id, self._worker_id)
        self._joined = True
        self._prepared = self._done = None
        self._serving = None  # to the registry it holds nothing proven: it takes the next push whole
        return not known

    async def _ask_again(self, record: EngineRecord, state: RegistryState) -> bool:
        """Fenced: sample nothing, and ask for a complete push. At once the first time, then ever later; but who said itself
        what was wrong (so it does not hang) asks again at the next version."""
        if self._rejoin_at is None:
            self._log.error(Event.ENGINE_FENCED, reason=record.reason)
            self._serving = None
            await self._engine.withdraw(record.reason)
            self._rejoin_at = self._clock() + self._deadline_s * min(2**self._failures - 1, MAX_BACKOFF_DEADLINES)
            self._failures += 1
        newest = (state.epoch, state.pushable_version)
        other_version = self._refused is not None and state.pushable_version is not None and newest != self._refused
        if self._clock() < self._rejoin_at and not other_version:
            return False
        self._rejoin_at = self._refused = None
        return await self._join(None)

    def _patience_s(self) -> float:
        return WAIT_S if self._rejoin_at is None else max(0.01, min(WAIT_S, self._rejoin_at - self._clock()))

    # -- a push ------------------------------------------------------------------------------------------------------
    async def _prepare(self, plan: PushPlan, key: _PlanKey) -> None:
        """Check the manifest before any receive is posted, then report ready."""
        if self._lost_group == (plan.epoch, plan.generation):
            await self._registry.interrupt(plan, f"{self._engine_id}: lost its group at an earlier push")
            self._done = key
            return
        try:
            data = await self._registry.manifest(plan.epoch, plan.version)
            if data is None:
                raise ManifestMismatch(f"version {plan.version} of epoch {plan.epoch} is planned, but has no manifest")
            manifest = decode_manifest(data)
            self._refuse_older(plan, manifest)
            self._engine.check(manifest)
        except WeightPushError as error:
            await self._fail(plan, str(error))
            self._done = key
            return
        await self._registry.ready(self._engine_id, plan)
        self._epoch, self._manifest, self._prepared = plan.epoch, manifest, key

    def _refuse_older(self, plan: PushPlan, manifest: Manifest) -> None:
        if (manifest.epoch, manifest.version) != (plan.epoch, plan.version):
            raise ManifestMismatch(
                f"the manifest says epoch {manifest.epoch} version {manifest.version}, "
                f"the plan epoch {plan.epoch} version {plan.version}"
            )
        if plan.epoch < self._epoch:
            raise WeightPushError(
                f"epoch {plan.epoch} is older than {self._epoch}, which pushed here before: stop the old trainer"
            )
        if plan.version < self._version:
            raise WeightPushError(
                f"version {plan.version} (epoch {plan.epoch}) is below {self._version}, which was served here: an engine never "
                "goes back; resume the run from its intake log, or start another run id"
            )

    async def _take(self, plan: PushPlan, manifest: Manifest | None) -> None:
        """Receive; swap, prove, confirm and serve, unless this version is served already (then it only helped)."""
        assert manifest is not None
        started = self._clock()
        try:
            tensors = await asyncio.to_thread(self._backend.receive, plan, self._engine_id, manifest)
        except ManifestMismatch as error:  # this engine cannot have it; the others can
            await self._fail(plan, str(error))
            return
        except WeightPushError as error:
            self._backend.reset()
            self._lost_group = (plan.epoch, plan.generation)
            self._log.warning("push.interrupted", version=plan.version, generation=plan.generation, reason=str(error))
            await self._registry.interrupt(plan, f"{self._engine_id}: {error}")
            return
        if self._serving == (plan.epoch, plan.version):
            return
        received = self._clock()
        report = await self._swap_and_prove(plan, manifest, tensors)
        if report is None:
            return
        seconds = {"receive": received - started, "paused": self._clock() - received, **report.seconds}
        if await self._confirm(plan, replace(report, seconds=seconds)):
            await self._engine.serve(plan.version)
            self._serving = (plan.epoch, plan.version)
            self._version = plan.version
            self._failures = 0
            self._log.info(
                Event.ENGINE_SERVING,
                version=plan.version,
                epoch=plan.epoch,
                parity_max_abs=report.parity_max_abs,
                paused_s=round(self._clock() - received, 4),
            )
        else:
            await self._not_confirmed(plan)

    async def _swap_and_prove(
        self, plan: PushPlan, manifest: Manifest, tensors: Mapping[str, torch.Tensor]
    ) -> ProofReport | None:
        """None: failed, withdrawn and reported."""
        self._serving = None
        started = self._clock()
        try:
            if not self._canary_passed:
                await try_canary(manifest, self._engine, tensors)
                self._canary_passed = manifest.canary is not None
            swapping = self._clock()
            await self._engine.swap(manifest, tensors)
            swapped = self._clock()
            report = await prove(manifest, self._engine)
        except (ManifestMismatch, ProofFailed) as error:
            await self._engine.withdraw(str(error))
            await self._fail(plan, str(error))
            return None
        except Exception as error:
            reason = f"{type(error).__name__}: {error}"
            await self._fail(plan, f"the engine broke: {reason}")
            raise
        seconds = {"swap": swapped - swapping, **report.seconds}
        return replace(report, seconds={**seconds, "canary": swapping - started} if swapping > started else seconds)

    async def _fail(self, plan: PushPlan, reason: str) -> None:
        self._refused = (plan.epoch, plan.version)
        await self._registry.fail(self._engine_id, plan.epoch, plan.version, reason)

    async def _confirm(self, plan: PushPlan, report: ProofReport) -> bool:
        """Ask until the push's deadline; an answer that got lost is asked for again, and stays the same."""
        end = self._clock() + plan.deadline_s
        while True:
            try:
                return await self._registry.confirm(self._engine_id, plan.epoch, plan.version, report)
            except QueueUnavailable:
                if self._clock() >= end:
                    return False
                await asyncio.sleep(RETRY_S)

    async def _not_confirmed(self, plan: PushPlan) -> None:
        """The registry did not take the proof: stay paused for a newer plan that names this engine, else stop sampling."""
        reason = f"version {plan.version} was not confirmed: the push had ended without this engine"
        try:
            state = await self._registry.state()
            record, newest = state.engines.get(self._engine_id), state.plan
            superseded = (
                newest is not None
                and newest.status is PushStatus.PLANNED
                and newest.version > plan.version
                and self._engine_id in newest.participants
            )
            if record is not None and record.status is not EngineStatus.FENCED and superseded:
                return
        except QueueUnavailable as error:
            reason = f"{reason} ({error})"
        self._log.warning("push.not_confirmed", version=plan.version, reason=reason)
        await self._engine.withdraw(reason)
        self._joined = False  # comes back as one that holds nothing proven
