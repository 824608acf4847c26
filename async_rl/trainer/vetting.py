"""Before a batch is drawn: recompute the logprobs of a sample of what waits, at the version that sampled it, and compare.

The trainer has the weights of its present version, and of an earlier one until tokens of it arrived (`KeptWeights`).

Policy and behavior logprob of such a token are one number, unless engine and trainer disagree. What fails is quarantined before
any step may train it; the step's record says so, so a replay does not depend on this check.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any, TypeAlias

import numpy as np

from async_rl.algorithms.parity import Floats, Guess, ParityLimit, ParityReport, comparable, compare
from async_rl.algorithms.records import record_fault
from async_rl.algorithms.staleness import InvalidReason
from async_rl.config.run import RunConfig
from async_rl.trainer.intake import Intake
from async_rl.trainer.learner import Learner
from async_rl.trainer.quarantine import Quarantine
from protocol.messages import Trajectory, TrajectoryGroup

Chosen: TypeAlias = tuple[TrajectoryGroup, int, Trajectory]
"""(group, member, that trajectory)"""


class Vetting:
    """One per trainer; rank 0 decides, every rank scores."""

    def __init__(self, config: RunConfig, learner: Learner, quarantine: Quarantine) -> None:
        self._config = config
        self._learner = learner
        self._quarantine = quarantine
        self._tokens = 0
        self._failed = 0
        self._gap_max = 0.0

    def take_figures(self) -> dict[str, Any]:
        """Of the metrics line: what was compared since the last one."""
        figures = {
            "validated_tokens": self._tokens,
            "validation_failed": self._failed,
            "validation_gap_max": self._gap_max if self._tokens else None,
        }
        self._tokens, self._failed, self._gap_max = 0, 0, 0.0
        return figures

    async def vet(self, intake: Intake, version: int) -> None:
        """Compare up to validation.tokens_per_step tokens of groups not seen before; quarantine what fails."""
        groups = intake.take_unvetted(version)
        room = self._config.validation.tokens_per_step
        for one in self._versions(version):
            chosen = self._choose(groups, one, room)
            room -= sum(len(trajectory.token_ids) for _, _, trajectory in chosen)
            compared = await self._learner.thread.run(self._compare, chosen, one, one != version) if chosen else []
            if compared and one != version:
                self._learner.mark_compared()
            for group, member, report, recomputed in compared:
                self._tokens += report.num_tokens
                self._gap_max = max(self._gap_max, report.gap_max)
                if not report.holds:
                    self._failed += 1
                    self._quarantine.add(group, member, InvalidReason.LOGPROBS_DIFFER, report.reason, recomputed)
                    intake.quarantine(group.task_id, member, InvalidReason.LOGPROBS_DIFFER)

    def _choose(self, groups: Sequence[TrajectoryGroup], version: int, room: int) -> list[Chosen]:
        """Members with tokens of `version`, one of each group first: a fault of one engine or task is seen sooner."""
        chosen: list[Chosen] = []
        for member in range(max((len(group.trajectories) for group in groups), default=0)):
            for group in groups:
                if member >= len(group.trajectories):
                    continue
                trajectory = group.trajectories[member]
                if record_fault(trajectory) is not None:  # no step trains it anyway
                    continue
                if len(trajectory.token_ids) <= room and comparable(trajectory, version).any():
                    chosen.append((group, member, trajectory))
                    room -= len(trajectory.token_ids)
        return chosen

    def _compare(
        self, chosen: Sequence[Chosen], version: int, previous: bool
    ) -> list[tuple[TrajectoryGroup, int, ParityReport, Floats]]:
        limit = self._limit()
        results = []
        scores = self._scores([trajectory for _, _, trajectory in chosen], previous)
        for (group, member, trajectory), own in zip(chosen, scores, strict=True):
            guesses = self._guesses(trajectory, version, previous)
            report = compare(trajectory, own, comparable(trajectory, version), limit, guesses)
            results.append((group, member, report, own))
        return results

    def _versions(self, version: int) -> list[int]:
        """Versions whose weights are at hand, the present one first."""
        kept = self._learner.kept_version
        return [version] if kept is None or kept == version else [version, kept]

    def _limit(self) -> ParityLimit:
        noise = self._learner.rounding_noise
        return ParityLimit(self._config.validation.tolerance) if noise is None else ParityLimit(10 * noise, "mean")

    def _scores(self, trajectories: Sequence[Trajectory], previous: bool) -> list[Floats]:
        temperature = trajectories[0].sampling.temperature
        if any(t.sampling.temperature != temperature for t in trajectories):
            return [self._score(t, temperature=t.sampling.temperature, previous=previous) for t in trajectories]
        sequences = [t.token_ids for t in trajectories]
        return [_whole(own) for own in self._learner.scores(sequences, temperature=temperature, previous=previous)]

    def _score(self, trajectory: Trajectory, *, temperature: float, previous: bool, head: Path | None = None) -> Floats:
        sequences = [trajectory.token_ids]
        return _whole(self._learner.scores(sequences, temperature=temperature, head=head, previous=previous)[0])

    def _guesses(self, trajectory: Trajectory, version: int, previous: bool) -> list[Guess]:
        """Faults that others fell into, recomputed only where the logprobs differ."""
        temperature = trajectory.sampling.temperature
        guesses = []
        if temperature != 1.0:
            reason = f"behavior logprobs are those at temperature 1, but the tokens were sampled at {temperature:g}"
            guesses.append(Guess(reason, lambda: self._score(trajectory, temperature=1.0, previous=previous)))
        if version > 0:
            start = self._config.model.path
            reason = f"engine {trajectory.engine_id} computes with the output head of version 0: pushes do not reach it"
            guesses.append(
                Guess(reason, lambda: self._score(trajectory, temperature=temperature, previous=previous, head=start))
            )
        return guesses


def _whole(scores: Any) -> Floats:
    """[T] from the scores of all tokens but the first."""
    return np.concatenate(([0.0], np.asarray(scores, dtype=np.float64)))
