"""async-rl: asynchronous off-policy RL for language models on message queues.

    from async_rl import RunConfig, run

Users import from here: the names of the wire (`protocol`) are re-exported, because another package on PyPI has that name too.
Importing this package imports neither torch nor vllm.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING

import protocol as _protocol

if TYPE_CHECKING:
    from async_rl.config import RunConfig, load_config
    from async_rl.launch.local import run
    from protocol.messages import (
        ChatMessage,
        EndReason,
        FinishReason,
        PromptTask,
        Reward,
        SamplingParams,
        Timings,
        Trajectory,
        TrajectoryGroup,
        Turn,
    )
    from protocol.versions import VersionSpan

__version__ = "0.1.0"

__all__ = [
    "ChatMessage",
    "EndReason",
    "FinishReason",
    "PromptTask",
    "Reward",
    "RunConfig",
    "SamplingParams",
    "Timings",
    "Trajectory",
    "TrajectoryGroup",
    "Turn",
    "VersionSpan",
    "load_config",
    "run",
]

_HOME = {
    "RunConfig": "async_rl.config",
    "VersionSpan": "protocol.versions",
    "load_config": "async_rl.config",
    "run": "async_rl.launch.local",
}
"""Where a name lives; every other is one of `protocol.messages`."""


def _require_own_protocol(module: object) -> None:
    """Raises: ImportError if another distribution's `protocol` is in place of ours."""
    if getattr(module, "ASYNC_RL_PROTOCOL", None) is not True:
        raise ImportError(
            f"the module `protocol` at {getattr(module, '__file__', None)} is not async-rl's: another distribution of that "
            f"name is installed over it or earlier on sys.path; install async-rl into a virtual environment of its own"
        )


_require_own_protocol(_protocol)


def __getattr__(name: str) -> object:
    """Load a public name at its first use."""
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = getattr(import_module(_HOME.get(name, "protocol.messages")), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
