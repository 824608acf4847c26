"""When a role that failed is started again, and when it is not worth it."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass

from async_rl.errors import REFUSED, CheckpointError, ConfigError, DataError, DeadlineExceeded

HOPELESS = frozenset({ConfigError.exit_code, DataError.exit_code, CheckpointError.exit_code, REFUSED})
"""Exit codes that another start will end with too: settings, data, run directory, a server that refuses us. Not a server that
does not answer: it may come back."""
NEVER_HEALTHY_TRIES = 3
"""A role that ended this often by itself before it ever held a lease is broken, not unlucky."""


def is_hopeless(code: int | None, *, has_peers: bool) -> bool:
    """Whether another start would end alike. has_peers: the role is a worker among others of its kind.

    A worker whose deadline passed may be what hung. A trainer whose deadline passed waited for the others, and would again.
    """
    return code in HOPELESS or (code == DeadlineExceeded.exit_code and not has_peers)


@dataclass(frozen=True, slots=True)
class RestartPolicy:
    """See LaunchConfig. The defaults restart nothing."""

    max_restarts: int = 0
    window_s: float = 600.0
    backoff_s: float = 0.5
    max_backoff_s: float = 30.0


class FailureHistory:
    """The failures of one role."""

    def __init__(self, policy: RestartPolicy) -> None:
        self._policy = policy
        self._failed_at: deque[float] = deque()
        self._in_a_row = 0
        self.count = 0
        """Failures ever."""

    def fail(self, now: float, *, lived_s: float) -> float | None:
        """Note a failure at `now` of a start that lived for `lived_s`. Returns the seconds to wait before the next start; None:
        it has failed too often."""
        policy = self._policy
        self.count += 1
        self._failed_at.append(now)
        while self._failed_at[0] < now - policy.window_s:
            self._failed_at.popleft()
        if len(self._failed_at) > policy.max_restarts:
            return None
        self._in_a_row = 1 if lived_s > policy.max_backoff_s else self._in_a_row + 1
        doublings = min(self._in_a_row - 1, 60)
        return min(policy.backoff_s * 2.0**doublings, policy.max_backoff_s)
