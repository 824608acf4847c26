from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Awaitable

import pytest

from async_rl.environments.calls import call


async def test_a_sync_function_does_not_block_the_loop() -> None:
    released = threading.Event()

    def wait() -> str:
        return "released" if released.wait(10) else "timed out"

    pending = asyncio.ensure_future(call(wait))
    await asyncio.sleep(0)
    released.set()  # only a running loop can get here
    assert await pending == "released"


async def test_functions_that_never_return_do_not_take_the_place_of_others() -> None:
    hang = threading.Event()
    stuck = [asyncio.ensure_future(call(hang.wait)) for _ in range(64)]
    assert await asyncio.wait_for(call(lambda: 7), timeout=5) == 7
    hang.set()
    await asyncio.gather(*stuck)


async def test_what_the_function_raises_is_raised_here_even_system_exit() -> None:
    def leave() -> None:
        raise SystemExit(3)

    with pytest.raises(SystemExit):
        await call(leave)


async def test_an_awaitable_returned_by_a_plain_function_is_awaited() -> None:
    async def inner() -> int:
        return 5

    def plain() -> Awaitable[int]:
        return inner()

    assert await call(plain) == 5


async def test_threads_are_daemons() -> None:
    assert await call(lambda: threading.current_thread().daemon)


async def test_a_call_is_cheap() -> None:
    start = time.perf_counter()
    for _ in range(100):
        await call(int)
    assert time.perf_counter() - start < 5
