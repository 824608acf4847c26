"""Calling users' functions, sync or async, without blocking the event loop."""

from __future__ import annotations

import asyncio
import inspect
import threading
from collections.abc import Callable, Mapping
from contextvars import ContextVar
from typing import Any


def is_async(function: Callable[..., Any]) -> bool:
    """True if calling `function` (or a callable object) returns a coroutine."""
    return inspect.iscoroutinefunction(function) or inspect.iscoroutinefunction(type(function).__call__)


_INLINE: ContextVar[bool] = ContextVar("call sync functions inline", default=False)


def call_inline() -> None:
    """From here on (in this context) sync functions run in the calling thread and block it: for scoring processes."""
    _INLINE.set(True)


async def call(function: Callable[..., Any], *args: Any) -> Any:
    """Return `function(*args)`: awaited if async, else run in a thread of its own.

    A thread that never returns cannot be stopped. It is a daemon and no pool's: it neither delays the exit of the process
    nor takes a place away from later calls. Where that is not enough, score in reward workers, whose processes are killed.
    """
    result = function(*args) if is_async(function) or _INLINE.get() else await _in_daemon_thread(function, *args)
    return await result if inspect.isawaitable(result) else result


async def _in_daemon_thread(function: Callable[..., Any], *args: Any) -> Any:
    loop = asyncio.get_running_loop()
    outcome: asyncio.Future[tuple[Any, BaseException | None]] = loop.create_future()

    def deliver(value: Any, error: BaseException | None) -> None:
        if not outcome.done():
            outcome.set_result((value, error))

    def work() -> None:
        value, error = None, None
        try:
            value = function(*args)
        except BaseException as raised:  # also SystemExit: it is the caller's to judge
            error = raised
        if not loop.is_closed():
            loop.call_soon_threadsafe(deliver, value, error)

    threading.Thread(target=work, name=f"call-{getattr(function, '__name__', 'function')}", daemon=True).start()
    value, error = await outcome
    if error is not None:
        raise error
    return value


def with_keywords(function: Callable[..., Any], keywords: Mapping[str, Any]) -> Callable[[], Any]:
    """`function` with its keyword arguments given, as async as it was: for `call`, which passes positional ones."""
    if not is_async(function):
        return lambda: function(**keywords)

    async def run() -> Any:
        return await function(**keywords)

    return run
