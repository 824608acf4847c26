"""What `staleness.stragglers` costs: a discrete-event simulation of one trainer and its engines over long-tailed lengths.

    python tests/bench/sim_stragglers.py [--steps 300] [--slots 2] [--docs docs/staleness.md]

The decisions are the project's own functions (admission.may_issue, staleness.must_wait_for, staleness.judge); only time and
lengths are made up. Lengths are lognormal with mean 64 tokens, cut at 1024; a token takes one unit of time; groups of 8 members
end with their longest member; engines hold `slots × groups_per_step` groups at a time; a step of 8 groups takes the trainer as
long as the engines need, on average, for 8 groups (both equally fast: the hardest case). Every step is served at once.
"""

from __future__ import annotations

import argparse
import heapq
from bisect import bisect_right
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import cache
from pathlib import Path

import numpy as np

from async_rl.algorithms.staleness import GroupVerdict, Stragglers, Verdict, judge, must_wait_for, oldest_version
from async_rl.coordinator.admission import may_issue
from async_rl.testing.builders import make_task
from protocol.messages import FinishReason, Reward, SamplingParams, Timings, Trajectory, TrajectoryGroup, Turn
from protocol.streams import Counters, RunState
from protocol.versions import VersionSpan

SIGMAS = (0.5, 1.0, 1.4)
MAX_LAGS = (0, 1, 2, 4, 8)
POLICIES: tuple[Stragglers, ...] = ("wait", "mask", "drop")
UNLIMITED = 10**6
MEAN_TOKENS, MAX_TOKENS = 64, 1024
GROUP_SIZE, GROUPS_PER_STEP = 8, 8
WARMUP_STEPS = 40
SEED = 20261201
BEGIN, END = "<!-- begin: tests/bench/sim_stragglers.py -->", "<!-- end: tests/bench/sim_stragglers.py -->"

_TASK = make_task(group_size=GROUP_SIZE)
_SAMPLING = SamplingParams(temperature=1.0, max_new_tokens=MAX_TOKENS, seed=0)
_TIMINGS = Timings(started_at_s=0.0, finished_at_s=0.0)
_REWARD = Reward(value=1.0)


@dataclass(frozen=True, slots=True)
class Setting:
    """One cell of the table."""

    sigma: float
    max_lag: int
    stragglers: Stragglers
    slots: int = 2


@dataclass(frozen=True, slots=True)
class Figures:
    """What came out, after the warm-up. Lengths in multiples of the mean length of everything that ended."""

    tokens_per_time: float  # trained tokens
    lag_mean: float  # of trained trajectories: age of the oldest token that entered the loss
    lag_max: int
    discarded_share: float  # of the tokens of everything that ended
    discarded_length: float | None  # of trajectories that were dropped or masked
    trained_length: float  # of trajectories that entered the loss whole
    held_share: float  # of time: a step had its groups and was held for stragglers


class Lengths:
    """Lognormal with the given sigma, mean MEAN_TOKENS before the cut."""

    def __init__(self, sigma: float, seed: int) -> None:
        self._sigma, self._random = sigma, np.random.default_rng(seed)

    def group(self, size: int = GROUP_SIZE) -> list[int]:
        drawn = self._random.lognormal(-(self._sigma**2) / 2, self._sigma, size) * MEAN_TOKENS
        return [int(length) for length in np.clip(np.ceil(drawn), 1, MAX_TOKENS)]


@cache
def mean_group_time(sigma: float) -> float:
    lengths = Lengths(sigma, SEED + 1)
    return float(np.mean([max(lengths.group()) for _ in range(20_000)]))


@dataclass(slots=True)
class _Ended:
    """What ended after the warm-up."""

    verdicts: list[GroupVerdict] = field(default_factory=list)
    trained_tokens: int = 0

    def add(self, verdict: GroupVerdict) -> None:
        self.verdicts.append(verdict)
        self.trained_tokens += verdict.num_trained


