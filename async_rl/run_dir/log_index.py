"""What the valid part of an intake log says, without the groups' payloads. Of what is settled it keeps ids and ends only."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TypeAlias

from async_rl.errors import IntakeLogError
from async_rl.run_dir.end_table import EndTable, Settled
from async_rl.run_dir.records import (
    DeadRecord,
    EndRecord,
    GroupRecord,
    HeaderRecord,
    Record,
    SkipRecord,
    StepRecord,
)
from protocol.messages import EndReason

NO_STEP = -1

Tally: TypeAlias = Counter[tuple[str, int, bool]]
"""Trajectories of settled steps per (verdict, lag or -1, trained): what a run's figures need of them."""


@dataclass(frozen=True, slots=True)
class Position:
    """Where a record ends: everything up to it is `before`."""

    segment: str
    offset: int


@dataclass(slots=True)
class LogIndex:
    """The log's contents. Steps are numbered over the whole log; `steps` holds those from `base_step` on."""

    groups: dict[str, Position] = field(default_factory=dict)
    """task id → where its record starts, in the order of intake; without the settled ones."""
    steps: list[StepRecord] = field(default_factory=list)
    base_step: int = 0
    """Steps below it are settled: only the ends of their tasks are kept."""
    settled: EndTable = field(default_factory=EndTable)
    tally: Tally = field(default_factory=Counter)
    twice: set[str] = field(default_factory=set)
    """Tasks that two settled steps trained: there must be none."""
    skipped: set[int] = field(default_factory=set)
    """Indices of train steps whose gradient was not finite, so that nothing was applied."""
    dead: dict[str, str] = field(default_factory=dict)
    """task id → why it can never be trained."""
    unused: set[str] = field(default_factory=set)
    """Tasks left over when the run ended."""
    issued: int | None = None
    """Tasks ever issued, as the newest end record says; None before the run's first end."""
    goes_on: bool = False
    """Whether something was recorded since the newest end record: the run was resumed, and `issued` is of its earlier end."""
    sealed: dict[str, int] = field(default_factory=dict)
    """Segment → bytes that count."""
    warnings: list[str] = field(default_factory=list)

    @property
    def num_steps(self) -> int:
        """Step records ever written."""
        return self.base_step + len(self.steps)

    def step(self, number: int) -> StepRecord:
        """The step record with index `number`. Raises: IntakeLogError if it is settled."""
        return self.steps_from(number)[0]

    def steps_from(self, start: int) -> Sequence[StepRecord]:
        """Step records from index `start` on. Raises: IntakeLogError if the log does not have them any more."""
        if start < self.base_step:
            raise IntakeLogError(
                f"step record {start} is compacted away: the log has records from {self.base_step} on; "
                f"use a checkpoint that was written at {self.base_step} or later"
            )
        return self.steps[start - self.base_step :]

    def add(self, record: Record, start: Position) -> None:
        if not isinstance(record, HeaderRecord):
            self.goes_on = not isinstance(record, EndRecord)
        match record:
            case GroupRecord(task_id=task_id):
                if task_id not in self.settled:
                    self.groups.setdefault(task_id, start)
            case StepRecord(step=step):
                if step >= self.base_step:
                    self.steps.append(record)
            case SkipRecord(step=step):
                self.skipped.add(step)
            case DeadRecord(task_id=task_id, reason=reason):
                self.dead.setdefault(task_id, reason)
            case EndRecord(unused=unused, issued=issued):
                self.unused.update(unused)
                self.issued = max(issued, self.issued or 0)
            case HeaderRecord():
                pass

    def knows(self, task_id: str) -> bool:
        """Whether the task's group is in the log, or its end is."""
        return task_id in self.groups or task_id in self.settled or task_id in self.dead or task_id in self.unused

    def settle(self, below: int) -> None:
        """Keep only the ends of steps with an index below `below`: nobody here will train them again."""
        count = max(0, min(below - self.base_step, len(self.steps)))
        for record in self.steps[:count]:
            self._settle_step(record)
        del self.steps[:count]
        self.base_step += count
        for task_id in self.dead:
            self._settle_unstepped(task_id, EndReason.DEAD)
        for task_id in self.unused:
            self._settle_unstepped(task_id, EndReason.UNUSED)

    def _settle_unstepped(self, task_id: str, end: EndReason) -> None:
        self.settled.setdefault(task_id, (end.value, NO_STEP))
        self.groups.pop(task_id, None)

    def _settle_step(self, record: StepRecord) -> None:
        skipped = record.step in self.skipped
        entries: dict[str, Settled] = {}  # one tuple for all tasks of a step that end alike
        for task_id, end in record.ends(skipped=skipped).items():
            known = self.settled.get(task_id)
            trained = EndReason.TRAINED.value
            if known is not None and known[1] != record.step and known[0] == end == trained:
                self.twice.add(task_id)
            self.settled[task_id] = entries.setdefault(end, (end, record.step))
            self.groups.pop(task_id, None)
        self.tally.update(record.tally(skipped=skipped))


def task_ends(index: LogIndex) -> Mapping[str, str]:
    """task id → EndReason value, for every task whose end the log knows."""
    return {**{task_id: end for task_id, (end, _) in index.settled.pairs()}, **unsettled_ends(index)}


def unsettled_ends(index: LogIndex) -> Mapping[str, str]:
    """The ends that steps from `base_step` on, and newer records, brought; they go before the settled ones."""
    ends: dict[str, str] = {}
    for record in index.steps:
        ends.update(record.ends(skipped=record.step in index.skipped))
    ends.update(dict.fromkeys(index.dead, EndReason.DEAD.value))
    for task_id in index.unused:
        if task_id not in ends and task_id not in index.settled:
            ends[task_id] = EndReason.UNUSED.value
    return ends


def count_ends(index: LogIndex) -> Counter[str]:
    """Tasks per EndReason value."""
    counted = index.settled.counts()
    for task_id, end in unsettled_ends(index).items():
        known = index.settled.get(task_id)
        if known is not None:
            counted[known[0]] -= 1
        counted[end] += 1
    return +counted


def trained_twice(index: LogIndex) -> tuple[str, ...]:
    """Tasks that more than one applied step trained."""
    trained = {task_id: step for task_id, (end, step) in index.settled.pairs() if end == EndReason.TRAINED.value}
    twice = set(index.twice)
    for record in index.steps:
        for task_id, end in record.ends(skipped=record.step in index.skipped).items():
            if end == EndReason.TRAINED.value and trained.setdefault(task_id, record.step) != record.step:
                twice.add(task_id)
    return tuple(sorted(twice))
