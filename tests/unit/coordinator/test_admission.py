from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field, replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from async_rl.coordinator.admission import may_issue
from protocol.streams import Counters, RunState

FRESH = Counters(state=RunState.RUNNING, epoch=1, cursor=0, issued=0, discarded=0, outstanding=0)


@pytest.mark.parametrize(
    ("issued", "discarded", "trained_through", "max_lag", "groups_per_step", "expected"),
    [
        (0, 0, 0, 0, 2, 2),  # one step's groups at lag 0
        (0, 0, 0, 4, 16, 80),  # (4 + 1) · 16
        (80, 0, 0, 4, 16, 0),
        (80, 0, 16, 4, 16, 16),  # one step trained and served: its groups are free again
        (80, 3, 16, 4, 16, 19),  # what was discarded gives its room back
        (90, 0, 0, 4, 16, 0),  # never negative, when the limit was lowered between two runs
    ],
)
def test_room_is_what_the_lag_limit_leaves(
    issued: int, discarded: int, trained_through: int, max_lag: int, groups_per_step: int, expected: int
) -> None:
    counters = replace(FRESH, issued=issued, discarded=discarded)
    assert may_issue(counters, trained_through, max_lag, groups_per_step) == expected


def test_nothing_is_issued_while_no_healthy_engine_serves() -> None:
    assert may_issue(FRESH, None, 4, 16) == 0


@pytest.mark.parametrize("state", [RunState.NEW, RunState.EXHAUSTED, RunState.ENDED])
def test_nothing_is_issued_unless_the_run_is_running(state: RunState) -> None:
    assert may_issue(replace(FRESH, state=state), 0, 4, 16) == 0


def test_no_more_is_issued_than_the_run_can_train() -> None:
    # 10 steps of 4 need 40 groups; 38 of 41 issued ones were not discarded.
    counters = replace(FRESH, issued=41, discarded=3)
    assert may_issue(counters, 36, 4, 4, groups_needed=40) == 2


def test_limit_zero_completes_its_batch_after_a_rejected_group() -> None:
    # Batch of 2 at lag 0, two workers with one group each. One is rejected: its room comes back at once, whole.
    counters = replace(FRESH, issued=2)
    assert may_issue(counters, 0, 0, 2) == 0
    counters = replace(counters, discarded=1)
    assert may_issue(counters, 0, 0, 2) == 1
    counters = replace(counters, issued=3)
    assert may_issue(counters, 0, 0, 2) == 0
    # The batch of two trains, version 1 is served: exactly the next batch fits.
    assert may_issue(counters, 2, 0, 2) == 2


@settings(max_examples=80, deadline=None)
@given(data=st.data(), max_lag=st.integers(0, 5), groups_per_step=st.integers(1, 7), push_every=st.integers(1, 4))
def test_outstanding_work_is_bounded_and_the_run_never_stalls(
    data: st.DataObject, max_lag: int, groups_per_step: int, push_every: int
) -> None:
    """Any order of finishing, discarding, training and serving: the bound holds, and training can always go on."""
    push_every = min(push_every, max_lag + 1)  # push_every + steps_per_batch - 2 <= max_lag is checked at start
    steps_per_batch = data.draw(st.integers(1, max_lag + 2 - push_every), label="steps_per_batch")
    counters, version, served, ready = FRESH, 0, 0, 0
    for _ in range(40):
        room = may_issue(counters, served * groups_per_step, max_lag, groups_per_step)
        counters = replace(counters, issued=counters.issued + room, outstanding=counters.outstanding + room)
        untrained = counters.issued - counters.discarded - version * groups_per_step
        assert untrained <= (max_lag + 1) * groups_per_step
        assert untrained >= steps_per_batch * groups_per_step  # a whole batch is always on its way
        in_flight = untrained - ready
        finished = data.draw(st.integers(0, in_flight), label="finished")
        rejected = data.draw(st.integers(0, finished), label="rejected")
        counters = replace(counters, discarded=counters.discarded + rejected)
        ready += finished - rejected
        if ready >= steps_per_batch * groups_per_step:
            ready -= steps_per_batch * groups_per_step
            for _ in range(steps_per_batch):
                version += 1
                served = version if version % push_every == 0 else served


@dataclass
class _Simulation:
    """Trainer steps of one time unit; odd tasks take `slow` units to sample, even ones 1; each version is served at once.

    A step trains the oldest work that is ready; what is older than max_lag is dropped. Workers are never short.
    """

    max_lag: int
    groups_per_step: int
    slow: int = 3
    version: int = 0
    seconds: int = 0
    in_flight: list[tuple[int, int, int]] = field(default_factory=list)  # (started at version, number, ready at)
    trained: Counter[str] = field(default_factory=Counter)
    dropped: Counter[str] = field(default_factory=Counter)
    counters: Counters = FRESH

    def run(self, steps: int) -> None:
        while self.version < steps:
            self._issue()
            self.seconds += 1
            ready = sorted(task for task in self.in_flight if task[2] <= self.seconds)
            for task in ready:
                if self.version - task[0] > self.max_lag:
                    self.in_flight.remove(task)
                    self.dropped[_kind(task)] += 1
                    self.counters = replace(self.counters, discarded=self.counters.discarded + 1)
            batch = [task for task in ready if task in self.in_flight][: self.groups_per_step]
            if len(batch) == self.groups_per_step:
                self.in_flight = [task for task in self.in_flight if task not in batch]
                self.trained.update(map(_kind, batch))
                self.version += 1

    def slow_share(self) -> float:
        return self.trained["slow"] / self.trained.total()

    def _issue(self) -> None:
        room = may_issue(self.counters, self.version * self.groups_per_step, self.max_lag, self.groups_per_step)
        for number in range(self.counters.issued, self.counters.issued + room):
            self.in_flight.append((self.version, number, self.seconds + (self.slow if number % 2 else 1)))
        self.counters = replace(self.counters, issued=self.counters.issued + room)


def _kind(task: tuple[int, int, int]) -> str:
    return "slow" if task[1] % 2 else "fast"


def test_slow_prompts_keep_their_half_where_the_limit_covers_their_age() -> None:
    """Limit 0: a step waits for its own batch, slow half included, which takes 3 units. Limit 2 covers 3 units of age."""
    synchronous = _Simulation(max_lag=0, groups_per_step=8)
    synchronous.run(200)
    assert (synchronous.slow_share(), synchronous.dropped.total(), synchronous.seconds) == (0.5, 0, 600)
    covered = _Simulation(max_lag=3, groups_per_step=8)
    covered.run(200)
    assert abs(covered.slow_share() - 0.5) < 0.02
    assert covered.dropped.total() == 0


def test_slow_prompts_stay_near_half_at_limit_one_and_the_deficit_is_counted() -> None:
    """Slow work that is overtaken ages out and is dropped, counted and replaced; nothing is tried again for ever."""
    simulation = _Simulation(max_lag=1, groups_per_step=8)
    simulation.run(400)
    assert 0.4 <= simulation.slow_share() < 0.5
    assert simulation.dropped["fast"] == 0
    # Every issued task is accounted for, and the deficit is what was dropped: of all ended work, half was slow.
    ended_slow = simulation.trained["slow"] + simulation.dropped["slow"]
    assert abs(ended_slow - simulation.trained["fast"]) <= 16  # what is in flight at the end
    assert simulation.counters.issued == simulation.trained.total() + simulation.dropped.total() + len(simulation.in_flight)
