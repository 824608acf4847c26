"""From the groups of a step to training samples with credit: rewards, what is taken off them, advantages. Torch-free."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

from async_rl.algorithms.advantages import credit_groups, find_advantage, group_rewards
from async_rl.algorithms.credit import AdvantageFn, AdvantageSettings, Float64Array, RewardGroup
from async_rl.algorithms.dapo import longest_turn, overlong_penalty
from async_rl.algorithms.staleness import GroupVerdict
from async_rl.algorithms.turns import relative_to_group, token_returns, turn_rewards
from async_rl.config.algorithm import AlgorithmConfig
from async_rl.trainer.intake import ComposedStep
from async_rl.trainer.samples import TrainingSample, to_training_samples
from protocol.messages import TrajectoryGroup

Penalties = Mapping[tuple[str, int], float]
"""(task id, member) → what is taken off that trajectory's reward."""


@dataclass(frozen=True, slots=True)
class Credit:
    """The estimator of a run, and the penalties on lengths."""

    estimator: AdvantageFn
    settings: AdvantageSettings
    overlong_buffer: int = 0
    overlong_penalty: float = 1.0
    turn_discount: float | None = None
    """None: whole trajectories are credited; else turns are, relative to those of their group."""
    scales_turns: bool = True

    @staticmethod
    def from_config(algorithm: AlgorithmConfig) -> Credit:
        """Raises: ConfigError if the estimator cannot be imported."""
        return Credit(
            find_advantage(algorithm.advantage),
            AdvantageSettings(algorithm.advantage_eps, algorithm.advantage_args),
            algorithm.overlong_buffer,
            algorithm.overlong_penalty,
            turn_discount=algorithm.turn_discount if algorithm.credit == "turns" else None,
            scales_turns=algorithm.advantage == "grpo",
        )

    def samples(self, step: ComposedStep, penalties: Penalties | None = None) -> list[TrainingSample]:
        """Credit the trajectories of a step and flatten them, in order. A function of the record and the groups alone (and of
        `penalties`, if given)."""
        trained = [(group, verdict) for group, verdict in zip(step.groups, step.verdicts, strict=True) if verdict.trains]
        rewards = [self._rewards(group, verdict, penalties or {}) for group, verdict in trained]
        if self.turn_discount is not None:
            return [
                sample
                for (group, verdict), known in zip(trained, rewards, strict=True)
                for sample in to_training_samples(group, verdict, self._by_turn(group, known, self.turn_discount))
            ]
        credited = credit_groups(rewards, self.estimator, self.settings)
        return [
            sample
            for (group, verdict), advantages in zip(trained, credited, strict=True)
            for sample in to_training_samples(group, verdict, advantages)
        ]

    def _by_turn(self, group: TrajectoryGroup, known: RewardGroup, gamma: float) -> list[Float64Array]:
        """The advantages of every token, [T] per trajectory."""
        earned = [
            turn_rewards(trajectory, float(known.rewards[member]) if known.valid[member] else 0.0)
            for member, trajectory in enumerate(group.trajectories)
        ]
        credited = relative_to_group(earned, known.valid, eps=self.settings.eps, scale=self.scales_turns)
        return [
            token_returns(trajectory, credit, gamma=gamma)
            for trajectory, credit in zip(group.trajectories, credited, strict=True)
        ]

    def _rewards(self, group: TrajectoryGroup, verdict: GroupVerdict, penalties: Penalties) -> RewardGroup:
        rewards, valid = group_rewards(group, verdict)
        taken_off = [penalties.get((group.task_id, member), 0.0) for member in range(len(rewards))]
        lengths = np.array([trajectory.num_trained for trajectory in verdict.trajectories], dtype=np.int64)
        return RewardGroup(rewards + self._overlong(group) - np.asarray(taken_off, dtype=np.float64), valid, lengths)

    def _overlong(self, group: TrajectoryGroup) -> Float64Array:
        return self.overlong_penalty * np.array(
            [
                overlong_penalty(
                    longest_turn(trajectory), max_length=trajectory.sampling.max_new_tokens, buffer=self.overlong_buffer
                )
                for trajectory in group.trajectories
            ],
            dtype=np.float64,
        )
