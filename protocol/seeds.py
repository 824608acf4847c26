"""Seeds that cannot collide by accident: every sample's seed is a function of the run's seed and of what the sample is.

blake2b over the run's seed, the task's id and the member's index; so no two samples of a run share a seed, whichever
engine or worker draws them, and a task that is done again draws the same ones.
"""

from __future__ import annotations

from hashlib import blake2b


def _hash63(*parts: object) -> int:
    data = "\x1f".join(str(part) for part in parts).encode()
    return int.from_bytes(blake2b(data, digest_size=8).digest(), "little") >> 1


def group_seed(run_seed: int, task_id: str) -> int:
    """Seed of a task's group, in [0, 2**63)."""
    return _hash63("group", run_seed, task_id)


def trajectory_seed(group_seed: int, index: int) -> int:
    """Seed of member `index` of a group, in [0, 2**63)."""
    return _hash63("trajectory", group_seed, index)


def turn_seed(trajectory_seed: int, turn: int) -> int:
    """Seed of turn `turn` of a trajectory; turn 0 keeps the trajectory's."""
    return trajectory_seed if turn == 0 else _hash63("turn", trajectory_seed, turn)
