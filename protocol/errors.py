"""Errors of the wire and the queue (torch-free). `async_rl.errors` re-exports them in one tree.

ProtocolError
├── CodecError            a message that cannot be packed or read
├── MessageTooLarge       above redis.max_message_bytes
├── QueueUnavailable      the server does not answer (retry)
│   └── QueueFull         the server is at maxmemory (wait, retry)
├── WorkStalled           a worker's thread hangs (end the process)
├── QueueRefused          the server cannot be used safely (change it)
└── EpochFenced           a newer trainer incarnation exists (stop)
"""

from __future__ import annotations


class ProtocolError(Exception):
    """Base of all errors of the wire."""


class CodecError(ProtocolError):
    """The message cannot be packed or read; says what and where."""


class MessageTooLarge(ProtocolError):
    """A message is larger than redis.max_message_bytes."""


class QueueUnavailable(ProtocolError):
    """The server did not answer in time, or the connection broke."""


class QueueFull(QueueUnavailable):
    """The server is at maxmemory and refuses writes."""


class WorkStalled(ProtocolError):
    """A worker's work made no progress for so long that its lease is gone; says what it was."""


class QueueRefused(ProtocolError):
    """The server's settings would lose data; says which and what to set."""


class EpochFenced(ProtocolError):
    """This trainer's epoch is no longer current: another trainer started."""
