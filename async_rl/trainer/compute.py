"""The one thread in which a trainer computes.

Steps, scores and copies of the weights take turns anyway. In threads that change, MKL and OpenMP keep buffers and helpers for
each that ever called them, as large as the largest call: memory that creeps up for as long as a thread has not met its largest.
"""

from __future__ import annotations

import asyncio
import contextvars
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import ParamSpec, TypeVar

P = ParamSpec("P")
T = TypeVar("T")


class ComputeThread:
    """As `asyncio.to_thread`, in the same thread every time; calls wait for the ones before."""

    def __init__(self) -> None:
        self._executor = ThreadPoolExecutor(max_workers=1, thread_name_prefix="compute")

    async def run(self, function: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
        """The result of the call, or what it raises. Cancelling it lets the call run on."""
        call = partial(contextvars.copy_context().run, function, *args, **kwargs)
        return await asyncio.get_running_loop().run_in_executor(self._executor, call)

    def close(self) -> None:
        """Take no more calls; one that runs is not waited for."""
        self._executor.shutdown(wait=False)
