"""The rule of `stragglers = wait`, by hand, and as a model: any order of starting, arriving, dying and training."""

from __future__ import annotations

from dataclasses import dataclass, field, replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from async_rl.algorithms.staleness import must_wait_for, oldest_version
from async_rl.coordinator.admission import may_issue
from async_rl.testing.builders import make_group, make_trajectory
from protocol.streams import Counters, RunState


@pytest.mark.parametrize(
    ("in_flight", "arrived", "version", "max_lag", "expected"),
    [
        ({"a": 2, "b": 3}, [3, 3], 3, 1, ("a",)),  # at version 4 a is 2 behind
        ({"y": 3, "b": 3}, [2, 3], 3, 1, ()),  # both of version 3 fit into the step at version 4
        ({"a": 3, "b": 3, "c": 3}, [3, 4], 4, 1, ("a", "b", "c")),  # none of them could train at version 5
        ({"a": 3, "b": 4}, [2, 2], 3, 1, ()),  # the batch is full of older ones: waiting changes nothing
        ({"a": 1}, [3, 3], 3, 1, ()),  # too old already: waiting cannot help
        ({"a": 0, "b": 0, "c": 0}, [1, 1], 0, 2, ()),  # after the step: 2 steps are left for 3 groups
        ({"a": 0, "b": 0, "c": 0}, [1, 1], 1, 2, ("a", "b", "c")),  # after the step: one step for 3 groups
        ({"a": 0}, [0, 0], 0, 0, ()),  # as old as what is drawn
        ({}, [0, 0], 0, 0, ()),
    ],
)
def test_a_step_waits_only_for_what_it_would_make_too_old_and_could_train_instead(
    in_flight: dict[str, int], arrived: list[int], version: int, max_lag: int, expected: tuple[str, ...]
) -> None:
    waited_for = must_wait_for(in_flight, arrived, current_version=version, max_lag=max_lag, groups_per_step=2)
    assert waited_for == expected


def test_a_batch_of_several_steps_counts_all_its_steps() -> None:
    # Two steps of one group at version 5, max_lag 1: after them the trainer is at 7, and a (version 5) would be 2 behind.
    rule = {"current_version": 5, "max_lag": 1, "groups_per_step": 1}
    assert must_wait_for({"a": 5}, [6, 6], steps=2, **rule) == ("a",)
    assert must_wait_for({"a": 5}, [6, 6], steps=1, **rule) == ()


def test_a_group_is_as_old_as_its_oldest_token_or_its_start() -> None:
    mixed = make_group([make_trajectory(versions=[5, 5, 6, 7]), make_trajectory(versions=6)], started_version=5)
    assert oldest_version(mixed) == 5
    kept = make_group([make_trajectory(versions=7, kv_versions=4)], started_version=4)
    assert oldest_version(kept) == 4
    assert oldest_version(make_group([make_trajectory(turns=(), versions=())], started_version=3)) == 3


