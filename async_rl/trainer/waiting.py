"""The trainer's wait for groups: bounded, and it says for whom."""

from __future__ import annotations

import asyncio
import math
import time
from collections.abc import Awaitable, Callable

from async_rl.config.run import RunConfig
from async_rl.errors import DataError, DeadlineExceeded
from async_rl.logs import Event, get_logger
from async_rl.registry.versions import VersionRegistry
from async_rl.trainer.intake import ComposedStep, Intake
from async_rl.trainer.stragglers import StragglerWait
from protocol.streams import RunState, Streams

SAY_WAITING_S = 10.0
WAIT_SLICE_S = 1.0


class BatchWait:
    """Draws the next batch as soon as there is one.

    arrived: set by whoever takes groups in. stopping: ends the wait. idle: awaited at every slice of the wait.
    vet: looks at the waiting groups before a batch is drawn from them.
    """

    def __init__(
        self,
        config: RunConfig,
        streams: Streams,
        registry: VersionRegistry,
        *,
        idle: Callable[[], Awaitable[object]],
        vet: Callable[[Intake, int], Awaitable[object]] | None = None,
        now: Callable[[], float] = time.monotonic,
    ) -> None:
        self._config = config
        self._streams = streams
        self._registry = registry
        self._idle = idle
        self._vet = vet
        self._now = now
        self._log = get_logger()
        self._said_invalid = False
        self.vetted_s = 0.0
        """Seconds that `vet` took for the last batch; not part of the wait."""
        self.stragglers = StragglerWait(streams, config.staleness, now=now)
        self.arrived = asyncio.Event()
        self.stopping = asyncio.Event()

    def stop(self) -> None:
        """End the wait."""
        self.stopping.set()
        self.arrived.set()

    async def draw(self, intake: Intake, epoch: int, version: int, steps: int) -> tuple[list[ComposedStep], float]:
        """Wait until a batch can be drawn. An empty one: the data has ended, or stop() was called.

        Raises: DeadlineExceeded; DataError if dynamic sampling finds no group with a signal any more.
        """
        started, said = self._now(), False
        self.vetted_s = 0.0
        discarded = intake.discarded
        while not self.stopping.is_set():
            self.arrived.clear()
            batch = await self._compose_unless_held(intake, version, steps)
            if intake.discarded != discarded:  # admission replaces what was ended
                discarded = intake.discarded
                await self._streams.report(epoch, discarded=discarded)
                self._say_if_all_invalid(intake)
            if not batch and await self._data_ended():
                batch = await intake.compose_batch(version, steps=steps, partial=True)
                if not batch:
                    break
            self._require_signal(intake)
            waited = self._now() - started - self.vetted_s
            if batch:
                return batch, waited
            said = await self._keep_waiting(waited, said, intake)
        return [], self._now() - started - self.vetted_s

    def _require_signal(self, intake: Intake) -> None:
        limit = self._config.algorithm.max_groups_without_signal
        if intake.groups_without_signal >= limit:
            raise DataError(
                f"the last {intake.groups_without_signal} groups had rewards that do not differ "
                f"(algorithm.max_groups_without_signal={limit}), so dynamic sampling leaves nothing to train on: "
                f"the prompts are all solved or all too hard; use other data, or set algorithm.dynamic_sampling=false"
            )

    async def _compose_unless_held(self, intake: Intake, version: int, steps: int) -> list[ComposedStep]:
        if await self.stragglers.holds(intake, version, steps=steps):
            await intake.end_untrainable(version)
            return []
        if self._vet is not None and intake.has_batch(version, steps=steps):
            started = self._now()
            await self._vet(intake, version)
            self.vetted_s += self._now() - started
        return await intake.compose_batch(version, steps=steps, partial=False)

    async def _keep_waiting(self, waited: float, said: bool, intake: Intake) -> bool:
        """One slice of the wait for groups; says after a while, and gives up at the deadline, whom it waits for."""
        limit = math.inf if self.stragglers.is_holding else self._config.trainer.idle_timeout_s
        if waited >= limit or (waited >= SAY_WAITING_S and not said):
            whom = await self._whom_it_waits_for(intake)
            if waited >= limit:
                raise DeadlineExceeded(f"no full batch for {waited:.0f} s (trainer.idle_timeout_s={limit:g}): {whom}")
            self._log.warning(Event.WAITING, waiting_for=whom, seconds=round(waited, 1))
            said = True
        await self._idle()
        try:
            async with asyncio.timeout(WAIT_SLICE_S):
                await self.arrived.wait()
        except TimeoutError:
            pass
        return said

    async def _whom_it_waits_for(self, intake: Intake) -> str:
        counters = await self._streams.counters()
        state = await self._registry.state()
        untrained = intake.untrained.words()
        came = f"; {untrained}" if untrained else ""
        workers = {worker.worker_id for worker in await self._streams.workers() if worker.role == "rollout"}
        served = [
            f"{e.engine_id} {e.status.value}" + ("" if e.serving_version is None else f" v{e.serving_version}")
            for e in state.engines.values()
        ]
        engines = ", ".join(served) or "none"
        return (
            f"{intake.num_pending} groups waiting of {self._config.trainer.groups_per_step} needed, {counters.outstanding} "
            f"tasks outstanding of {counters.issued} issued, {len(workers)} rollout workers alive, engines: {engines}{came}"
        )

    def _say_if_all_invalid(self, intake: Intake) -> None:
        """A broken scorer uses up the data and trains nothing: said after a step's worth, not when the wait is over."""
        in_a_row = intake.untrained.invalid_in_a_row
        if in_a_row < self._config.trainer.groups_per_step:
            self._said_invalid = self._said_invalid and in_a_row > 0
        elif not self._said_invalid:
            self._said_invalid = True
            self._log.error(Event.ALL_INVALID, groups=in_a_row, reason=intake.untrained.reasons())

    async def _data_ended(self) -> bool:
        counters = await self._streams.counters()
        return counters.state is RunState.EXHAUSTED and counters.outstanding == 0 and not counters.has_losses
