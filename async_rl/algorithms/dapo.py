"""What DAPO adds around a loss: groups without signal are not trained, answers that run into the limit cost a little.

Source: Yu et al. 2025, DAPO (arXiv:2503.14476). Its other parts are settings: clip-higher (clip_high > clip_low), the
token-level loss (`aggregation = "token_mean"`), no KL term.
"""

from __future__ import annotations

from async_rl.algorithms.credit import Float64Array, all_equal
from protocol.messages import FinishReason, Trajectory


def has_signal(valid_rewards: Float64Array) -> bool:
    """Dynamic sampling, eq. 11: whether a group's rewards differ. Less than two teach a group-relative estimator nothing."""
    return len(valid_rewards) > 1 and not all_equal(valid_rewards)


def is_truncated(trajectory: Trajectory) -> bool:
    """Whether any of its turns ran into the length limit."""
    return any(turn.finish_reason is FinishReason.LENGTH for turn in trajectory.turns)


def longest_turn(trajectory: Trajectory) -> int:
    """Sampled tokens of its longest turn: what the limit on new tokens is about."""
    return max((turn.end - turn.start for turn in trajectory.turns), default=0)


def overlong_penalty(length: int, *, max_length: int, buffer: int) -> float:
    """Soft overlong punishment, eq. 13: 0 up to max_length − buffer, then a straight line down to −1 at max_length.

    A length beyond max_length gets −1 too.
    """
    if buffer < 1:
        return 0.0
    return -min(max(length - (max_length - buffer), 0) / buffer, 1.0)
