"""The event loop that roles run in."""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Callable, Collection, Coroutine
from typing import Any, TypeVar

CANCEL_AGAIN_S = 0.5
T = TypeVar("T")


def run(main: Coroutine[Any, Any, T]) -> T:
    """`asyncio.run`, on uvloop where there is one: reading and writing large messages costs it less."""
    with asyncio.Runner(loop_factory=loop_factory()) as runner:
        return runner.run(main)


def loop_factory() -> Callable[[], asyncio.AbstractEventLoop] | None:
    """uvloop's; None, which is asyncio's own, where there is no wheel for platform or interpreter."""
    if sys.platform == "win32":
        return None
    try:
        from uvloop import new_event_loop
    except ImportError:
        return None
    return new_event_loop


async def end(tasks: Collection[asyncio.Task[None]]) -> None:
    """Cancel tasks until they are done: code of others may swallow a cancellation (asyncio.wait_for before Python 3.12)."""
    while unfinished := [task for task in tasks if not task.done()]:
        for task in unfinished:
            task.cancel()
        await asyncio.wait(unfinished, timeout=CANCEL_AGAIN_S)
