"""The credit of a step where it needs passes of other models than the policy: a reference in the reward, a critic's values.

On rank 0; the passes are commands that every rank runs.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

import numpy as np
import torch
from torch import Tensor

from async_rl.algorithms.credit import Float64Array
from async_rl.algorithms.kl import kl_penalty
from async_rl.config.run import RunConfig
from async_rl.trainer.credit import Credit, Penalties
from async_rl.trainer.intake import ComposedStep
from async_rl.trainer.samples import TrainingSample
from async_rl.trainer.value_credit import ValueTargets, credit_tokens

Command: TypeAlias = Callable[[str, Mapping[str, Any]], Any]


@dataclass(frozen=True, slots=True, eq=False)
class CreditedStep:
    """The samples of a step with their advantages, and what the critic learns from them (None without one)."""

    samples: Sequence[TrainingSample]
    targets: ValueTargets | None


class StepCredit:
    """`run` runs a command on every rank: "reference" and "values" return a tensor [T] per sample."""

    def __init__(self, config: RunConfig, run: Command) -> None:
        self._algorithm = config.algorithm
        self._critic = config.critic if config.algorithm.advantage == "gae" else None
        self._credit = Credit.from_config(config.algorithm)
        self._run = run
        self._values: dict[tuple[str, int], Float64Array] = {}

    def begin_batch(self, batch: Sequence[ComposedStep]) -> None:
        """Fix the values of a drawn batch: the critic as it is now. Advantages and clip of all its steps refer to them."""
        self._values.clear()
        if self._critic is not None:
            self._add_values(self.samples(batch))

    def samples(self, steps: Sequence[ComposedStep]) -> list[TrainingSample]:
        """Of several steps, before any pass of another model: right in all but their advantages."""
        return [sample for step in steps for sample in self._credit.samples(step)]

    def credited(self, step: ComposedStep) -> CreditedStep:
        """Credit a step. A function of the record, the groups, and the weights of reference and critic."""
        samples = self._credit.samples(step)
        penalties = self._kl_penalties(samples)
        if self._critic is not None:
            credited, targets = credit_tokens(samples, self._values_of(samples), self._critic, _as_floats(penalties))
            return CreditedStep(credited, targets)
        if penalties is None:
            return CreditedStep(samples, None)
        per_trajectory: Penalties = {
            (sample.task_id, sample.member): float(penalty.sum()) for sample, penalty in zip(samples, penalties, strict=True)
        }
        return CreditedStep(self._credit.samples(step, per_trajectory), None)

    def _kl_penalties(self, samples: Sequence[TrainingSample]) -> list[Tensor] | None:
        """kl_coef · k per token, [T] per sample, if the config takes it off the reward."""
        algorithm = self._algorithm
        if algorithm.kl_coef == 0 or algorithm.kl_in != "reward" or not samples:
            return None
        references: Sequence[Tensor] = self._run("reference", {"samples": samples})
        return [
            algorithm.kl_coef
            * kl_penalty(
                torch.from_numpy(sample.behavior_logprobs),
                reference.cpu(),
                torch.from_numpy(sample.loss_mask),
                algorithm.kl_estimator,
            )
            for sample, reference in zip(samples, references, strict=True)
        ]

    def _values_of(self, samples: Sequence[TrainingSample]) -> list[Float64Array]:
        """The values that the batch began with; of what it did not begin with, those of now."""
        self._add_values([sample for sample in samples if (sample.task_id, sample.member) not in self._values])
        return [self._values[sample.task_id, sample.member][: len(sample)] for sample in samples]

    def _add_values(self, samples: Sequence[TrainingSample]) -> None:
        if not samples:
            return
        values: Sequence[Tensor] = self._run("values", {"samples": samples})
        for sample, own in zip(samples, values, strict=True):
            self._values[sample.task_id, sample.member] = own.double().cpu().numpy()


def _as_floats(penalties: Sequence[Tensor] | None) -> list[Float64Array] | None:
    return None if penalties is None else [np.asarray(penalty.double().numpy()) for penalty in penalties]
