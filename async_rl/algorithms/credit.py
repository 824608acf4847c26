"""What every advantage estimator is given and returns, and the settings it may read. float64, torch-free."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt

from async_rl.errors import ShapeError

Float64Array: TypeAlias = npt.NDArray[np.float64]
BoolArray: TypeAlias = npt.NDArray[np.bool_]
Int64Array: TypeAlias = npt.NDArray[np.int64]


@dataclass(frozen=True, slots=True, eq=False)
class RewardGroup:
    """The rewards of one prompt's trajectories, [G] each.

    rewards: float64, penalties already taken off, NaN where invalid. valid: bool, False where the record or the scorer
    failed. num_tokens: int64, trained tokens of each (0 for one that is not trained, which may still be valid).
    Raises: ShapeError if the lengths differ; ValueError if a valid reward is not finite.
    """

    rewards: Float64Array
    valid: BoolArray
    num_tokens: Int64Array

    def __post_init__(self) -> None:
        if self.rewards.ndim != 1 or not self.rewards.shape == self.valid.shape == self.num_tokens.shape:
            raise ShapeError(
                f"rewards {self.rewards.shape}, valid {self.valid.shape}, num_tokens {self.num_tokens.shape} must be [G], "
                f"one per trajectory of the group"
            )
        known = self.rewards[self.valid]
        if not np.isfinite(known).all():
            raise ValueError(f"rewards={known.tolist()}: a valid reward must be finite; mark the others as invalid")

    @property
    def known(self) -> Float64Array:
        """The valid rewards, in order."""
        known: Float64Array = self.rewards[self.valid]
        return known

    def spread(self, values: Float64Array) -> Float64Array:
        """[G] from a value per valid trajectory: 0 for the others."""
        spread = np.zeros(len(self.rewards))
        spread[self.valid] = values
        return spread

    @staticmethod
    def of(rewards: npt.ArrayLike, valid: npt.ArrayLike | None = None, num_tokens: npt.ArrayLike | None = None) -> RewardGroup:
        """From plain lists; all valid, one token each, if not given."""
        rewards_G = np.asarray(rewards, dtype=np.float64)
        return RewardGroup(
            rewards_G,
            np.ones(rewards_G.shape, dtype=np.bool_) if valid is None else np.asarray(valid, dtype=np.bool_),
            np.ones(rewards_G.shape, dtype=np.int64) if num_tokens is None else np.asarray(num_tokens, dtype=np.int64),
        )


@dataclass(frozen=True, slots=True)
class AdvantageSettings:
    """eps: added to a standard deviation before dividing by it. args: a user's own."""

    eps: float = 1e-6
    args: Mapping[str, Any] = field(default_factory=dict)


AdvantageFn: TypeAlias = Callable[[Sequence[RewardGroup], AdvantageSettings], Sequence[Float64Array]]
"""An estimator, built in or a user's: all groups of one optimizer step → the advantage of each trajectory, [G] per group,
finite, 0 where not valid, in the order given. See `async_rl.testing.algorithms.check_advantage` for what must hold of it."""


def all_equal(values: Float64Array) -> bool:
    """Two or more values and no difference between them."""
    return len(values) > 1 and bool((values == values[0]).all())
