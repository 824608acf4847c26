"""Why groups end untrained: what a trainer that waits, or that only ever discards, has to say."""

from __future__ import annotations

from collections import Counter

from async_rl.algorithms.staleness import GroupVerdict, InvalidReason
from protocol.messages import EndReason, TrajectoryGroup

LONGEST_REASON = 160
SHOWN_REASONS = 2


class Untrained:
    """Counts groups by how they ended since this trainer started.

    invalid_in_a_row: those that ended invalid since one trained.
    """

    def __init__(self) -> None:
        self._ends: Counter[EndReason] = Counter()
        self._reasons: Counter[str] = Counter()
        self._dropped: Counter[str] = Counter()
        self.invalid_in_a_row = 0

    def count(self, group: TrajectoryGroup, verdict: GroupVerdict) -> None:
        """Note the end of a group."""
        self._ends[verdict.end] += 1
        if verdict.end is EndReason.INVALID:
            self.invalid_in_a_row += 1
            self._reasons[_why(group, verdict)] += 1
        elif verdict.trains:
            self.invalid_in_a_row = 0
        elif verdict.drop_reason is not None:
            self._dropped[verdict.drop_reason.value] += 1

    def words(self) -> str:
        """`12 groups ended invalid (ZeroDivisionError: no such digit) and 3 were dropped (stale)`; empty if there are none."""
        parts = []
        if invalid := self._ends[EndReason.INVALID]:
            parts.append(f"{invalid} ended invalid ({self.reasons()})")
        if dropped := self._ends[EndReason.DROPPED]:
            parts.append(f"{dropped} were dropped ({', '.join(sorted(self._dropped))})")
        return f"of the groups that came {' and '.join(parts)}" if parts else ""

    def reasons(self) -> str:
        """The commonest reasons of invalid groups."""
        shown = [reason for reason, _ in self._reasons.most_common(SHOWN_REASONS)]
        more = len(self._reasons) - len(shown)
        return "; ".join([*shown, f"and {more} other reasons"] if more > 0 else shown)


def _why(group: TrajectoryGroup, verdict: GroupVerdict) -> str:
    """The commonest reason among its trajectories; a scorer's own words where it has any."""
    reasons: Counter[str] = Counter()
    for trajectory, one in zip(group.trajectories, verdict.trajectories, strict=True):
        if not isinstance(one.reason, InvalidReason):
            continue
        scored = trajectory.reward
        own = scored.invalid_reason if one.reason is InvalidReason.REWARD and scored is not None else None
        reasons[" ".join(own.split())[:LONGEST_REASON] if own else one.reason.value] += 1
    return reasons.most_common(1)[0][0] if reasons else "no trajectory"