@dataclass
class _Model:
    """Admission, engines that start and lose tasks, pushes that lag, a trainer that draws oldest first and may be held."""

    max_lag: int
    groups_per_step: int
    steps: int
    push_every: int
    version: int = 0
    served: int = 0
    waiting: int = 0  # issued, not started
    in_flight: dict[str, int] = field(default_factory=dict)
    arrived: dict[str, int] = field(default_factory=dict)
    lags: list[int] = field(default_factory=list)
    names: int = 0
    counters: Counters = field(default_factory=lambda: Counters(RunState.RUNNING, 1, 0, 0, 0, 0))

    def issue(self) -> None:
        room = may_issue(self.counters, self.served * self.groups_per_step, self.max_lag, self.groups_per_step)
        self.counters = replace(self.counters, issued=self.counters.issued + room)
        self.waiting += room

    def start(self, count: int) -> None:
        for _ in range(min(count, self.waiting)):
            self.names += 1
            self.waiting -= 1
            self.in_flight[f"{self.names:05d}"] = self.served

    def arrive(self, names: list[str]) -> None:
        for name in names:
            self.arrived[name] = self.in_flight.pop(name)

    def die(self, name: str) -> None:
        """Its worker lost its lease: somebody will begin it again."""
        del self.in_flight[name]
        self.waiting += 1

    def invalid(self, name: str) -> None:
        """It arrived and can never train."""
        del self.in_flight[name]
        self.counters = replace(self.counters, discarded=self.counters.discarded + 1)

    def train(self) -> bool:
        wanted = self.groups_per_step * self.steps
        if len(self.arrived) < wanted or self.held():
            return False
        drawn = sorted(self.arrived, key=lambda name: self.arrived[name])[:wanted]
        for number, name in enumerate(drawn):
            self.lags.append(self.version + number // self.groups_per_step - self.arrived.pop(name))
        for _ in range(self.steps):
            self.version += 1
            self.served = self.version if self.version % self.push_every == 0 else self.served
        return True

    def held(self) -> tuple[str, ...]:
        return must_wait_for(
            self.in_flight,
            self.arrived.values(),
            current_version=self.version,
            max_lag=self.max_lag,
            groups_per_step=self.groups_per_step,
            steps=self.steps,
        )


@settings(max_examples=60, deadline=None)
@given(data=st.data(), max_lag=st.integers(0, 5), groups_per_step=st.integers(1, 4), push_every=st.integers(1, 3))
def test_while_workers_live_nothing_outlives_max_lag_and_nothing_waits_for_ever(
    data: st.DataObject, max_lag: int, groups_per_step: int, push_every: int
) -> None:
    push_every = min(push_every, max_lag + 1)
    steps = data.draw(st.integers(1, max_lag + 2 - push_every), label="steps")  # what the checks at start allow
    model = _Model(max_lag, groups_per_step, steps, push_every)
    for _ in range(60):
        model.issue()
        model.start(data.draw(st.integers(0, model.waiting), label="start"))
        for name in sorted(model.in_flight):
            match data.draw(st.sampled_from(["stay", "stay", "stay", "arrive", "arrive", "die", "invalid"]), label=name):
                case "arrive":
                    model.arrive([name])
                case "die":
                    model.die(name)
                case "invalid":
                    model.invalid(name)
        while data.draw(st.booleans(), label="train") and model.train():
            model.issue()
    assert max(model.lags, default=0) <= max_lag
    # No deadlock: when what was begun arrives, the trainer goes on, whatever the state.
    for _ in range(3):
        model.issue()
        model.start(model.waiting)
        model.arrive(sorted(model.in_flight))
        assert model.train()
    assert max(model.lags) <= max_lag


def test_without_waiting_the_same_model_outlives_max_lag() -> None:
    """What the rule prevents, by hand: one of two tasks stays in its engine while the other's successors train."""
    model = _Model(max_lag=1, groups_per_step=1, steps=1, push_every=1)
    model.issue()
    model.start(2)
    model.arrive(["00002"])
    assert model.train()  # version 0 → 1: 00001 can still train, at version 1
    model.issue()
    model.start(1)
    model.arrive(["00003"])
    assert model.held() == ("00001",)  # a step on 00003 would bring version 2, and 00001 would be 2 behind
    assert not model.train()
    model.arrive(["00001"])
    assert model.train()
    assert model.lags == [0, 1]


def test_it_looks_ahead_for_groups_that_share_their_last_step() -> None:
    """Limit 2, a group per step. Two tasks of version 0 stay in their engine: versions 1 and 2 have one step each for them."""
    model = _Model(max_lag=2, groups_per_step=1, steps=1, push_every=1)
    model.issue()
    model.start(3)
    model.arrive(["00003"])
    assert model.train()
    model.issue()
    model.start(1)
    model.arrive(["00004"])
    assert model.held() == ("00001", "00002")  # at version 2 there is one step for both
    assert not model.train()
    model.arrive(["00002"])
    assert model.train()
    assert not model.train()  # nothing has arrived that is not held: 00001 trains at version 2 or never
    model.arrive(["00001"])
    assert model.train()
    assert model.lags == [0, 1, 2]
