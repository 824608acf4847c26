"""Who takes part in a weight push, and when it is over. `decide` is pure; `PushSupervisor` acts on what it says.

A push begins when an engine does not serve the newest pushable version: because the version is new, because the engine
joined (a repair push), because the trainer restarted, or because the transport broke. All engines that want weights take
part; those that serve the version already only help to move the bytes. Fenced engines take part again when they ask (join).

A plan's participants first report ready. Who does not within a third of what is left of the deadline is evicted, and the
push is planned again with the others; so a hung engine costs a third of the deadline, and the collective (whose own
time-out is a quarter) and a second plan still fit into the rest.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, replace
from typing import TypeAlias

from async_rl.errors import QueueUnavailable
from async_rl.logs import Event, get_logger
from async_rl.registry.versions import EngineStatus, PushPlan, PushStatus, RegistryState, VersionRegistry

POLL_S = 0.25  # leases and deadlines pass without a change in the registry
RETRY_S = 0.2
FORGET_S = 60.0
"""A fenced engine whose worker has held no lease for this long will not come back under its name: its record goes."""


@dataclass(frozen=True, slots=True)
class Freeze:
    """Begin a push."""

    plan: PushPlan


@dataclass(frozen=True, slots=True)
class Evict:
    """Fence engines that are late or dead."""

    engine_ids: tuple[str, ...]
    reason: str


@dataclass(frozen=True, slots=True)
class Complete:
    """End a push."""

    plan: PushPlan
    status: PushStatus


Action: TypeAlias = Freeze | Evict | Complete


def decide(state: RegistryState, alive_workers: frozenset[str], now: float, *, deadline_s: float) -> tuple[Action, ...]:
    """What to do next, to be done in this order; empty if nothing. `now` is Unix time, as in the plans."""
    dead = _evict_dead(state, alive_workers)
    plan = state.plan
    if plan is None or plan.epoch != state.epoch or plan.status in (PushStatus.LIVE, PushStatus.FAILED):
        return (*dead, *_begin(state, alive_workers, now, deadline_s))
    if plan.status is PushStatus.BROKEN:
        return (*dead, *_plan_again(state, plan, alive_workers, now))
    return (*dead, *_supervise(state, plan, alive_workers, now))


def _evict_dead(state: RegistryState, alive_workers: frozenset[str]) -> tuple[Action, ...]:
    """Engines whose worker is gone: they serve nothing, and no push waits for them."""
    names = tuple(
        sorted(
            record.engine_id
            for record in state.engines.values()
            if record.status is not EngineStatus.FENCED and record.worker_id not in alive_workers
        )
    )
    return (Evict(names, "its worker's lease ran out"),) if names else ()


def _candidates(state: RegistryState, alive_workers: frozenset[str]) -> tuple[str, ...]:
    return tuple(
        sorted(
            record.engine_id
            for record in state.engines.values()
            if record.status is not EngineStatus.FENCED and record.worker_id in alive_workers
        )
    )


def _begin(
    state: RegistryState, alive_workers: frozenset[str], now: float, deadline_s: float, *, new_group: bool = False
) -> tuple[Action, ...]:
    """A push of the newest version to all engines that want weights, if one of them lacks it."""
    engines = _candidates(state, alive_workers)
    version = state.pushable_version
    if version is None or all(_holds(state, engine_id, version) for engine_id in engines):
        return ()
    old = state.plan
    same_group = (
        not new_group
        and old is not None
        and (old.epoch, old.store_address, old.participants) == (state.epoch, state.store_address, engines)
        and all(state.engines[engine_id].status is EngineStatus.SERVING for engine_id in engines)
        and version > old.version
    )
    generation = 1 if old is None else old.generation if same_group else old.generation + 1
    return (Freeze(PushPlan(state.epoch, version, generation, engines, state.store_address, deadline_s, now)),)


def _holds(state: RegistryState, engine_id: str, version: int) -> bool:
    record = state.engines.get(engine_id)
    return record is not None and (record.status, record.serving_epoch, record.serving_version) == (
        EngineStatus.SERVING,
        state.epoch,
        version,
    )


def _supervise(state: RegistryState, plan: PushPlan, alive_workers: frozenset[str], now: float) -> tuple[Action, ...]:
    """The running plan: over, out of time, to be planned again without some, or to be waited for."""
    waiting = tuple(name for name in _unsettled(state, plan) if _is_alive(state, name, alive_workers))
    if not waiting:
        return (Complete(plan, _outcome(state, plan)),)
    waited_s = now - plan.planned_at_s
    if waited_s >= plan.deadline_s:
        return (Evict(waiting, _late(plan)), Complete(plan, _outcome(state, plan)))
    unready = tuple(name for name in plan.participants if name not in state.ready)
    if not unready:
        return ()  # the bytes are moving: whoever gets all of them confirms, and who sees the transport break says so
    if any(name in state.failed or not _is_alive(state, name, alive_workers) for name in unready):
        return _plan_again(state, plan, alive_workers, now)
    if waited_s >= plan.deadline_s / 3:
        reason = f"was not ready for version {plan.version} within {waited_s:.1f} s"
        return (Evict(unready, reason), *_plan_again(state, plan, alive_workers, now, without=unready))
    return ()


def _plan_again(
    state: RegistryState, plan: PushPlan, alive_workers: frozenset[str], now: float, *, without: tuple[str, ...] = ()
) -> tuple[Action, ...]:
    """The push once more in a new group, within what is left of its deadline; or its end, if nobody needs it any more."""
    rest = replace(state, engines={name: record for name, record in state.engines.items() if name not in without})
    newer = state.pushable_version is not None and state.pushable_version > plan.version
    left_s = plan.deadline_s if newer else plan.planned_at_s + plan.deadline_s - now
    if left_s <= 0:
        late = tuple(name for name in _unsettled(state, plan) if name in rest.engines)
        evicted: tuple[Action, ...] = (Evict(late, _late(plan)),) if late else ()
        return (*evicted, Complete(plan, _outcome(state, plan)))
    return _begin(rest, alive_workers, now, left_s, new_group=True) or (Complete(plan, _outcome(state, plan)),)


def _unsettled(state: RegistryState, plan: PushPlan) -> tuple[str, ...]:
    """Participants that still owe an answer. Who serves the version already owes none."""
    return tuple(
        name
        for name in plan.participants
        if name not in state.failed and name not in state.confirmed and not _holds(state, name, plan.version)
    )


def _is_alive(state: RegistryState, engine_id: str, alive_workers: frozenset[str]) -> bool:
    return engine_id in state.engines and state.engines[engine_id].worker_id in alive_workers


def _outcome(state: RegistryState, plan: PushPlan) -> PushStatus:
    served = any(_holds(state, name, plan.version) for name in plan.participants)
    return PushStatus.LIVE if served else PushStatus.FAILED


def _late(plan: PushPlan) -> str:
    return f"did not confirm version {plan.version} within {plan.deadline_s:.1f} s"


class PushSupervisor:
    """Decides again at every change of the registry, and acts. `alive_workers` reads the leases; `clock` is Unix time."""

    def __init__(
        self,
        registry: VersionRegistry,
        alive_workers: Callable[[], Awaitable[frozenset[str]]],
        *,
        deadline_s: float,
        clock: Callable[[], float] = time.time,
    ) -> None:
        self._registry = registry
        self._read_alive = alive_workers
        self._deadline_s = deadline_s
        self._clock = clock
        self._log = get_logger()
        self._alive: frozenset[str] = frozenset()
        self._alive_at_s = float("-inf")
        self._dead_since: dict[str, float] = {}

    async def run(self) -> None:
        """Until cancelled. A server that is away is waited for: nothing can be decided without it."""
        while True:
            try:
                state = await self._registry.state()
                if not await self.act(state):
                    await self._registry.wait_change(state.revision, timeout_s=POLL_S)
            except QueueUnavailable as error:
                self._log.debug("pushes.registry_away", error=str(error))
                await asyncio.sleep(RETRY_S)

    async def act(self, state: RegistryState) -> bool:
        """Decide upon `state` and do it. True if something was done, and the state is another."""
        alive = await self._alive_now(state)
        actions = decide(state, alive, self._clock(), deadline_s=self._deadline_s)
        done = await self._forget_dead(state, alive)
        for action in actions:
            match action:
                case Freeze(plan):
                    frozen = await self._registry.freeze(plan)
                    done = done or frozen
                    if frozen:
                        self._log.info(
                            Event.PUSH_STARTED,
                            version=plan.version,
                            generation=plan.generation,
                            engines=list(plan.participants),
                        )
                case Evict(engine_ids, reason):
                    await self._registry.evict(engine_ids, reason)
                    done = True
                    for engine_id in engine_ids:
                        self._log.warning(Event.ENGINE_EVICTED, engine_id=engine_id, reason=reason)
                case Complete(plan, status):
                    await self._registry.complete(plan, status)
                    done = True
                    self._say_completed(state, plan, status)
        return done

    async def _forget_dead(self, state: RegistryState, alive_workers: frozenset[str]) -> bool:
        """Every restart of a worker is a new engine: without this the registry would grow with each. True if one went."""
        now, before = self._clock(), self._dead_since
        fenced = (record for record in state.engines.values() if record.status is EngineStatus.FENCED)
        dead = [record.engine_id for record in fenced if record.worker_id not in alive_workers]
        self._dead_since = {engine_id: before.get(engine_id, now) for engine_id in dead}
        gone = [engine_id for engine_id, since in self._dead_since.items() if now - since >= FORGET_S]
        for engine_id in gone:
            await self._registry.leave(engine_id)
            del self._dead_since[engine_id]
        return bool(gone)

    def _say_completed(self, state: RegistryState, plan: PushPlan, status: PushStatus) -> None:
        seconds = self._clock() - plan.planned_at_s
        if status is PushStatus.LIVE:
            self._log.info(Event.PUSH_LIVE, version=plan.version, engines=len(state.confirmed), seconds=round(seconds, 4))
        else:
            self._log.error(Event.PUSH_FAILED, version=plan.version, failed=dict(state.failed), seconds=round(seconds, 4))

    async def _alive_now(self, state: RegistryState) -> frozenset[str]:
        """The leases, read again after POLL_S, or at once for an engine of a worker that they do not name."""
        wanted = (record for record in state.engines.values() if record.status is not EngineStatus.FENCED)
        unknown = any(record.worker_id not in self._alive for record in wanted)
        if unknown or self._clock() - self._alive_at_s >= POLL_S:
            self._alive = await self._read_alive()
            self._alive_at_s = self._clock()
        return self._alive
