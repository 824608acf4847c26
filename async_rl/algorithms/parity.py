"""Do recorded logprobs belong to their tokens? Compared at equal versions, where policy and behavior are one number; and if
not, why. Pure and torch-free.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal, TypeAlias

import numpy as np
import numpy.typing as npt

from protocol.messages import Trajectory

Floats: TypeAlias = npt.NDArray[np.float64]

EXPLAINS = 0.2
"""A guess explains a mismatch if it leaves at most this share of the mean difference."""


@dataclass(frozen=True, slots=True)
class ParityLimit:
    """How far |recorded − recomputed| logprobs may be apart, nats: the largest one, or their mean (dtypes that round)."""

    value: float
    of: Literal["max", "mean"] = "max"

    def holds(self, gaps: Floats) -> bool:
        """True within the limit, and for no gaps; a NaN is not."""
        return gaps.size == 0 or bool((gaps.max() if self.of == "max" else gaps.mean()) <= self.value)


@dataclass(frozen=True, slots=True)
class ParityReport:
    """What the comparison of one trajectory found. reason is empty where it holds."""

    num_tokens: int
    gap_max: float
    gap_mean: float
    reason: str = ""

    @property
    def holds(self) -> bool:
        return not self.reason


@dataclass(frozen=True, slots=True)
class Guess:
    """Another way in which the logprobs may have been computed: its name, and how to recompute them so ([T])."""

    reason: str
    recompute: Callable[[], Floats]


def comparable(trajectory: Trajectory, version: int) -> npt.NDArray[np.bool_]:
    """bool [T]: trained tokens that `version` sampled with a KV cache of its own; only those can be recomputed exactly."""
    mask = np.zeros(len(trajectory.token_ids), dtype=np.bool_)
    for span in trajectory.versions:
        if span.version == span.kv_version == version:
            mask[span.start : span.end] = True
    compared: npt.NDArray[np.bool_] = mask & (trajectory.loss_mask != 0)
    return compared


def compare(
    trajectory: Trajectory, recomputed: Floats, where: npt.NDArray[np.bool_], limit: ParityLimit, guesses: Sequence[Guess] = ()
) -> ParityReport:
    """Compare recorded with recomputed logprobs ([T], at the sampling temperature) at the positions `where`.

    Where they differ beyond `limit`, the reason is the first that explains it: tokens that nobody sampled, a list shifted by
    one position, then the best of `guesses`; else that none does.
    """
    recorded = trajectory.behavior_logprobs.astype(np.float64)
    gaps = np.abs(recorded - recomputed)[where]
    if gaps.size == 0:
        return ParityReport(0, 0.0, 0.0)
    worst, mean = float(gaps.max()), float(gaps.mean())
    if limit.holds(gaps):
        return ParityReport(gaps.size, worst, mean)
    unsampled = where & (recorded == 0.0) & (recomputed < CERTAIN)
    found = _nobody_sampled(unsampled, gaps[~unsampled[where]], limit)
    found = found or _shifted(recorded, recomputed, where, mean) or _guessed(recorded, where, mean, guesses)
    at = int(np.flatnonzero(where)[int(np.argmax(np.nan_to_num(gaps, nan=np.inf)))])
    what = f"recorded and recomputed logprobs differ by up to {worst:.3g} nats (mean {mean:.3g}, most at position {at})"
    return ParityReport(gaps.size, worst, mean, f"{found}: {what}" if found else f"{what}; {UNEXPLAINED}")


UNEXPLAINED = "no shift, temperature or old head explains it: engine and trainer disagree on tokens, positions or weights"


CERTAIN = -0.01
"""A recomputed logprob below this is not that of a token that was certain, whose logprob may be recorded as 0."""


def _nobody_sampled(unsampled: npt.NDArray[np.bool_], other_gaps: Floats, limit: ParityLimit) -> str:
    """Whether all that differs are tokens with a recorded logprob of exactly 0, which none that was sampled has."""
    if not unsampled.any() or not limit.holds(other_gaps):
        return ""
    where = ", ".join(str(position) for position in np.flatnonzero(unsampled)[:5])
    return (
        f"{int(unsampled.sum())} trained tokens (positions {where}) have a logprob of exactly 0: a tool's or the environment's"
    )


def _shifted(recorded: Floats, recomputed: Floats, where: npt.NDArray[np.bool_], mean: float) -> str:
    """Whether each recorded value belongs to the token before or after it."""
    for shift, words in ((1, "the token before"), (-1, "the token after")):
        both = where & np.roll(where, shift)
        both[0 if shift == 1 else -1] = False
        if both.sum() >= 2:
            left = float(np.abs(recorded - np.roll(recomputed, shift))[both].mean())
            if left <= EXPLAINS * mean:
                return f"behavior logprobs are shifted by one position, each is that of {words}"
    return ""


def _guessed(recorded: Floats, where: npt.NDArray[np.bool_], mean: float, guesses: Sequence[Guess]) -> str:
    remaining: Mapping[str, float] = {
        guess.reason: float(np.abs(recorded - guess.recompute())[where].mean()) for guess in guesses
    }
    best = min(remaining, key=lambda reason: remaining[reason], default="")
    return best if best and remaining[best] <= EXPLAINS * mean else ""