class Simulation:
    """Engines and trainer of one setting. The trainer's version is what engines serve."""

    def __init__(self, setting: Setting) -> None:
        self._setting = setting
        self._lengths = Lengths(setting.sigma, SEED)
        self._slots = setting.slots * GROUPS_PER_STEP
        self._step_time = GROUPS_PER_STEP * mean_group_time(setting.sigma) / self._slots
        self._now = 0.0
        self._version = 0
        self._served_from = [0.0]  # time from which version i was served
        self._counters = Counters(RunState.RUNNING, 1, 0, 0, 0, 0)
        self._events: list[tuple[float, int, float, list[int]]] = []  # arrival, task number, start, lengths
        self._in_flight: dict[str, int] = {}
        self._pending: list[TrajectoryGroup] = []
        self._busy_until: float | None = None
        self._ended = _Ended()
        self._held_since: float | None = None
        self._held = 0.0
        self._measured_from = 0.0

    def run(self, steps: int) -> Figures:
        while self._version < WARMUP_STEPS + steps:
            self._compose()
            self._start_tasks()  # also in the room of what was just discarded
            self._advance()
        return self._figures()

    def _start_tasks(self) -> None:
        room = may_issue(self._counters, self._version * GROUPS_PER_STEP, self._setting.max_lag, GROUPS_PER_STEP)
        for _ in range(min(room, self._slots - len(self._in_flight))):
            number = self._counters.issued
            self._counters = replace(self._counters, issued=number + 1)
            lengths = self._lengths.group()
            heapq.heappush(self._events, (self._now + max(lengths), number, self._now, lengths))
            self._in_flight[str(number)] = self._version

    def _compose(self) -> None:
        """Begin a step if the trainer is free, its groups are there and no straggler holds it."""
        if self._busy_until is not None:
            return
        judged = [(group, self._judge(group)) for group in self._pending]
        for group, verdict in judged:
            if not verdict.trains:
                self._end(verdict, discarded=True)
                self._pending.remove(group)
        if len(self._pending) < GROUPS_PER_STEP or self._is_held():
            return
        trainable = [(group, verdict) for group, verdict in judged if verdict.trains]
        drawn = sorted(trainable, key=lambda pair: oldest_version(pair[0]))[:GROUPS_PER_STEP]
        for group, verdict in drawn:
            self._end(verdict, discarded=False)
            self._pending.remove(group)
        self._busy_until = self._now + self._step_time

    def _judge(self, group: TrajectoryGroup) -> GroupVerdict:
        policy = self._setting.stragglers
        too_old = "drop" if policy == "wait" else policy
        return judge(group, current_version=self._version, max_lag=self._setting.max_lag, stragglers=too_old)

    def _is_held(self) -> bool:
        if self._setting.stragglers != "wait":
            return False
        held = must_wait_for(
            self._in_flight,
            map(oldest_version, self._pending),
            current_version=self._version,
            max_lag=self._setting.max_lag,
            groups_per_step=GROUPS_PER_STEP,
        )
        if held and self._held_since is None:
            self._held_since = self._now
        if not held and self._held_since is not None:
            self._held += self._now - self._held_since
            self._held_since = None
        return bool(held)

    def _advance(self) -> None:
        """To the next arrival or the end of the step, whichever comes first."""
        next_arrival = self._events[0][0] if self._events else None
        if self._busy_until is not None and (next_arrival is None or self._busy_until <= next_arrival):
            self._now, self._busy_until = self._busy_until, None
            self._version += 1
            self._served_from.append(self._now)
            if self._version == WARMUP_STEPS:
                self._measured_from, self._held = self._now, 0.0
        elif next_arrival is not None:
            self._now, number, started, lengths = heapq.heappop(self._events)
            del self._in_flight[str(number)]
            self._pending.append(self._group(started, lengths))
        else:
            raise RuntimeError(f"{self._setting}: nothing is in flight, and no step can be composed")

    def _group(self, started: float, lengths: Sequence[int]) -> TrajectoryGroup:
        trajectories = tuple(self._trajectory(started, length) for length in lengths)
        started_version = trajectories[0].versions[0].version
        return TrajectoryGroup(_TASK, trajectories, started_version, self._now)

    def _trajectory(self, started: float, length: int) -> Trajectory:
        """One prompt token, then `length` sampled ones, each by the version served at its time."""
        mask = np.ones(length + 1, dtype=np.uint8)
        mask[0] = 0
        return Trajectory(
            token_ids=np.zeros(length + 1, dtype=np.int32),
            loss_mask=mask,
            behavior_logprobs=np.zeros(length + 1, dtype=np.float32),
            versions=tuple(self._spans(started, length)),
            sampling=_SAMPLING,
            turns=(Turn(1, length + 1, FinishReason.STOP),),
            finish_reason=FinishReason.STOP,
            timings=_TIMINGS,
            worker_id="",
            engine_id="",
            reward=_REWARD,
        )

    def _spans(self, started: float, length: int) -> Iterator[VersionSpan]:
        version = bisect_right(self._served_from, started) - 1
        start = 1
        while start <= length:
            until = self._served_from[version + 1] if version + 1 < len(self._served_from) else float("inf")
            end = length + 1 if until >= started + length else max(start, 1 + int(np.ceil(until - started)))
            if end > start:
                yield VersionSpan(start, end, version, version)
            start, version = end, version + 1

    def _end(self, verdict: GroupVerdict, *, discarded: bool) -> None:
        if discarded:
            self._counters = replace(self._counters, discarded=self._counters.discarded + 1)
        if self._version >= WARMUP_STEPS:
            self._ended.add(verdict)

    def _figures(self) -> Figures:
        time = self._now - self._measured_from
        ended = [one for verdict in self._ended.verdicts for one in verdict.trajectories]
        tokens = sum(one.num_tokens for one in ended)
        mean = tokens / len(ended)
        lags = [min(one.lag, self._setting.max_lag) for one in ended if one.trains and one.lag is not None]
        cut = [one.num_tokens for one in ended if one.verdict in (Verdict.DROP, Verdict.MASK)]
        whole = [one.num_tokens for one in ended if one.verdict is Verdict.TRAIN]
        return Figures(
            tokens_per_time=self._ended.trained_tokens / time,
            lag_mean=float(np.mean(lags)),
            lag_max=max(lags),
            discarded_share=1 - self._ended.trained_tokens / tokens,
            discarded_length=float(np.mean(cut)) / mean if cut else None,
            trained_length=float(np.mean(whole)) / mean,
            held_share=self._held / time,
        )


