"""How many tasks may be issued: derived from counters at every decision, never kept as credits that could be lost."""

from __future__ import annotations

from protocol.streams import Counters, RunState


def may_issue(
    counters: Counters,
    trained_through_min_served: int | None,
    max_lag: int,
    groups_per_step: int,
    *,
    groups_needed: int | None = None,
) -> int:
    """Number of tasks that may be issued now.

    A task is issued while issued − discarded − trained_through(min_served) < (max_lag + 1) × groups_per_step, so that in
    the mean a group is trained at most max_lag steps after the version that sampled it. `trained_through_min_served` is
    None while no healthy engine serves: nothing is issued then. `groups_needed` is what the whole run can train
    (max_steps × groups_per_step): what goes beyond it could only end unused.
    """
    if counters.state is not RunState.RUNNING or trained_through_min_served is None:
        return 0
    undiscarded = counters.issued - counters.discarded
    room = (max_lag + 1) * groups_per_step - (undiscarded - trained_through_min_served)
    if groups_needed is not None:
        room = min(room, groups_needed - undiscarded)
    return max(0, room)
