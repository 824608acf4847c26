"""`staleness.stragglers = "wait"`: a step that has its groups is held while it would make others too old to train.

The rule is `algorithms.staleness.must_wait_for`; here it meets the queue, which knows what was started, and the clock. It never
holds a step for ever: a worker whose loop hangs loses its lease, and its tasks with it; a task whose worker lives but does not
come is given up after `staleness.wait_timeout_s`, and treated as `staleness.on_wait_timeout` says if it comes after all.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Mapping

from async_rl.config.trainer import StalenessConfig
from async_rl.logs import Event, get_logger
from async_rl.trainer.intake import Intake
from protocol.streams import Started, Streams

SAY_WAITING_S = 10.0


class StragglerWait:
    """Decides, for one trainer, whether a batch waits. `now` is in seconds."""

    def __init__(self, streams: Streams, config: StalenessConfig, *, now: Callable[[], float] = time.monotonic) -> None:
        self._streams = streams
        self._config = config
        self._now = now
        self._log = get_logger()
        self._since: float | None = None
        self._said = False
        self._waited_s = 0.0
        self._given_up: set[tuple[str, int]] = set()  # (task id, version): begun again, it is waited for again

    async def holds(self, intake: Intake, version: int, *, steps: int) -> bool:
        """True if the batch of `steps` steps that could be drawn at `version` must wait for a straggler."""
        if self._config.stragglers != "wait" or not intake.has_batch(version, steps=steps):
            return False
        started = await self._streams.in_flight()
        self._given_up &= {(task_id, one.version) for task_id, one in started.items()}
        waited_for = intake.waits_for(
            {task_id: one.version for task_id, one in started.items() if (task_id, one.version) not in self._given_up},
            version,
            steps=steps,
        )
        now = self._now()
        if not waited_for:
            self._end(now)
            return False
        if self._since is None:
            self._since = now
        elapsed = now - self._since
        if elapsed < self._config.wait_timeout_s:
            self._say(waited_for, started, version, elapsed)
            return True
        self._give_up(waited_for, started, version, elapsed)
        self._end(now)
        return False

    @property
    def is_holding(self) -> bool:
        return self._since is not None

    def take_waited_s(self) -> float:
        """Seconds that steps were held since the last call."""
        waited, self._waited_s = self._waited_s, 0.0
        return waited

    def _end(self, now: float) -> None:
        if self._since is not None:
            self._waited_s += now - self._since
        self._since, self._said = None, False

    def _say(self, waited_for: Collection[str], started: Mapping[str, Started], version: int, elapsed: float) -> None:
        if elapsed < SAY_WAITING_S or self._said:
            return
        self._said = True
        self._log.warning(Event.WAITING, waiting_for=_named(waited_for, started), version=version, seconds=round(elapsed, 1))

    def _give_up(self, waited_for: Collection[str], started: Mapping[str, Started], version: int, elapsed: float) -> None:
        self._given_up |= {(task_id, started[task_id].version) for task_id in waited_for}
        self._log.warning(
            Event.STRAGGLERS_GIVEN_UP,
            stragglers=_named(waited_for, started),
            version=version,
            seconds=round(elapsed, 1),
            wait_timeout_s=self._config.wait_timeout_s,
            on_wait_timeout=self._config.on_wait_timeout,
        )


def _named(task_ids: Collection[str], started: Mapping[str, Started]) -> list[str]:
    return [f"task {name} of {started[name].worker_id}, begun at version {started[name].version}" for name in task_ids]
