"""Learning rate as a pure function of the step: nothing to save, nothing to restore."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Literal

from async_rl.config.trainer import TrainerConfig

ScheduleName = Literal["constant", "linear", "cosine"]


@dataclass(frozen=True, slots=True)
class Schedule:
    """Linear warm-up over `warmup_steps` optimizer steps, then constant, or a fall to final_fraction × peak at max_steps."""

    peak: float
    name: ScheduleName = "constant"
    warmup_steps: int = 0
    max_steps: int = 1
    final_fraction: float = 0.1

    @staticmethod
    def from_config(trainer: TrainerConfig, peak: float) -> Schedule:
        """The trainer's schedule, up to `peak`."""
        return Schedule(peak, trainer.schedule, trainer.warmup_steps, trainer.max_steps, trainer.final_lr_fraction)

    def learning_rate(self, step: int) -> float:
        """Return the learning rate of optimizer step `step`, counted from 1.

        Step s of the warm-up has peak × s / warmup_steps, so that step warmup_steps has the peak; step max_steps has
        peak × final_fraction (linear and cosine). Steps beyond max_steps keep it.
        """
        if step < self.warmup_steps:
            return self.peak * step / self.warmup_steps
        span = max(self.max_steps - max(self.warmup_steps, 1), 1)
        progress = min(max(step - max(self.warmup_steps, 1), 0) / span, 1.0)
        return self.peak * _SHAPES[self.name](progress, self.final_fraction)


def _constant(progress: float, final: float) -> float:
    return 1.0


def _linear(progress: float, final: float) -> float:
    return 1.0 - (1.0 - final) * progress


def _cosine(progress: float, final: float) -> float:
    return final + (1.0 - final) * 0.5 * (1.0 + math.cos(math.pi * progress))


_SHAPES: Mapping[ScheduleName, Callable[[float, float], float]] = {
    "constant": _constant,
    "linear": _linear,
    "cosine": _cosine,
}