def simulate(setting: Setting, steps: int) -> Figures:
    return Simulation(setting).run(steps)


def table(
    steps: int,
    *,
    sigmas: Sequence[float] = SIGMAS,
    max_lags: Sequence[int] = MAX_LAGS,
    policies: Sequence[Stragglers] = POLICIES,
    slots: int = 2,
) -> str:
    """The figures as a Markdown table, one line per cell."""
    lines = [
        "| σ | max_lag | stragglers | throughput | held | lag mean | lag max | discarded | its length | length trained whole |",
        "|---|---|---|---|---|---|---|---|---|---|",
    ]
    for sigma in sigmas:
        unlimited = simulate(Setting(sigma, UNLIMITED, "drop", slots), steps)
        lines.append(_line(sigma, "∞", "–", unlimited, unlimited))
        for max_lag in max_lags:
            for policy in policies:
                figures = simulate(Setting(sigma, max_lag, policy, slots), steps)
                lines.append(_line(sigma, str(max_lag), policy, figures, unlimited))
    return "\n".join(lines)


def _line(sigma: float, max_lag: str, policy: str, figures: Figures, unlimited: Figures) -> str:
    f = figures
    length = "–" if f.discarded_length is None else f"{f.discarded_length:.2f}"
    return (
        f"| {sigma:g} | {max_lag} | {policy} | {f.tokens_per_time / unlimited.tokens_per_time:.2f} | {f.held_share:.0%} "
        f"| {f.lag_mean:.2f} | {f.lag_max} | {f.discarded_share:.1%} | {length} | {f.trained_length:.2f} |"
    )


def write_docs(path: Path, text: str) -> None:
    """Put the table between the page's markers."""
    page = path.read_text(encoding="utf-8")
    before, _, rest = page.partition(BEGIN)
    _, _, after = rest.partition(END)
    path.write_text(f"{before}{BEGIN}\n\n{text}\n\n{END}{after}", encoding="utf-8")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=300, help="optimizer steps measured per cell")
    parser.add_argument("--slots", type=int, default=2, help="groups that the engines hold, in steps' worth of groups")
    parser.add_argument("--docs", type=Path, help="write the table into this page")
    arguments = parser.parse_args()
    text = table(arguments.steps, slots=arguments.slots)
    print(text)
    if arguments.docs is not None:
        write_docs(arguments.docs, text)


if __name__ == "__main__":
    main()
