"""The step's objective out of a config."""

from __future__ import annotations

from collections.abc import Callable

from async_rl.algorithms.aggregation import Aggregation
from async_rl.algorithms.losses import ClipRange, LossSettings, find_loss
from async_rl.config.run import RunConfig
from async_rl.trainer.step import KlSettings, StepSettings


def step_settings(config: RunConfig, *, on_micro_batch: Callable[[int], object]) -> StepSettings:
    """on_micro_batch: told after each micro-batch. Raises: ConfigError if the loss cannot be imported."""
    algorithm = config.algorithm
    low, high = algorithm.clip
    kl = None
    if algorithm.kl_coef > 0 and algorithm.kl_in == "loss":
        kl = KlSettings(algorithm.kl_coef, algorithm.kl_estimator, algorithm.kl_form)
    return StepSettings(
        loss_fn=find_loss(algorithm.loss),
        loss_settings=LossSettings(
            ClipRange(low, high),
            importance_cap=algorithm.importance_cap,
            importance=algorithm.importance,
            importance_level=algorithm.importance_level,
            importance_floor=algorithm.importance_floor,
            anchor=algorithm.anchor,
            dual_clip=algorithm.dual_clip,
            args=algorithm.loss_args,
        ),
        aggregation=Aggregation(algorithm.aggregation_name, algorithm.aggregation_constant or 1.0),
        kl=kl,
        grad_clip=config.trainer.grad_clip,
        with_entropy=True,
        on_micro_batch=on_micro_batch,
    )
