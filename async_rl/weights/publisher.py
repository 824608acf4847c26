"""The trainer's end of weight pushes: announces versions, and moves bytes when the coordinator has planned a push.

`submit` returns at once and training goes on; of what waits, only the newest is announced. Snapshots are kept while their
version may be asked for: the newest announced one (late joiners get it) and the one that a running plan names.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import TypeVar

from async_rl.config.run import RunConfig
from async_rl.errors import QueueUnavailable, WeightPushError
from async_rl.logs import Event, get_logger
from async_rl.registry.versions import Announcement, FinishedPush, PushPlan, PushStatus, RegistryState, VersionRegistry
from async_rl.weights.backends import Sender, make_sender
from async_rl.weights.manifest import Canary, Manifest, Probe, Tolerance, encode_manifest
from async_rl.weights.rates import memcpy_bytes_per_s
from async_rl.weights.send_buffer import SendBuffer

RETRY_S = 0.2
WAIT_S = 5.0
DIGESTED_AT_ONCE_BYTES = 8 * 2**20
"""Digests of so much take a millisecond or two."""

T = TypeVar("T")


@dataclass(frozen=True, slots=True, eq=False)
class PushRequest:
    """A version to push, and what its announcement says. The publisher owns the snapshot from here on."""

    version: int
    snapshot: SendBuffer
    probe: Probe
    trained_through: int
    discarded: int
    blocked_s: float = 0.0  # how long the trainer stood still for snapshot and probe
    tolerance: Tolerance | None = None  # of the proof; None: the maximum, within weights.probe_tolerance
    canary: Canary | None = None  # for engines that take their first push


@dataclass(frozen=True, slots=True)
class PushStats:
    """How one push went. `parity_*` are over the engines that proved it; None if none did.

    seconds: blocked (the trainer stood still: probe, gather, cast), gather, cast, digest, plan, ready, send, confirm, total;
    and of the slowest engine engine_receive, engine_swap, engine_digest, engine_probe, engine_paused, engine_canary.
    memcpy_bytes_per_s: what the trainer's machine copies, the limit of a push on one host.
    """

    backend: str
    epoch: int
    version: int
    generation: int
    live: bool
    num_bytes: int
    engines: tuple[str, ...]  # confirmed
    failed: dict[str, str]  # engine id → reason
    parity_max_abs: float | None
    parity_mean_abs: float | None
    parity_tokens: int
    seconds: dict[str, float]
    memcpy_bytes_per_s: float | None = None

    @property
    def bytes_per_s(self) -> float | None:
        """Of the move itself: from the moment that all are ready until the slowest engine holds the weights."""
        moving = self.seconds.get("engine_receive", 0.0) + self.seconds.get("engine_swap", 0.0)
        return self.num_bytes / moving if moving > 0 else None

    def to_record(self) -> dict[str, object]:
        """As a JSON object for metrics.jsonl."""
        return {
            "backend": self.backend,
            "epoch": self.epoch,
            "version": self.version,
            "generation": self.generation,
            "live": self.live,
            "bytes": self.num_bytes,
            "bytes_per_s": self.bytes_per_s,
            "memcpy_bytes_per_s": self.memcpy_bytes_per_s,
            "engines": list(self.engines),
            "failed": dict(self.failed),
            "parity_max_abs": self.parity_max_abs,
            "parity_mean_abs": self.parity_mean_abs,
            "parity_tokens": self.parity_tokens,
            "seconds": {phase: round(seconds, 6) for phase, seconds in self.seconds.items()},
        }


@dataclass(slots=True, eq=False)
class _Kept:
    """A version that may still be asked for, and when what happened to it (monotonic seconds)."""

    request: PushRequest
    manifest: Manifest
    submitted_at: float
    digest_s: float
    at: dict[str, float] = field(default_factory=dict)  # announced, planned, sending, sent


class Publisher:
    """Rank 0's publisher. `run` beside the training loop; `submit` and `announce` from it.

    `on_complete` is called in the event loop for every plan of this epoch that ended (repair pushes too).
    """

    def __init__(
        self,
        registry: VersionRegistry,
        config: RunConfig,
        *,
        epoch: int,
        on_complete: Callable[[PushStats], object] = lambda stats: None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._registry = registry
        self._weights = config.weights
        self._epoch = epoch
        self._on_complete = on_complete
        self._clock = clock
        self._log = get_logger()
        self._sender: Sender = make_sender(config.weights, Path(config.run_dir) / "weights")
        self._memcpy: float | None = None
        self._waiting: tuple[PushRequest, float] | None = None
        self._submitted = asyncio.Event()
        self._newest: int | None = None
        self._announced: Announcement | None = None  # the newest push that the registry took
        self._kept: dict[int, _Kept] = {}
        self._started: tuple[int, int] | None = None  # version, generation of the plan that was sent, or tried
        self._finished: tuple[int, int] | None = None
        self._ended = asyncio.Condition()

    async def submit(self, request: PushRequest) -> None:
        """Push this version as soon as may be; one that still waits to be announced is given up for it."""
        if self._waiting is not None:
            self._waiting[0].snapshot.release()
        self._waiting = (request, self._clock())
        self._newest = request.version
        self._submitted.set()

    async def announce(self, version: int, *, trained_through: int, discarded: int) -> None:
        """Make a version known that is not pushed. Raises: EpochFenced, QueueUnavailable."""
        await self._registry.announce(Announcement(self._epoch, version, trained_through, discarded, None))

    async def drain(self, *, timeout_s: float) -> bool:
        """Wait until the push of the newest submitted version has ended. False if it has not within `timeout_s`."""
        if self._newest is None:
            return True
        newest = self._newest
        try:
            async with asyncio.timeout(timeout_s), self._ended:
                await self._ended.wait_for(lambda: self._finished is not None and self._finished[0] >= newest)
        except TimeoutError:
            return False
        return True

    def close(self) -> None:
        """Let go of the process group."""
        self._sender.close()

    async def run(self) -> None:
        """Until cancelled. Raises: EpochFenced when a newer trainer has started; WeightPushError if a version cannot be
        prepared (a full disk)."""
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(self._announce_submitted())
            tasks.create_task(self._follow_plans())

    # -- announcing --------------------------------------------------------------------------------------------------
    async def _announce_submitted(self) -> None:
        self._memcpy = await asyncio.to_thread(memcpy_bytes_per_s)
        while True:
            await self._submitted.wait()
            self._submitted.clear()
            if self._waiting is None:
                continue
            (request, submitted_at), self._waiting = self._waiting, None
            started = self._clock()
            manifest = await self._prepare(request)
            kept = _Kept(request, manifest, submitted_at, self._clock() - started)
            self._kept[request.version] = kept
            kept.at["announced"] = self._clock()
            push = encode_manifest(manifest)
            announcement = Announcement(
                self._epoch, request.version, request.trained_through, request.discarded, push, self._sender.address
            )
            await self._insist(partial(self._registry.announce, announcement))
            self._announced = announcement
            self._log.info(
                Event.VERSION_ANNOUNCED, version=request.version, epoch=self._epoch, bytes=request.snapshot.num_bytes
            )

    async def _prepare(self, request: PushRequest) -> Manifest:
        describe = partial(
            request.snapshot.manifest,
            epoch=self._epoch,
            version=request.version,
            probe=request.probe,
            tolerance=request.tolerance or Tolerance(self._weights.probe_tolerance),
            canary=request.canary,
        )
        # Another thread has to wait for the interpreter's lock first, beside a step that takes it all the time.
        small = request.snapshot.num_bytes <= DIGESTED_AT_ONCE_BYTES
        manifest = describe() if small else await asyncio.to_thread(describe)
        return await asyncio.to_thread(self._sender.prepare, manifest, request.snapshot)

    # -- pushing -----------------------------------------------------------------------------------------------------
    async def _follow_plans(self) -> None:
        while True:
            state = await self._insist(self._registry.state)
            await self._note_finished(state.finished)
            await self._forget(state)
            await self._remind(state)
            plan = state.plan
            if plan is not None and plan.epoch == self._epoch and plan.status is PushStatus.PLANNED:
                self._mark(plan, "planned")
                key = (plan.version, plan.generation)
                if key != self._started and state.ready.issuperset(plan.participants):
                    self._started = key
                    await self._send(plan)
            await self._insist(partial(self._registry.wait_change, state.revision, timeout_s=WAIT_S))

    async def _send(self, plan: PushPlan) -> None:
        kept = self._kept.get(plan.version)
        try:
            if kept is None:
                raise WeightPushError(f"version {plan.version} is not kept any more")
            self._mark(plan, "sending")
            await asyncio.to_thread(self._sender.send, plan, kept.request.snapshot)
            self._mark(plan, "sent")
        except WeightPushError as error:
            self._sender.reset()
            reason = f"publisher: {error}"
            self._log.warning("push.interrupted", version=plan.version, generation=plan.generation, reason=reason)
            await self._insist(partial(self._registry.interrupt, plan, reason))

    def _mark(self, plan: PushPlan, what: str) -> None:
        if (kept := self._kept.get(plan.version)) is not None:
            kept.at.setdefault(what, self._clock())

    async def _note_finished(self, finished: FinishedPush | None) -> None:
        """Report a plan that ended, once."""
        if finished is None or finished.plan.epoch != self._epoch:
            return
        key = (finished.plan.version, finished.plan.generation)
        if key == self._finished:
            return
        if (kept := self._kept.get(finished.plan.version)) is not None:
            stats = _stats(finished, kept, self._clock(), self._weights.backend)
            self._on_complete(replace(stats, memcpy_bytes_per_s=self._memcpy))
            kept.at = {}  # a repair push is measured by itself
        async with self._ended:
            self._finished = key
            self._ended.notify_all()

    async def _forget(self, state: RegistryState) -> None:
        """Release snapshots that nobody will ask for: neither announced last, nor newer (on its way), nor planned."""
        plan = state.plan
        running = plan.version if plan is not None and plan.epoch == self._epoch and plan.status is PushStatus.PLANNED else None
        newest = state.pushable_version
        if newest is None:
            return
        gone = [version for version in self._kept if version < newest and version != running]
        for version in gone:
            self._kept.pop(version).request.snapshot.release()
        if gone:
            await asyncio.to_thread(self._sender.forget, frozenset(self._kept))

    async def _remind(self, state: RegistryState) -> None:
        """A server that came back without the newest push is told again: its snapshot is still here."""
        newest = self._announced
        if newest is None or state.epoch > self._epoch:
            return
        if state.pushable_version is None or state.pushable_version < newest.version:
            await self._insist(partial(self._registry.announce, newest))

    async def _insist(self, call: Callable[[], Awaitable[T]]) -> T:
        """Ask the registry until it answers: training goes on meanwhile, and says itself when the queue stays away."""
        while True:
            try:
                return await call()
            except QueueUnavailable as error:
                self._log.debug("publisher.registry_away", error=str(error))
                await asyncio.sleep(RETRY_S)


def _stats(finished: FinishedPush, kept: _Kept, now: float, backend: str) -> PushStats:
    proofs = list(finished.confirmed.values())
    tokens = sum(proof.parity_tokens for proof in proofs)
    weighted = sum(proof.parity_mean_abs * proof.parity_tokens for proof in proofs)
    return PushStats(
        backend=backend,
        epoch=finished.plan.epoch,
        version=finished.plan.version,
        generation=finished.plan.generation,
        live=finished.plan.status is PushStatus.LIVE,
        num_bytes=kept.request.snapshot.num_bytes,
        engines=tuple(sorted(finished.confirmed)),
        failed=dict(finished.failed),
        parity_max_abs=max((proof.parity_max_abs for proof in proofs), default=None),
        parity_mean_abs=weighted / tokens if tokens else None,
        parity_tokens=tokens,
        seconds=_phases(finished, kept, now),
    )


def _phases(finished: FinishedPush, kept: _Kept, now: float) -> dict[str, float]:
    """Seconds of each phase; of those that engines measured, the slowest engine's."""
    snapshot = kept.request.snapshot
    seconds = {
        "blocked": kept.request.blocked_s,
        "gather": snapshot.gather_s,
        "cast": snapshot.cast_s,
        "digest": kept.digest_s,
    }
    marks = [("announced", "plan"), ("planned", "ready"), ("sending", "send"), ("sent", "confirm")]
    times = [kept.at.get(mark) for mark, _ in marks] + [now]
    for (_, phase), begin, end in zip(marks, times, times[1:], strict=False):
        if begin is not None and end is not None:
            seconds[phase] = end - begin
    for proof in finished.confirmed.values():
        for phase, value in proof.seconds.items():
            seconds[f"engine_{phase}"] = max(value, seconds.get(f"engine_{phase}", 0.0))
    begun = kept.submitted_at if "announced" in kept.at else kept.at.get("planned", now)
    return {**seconds, "total": now - begun}
