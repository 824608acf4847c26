"""Every error that async-rl raises on purpose. Messages name the field, the value, the bound and the remedy.

AsyncRLError
├── ConfigError            a setting that cannot work                         (exit code 2)
├── DataError              a prompt row that cannot be used                   (exit code 3)
├── ShapeError             tensors that do not fit each other
├── EngineError            the rollout engine cannot do what was asked
│   └── NotServing         no complete, proven version is loaded yet
├── WeightPushError        a push failed or was refused
│   ├── ManifestMismatch   names, shapes or dtypes differ
│   └── ProofFailed        the engine does not hold or compute what was pushed
├── IntakeLogError         the intake log is damaged, or not ours to write
├── CheckpointError        no complete checkpoint, or one that does not fit
├── RunDirError            the run directory exists, is missing or is full    (exit code 4)
├── DeadlineExceeded       who waited for whom, and how long                  (exit code 5)
└── RoleFailed             a role process ended with an error                 (exit code of the role)
protocol.errors.ProtocolError and its children are re-exported beside them   (QueueUnavailable: exit code 6; EpochFenced: 7;
QueueRefused: 8; WorkStalled: 9)
"""

from __future__ import annotations

from protocol.errors import (
    CodecError,
    EpochFenced,
    MessageTooLarge,
    ProtocolError,
    QueueFull,
    QueueRefused,
    QueueUnavailable,
    WorkStalled,
)

__all__ = [
    "AsyncRLError",
    "CheckpointError",
    "CodecError",
    "ConfigError",
    "DataError",
    "DeadlineExceeded",
    "EngineError",
    "EpochFenced",
    "IntakeLogError",
    "ManifestMismatch",
    "MessageTooLarge",
    "NotServing",
    "ProofFailed",
    "ProtocolError",
    "QueueFull",
    "QueueRefused",
    "QueueUnavailable",
    "RoleFailed",
    "RunDirError",
    "ShapeError",
    "WeightPushError",
    "WorkStalled",
    "exit_code",
]


FENCED = 7
"""Exit code of a trainer that found a newer one."""
REFUSED = 8
"""Exit code of whoever the server refuses, or who refuses the server: another try ends alike."""
STALLED = 9
"""A step or an engine of the process hung, and it gave its work up: another try may do better."""


class AsyncRLError(Exception):
    """Base of all errors that async-rl raises on purpose."""

    exit_code = 1


class ConfigError(AsyncRLError):
    exit_code = 2


class DataError(AsyncRLError):
    exit_code = 3


class ShapeError(AsyncRLError):
    pass


class EngineError(AsyncRLError):
    pass


class NotServing(EngineError):
    pass


class WeightPushError(AsyncRLError):
    pass


class ManifestMismatch(WeightPushError):
    pass


class ProofFailed(WeightPushError):
    pass


class IntakeLogError(AsyncRLError):
    exit_code = 4


class CheckpointError(AsyncRLError):
    exit_code = 4


class RunDirError(AsyncRLError):
    exit_code = 4


class DeadlineExceeded(AsyncRLError):
    exit_code = 5


class RoleFailed(AsyncRLError):
    def __init__(self, message: str, *, role_exit_code: int, summary: str = "a role failed") -> None:
        super().__init__(message)
        self.exit_code = role_exit_code if 0 < role_exit_code < 126 else 1
        self.summary = summary
        """Which role, and how it ended, without why."""

    def with_note(self, note: str) -> RoleFailed:
        """The same failure, `note` before its words."""
        return RoleFailed(f"{note}{self}", role_exit_code=self.exit_code, summary=self.summary)


def exit_code(error: BaseException) -> int:
    """The process exit code that belongs to an error (never 0)."""
    if isinstance(error, AsyncRLError):
        return error.exit_code
    if isinstance(error, QueueRefused):
        return REFUSED
    if isinstance(error, QueueUnavailable):
        return 6
    if isinstance(error, EpochFenced):
        return FENCED
    if isinstance(error, WorkStalled):
        return STALLED
    return 1
