from __future__ import annotations

import asyncio
import contextvars
import threading

import pytest

from async_rl.trainer.compute import ComputeThread

NAME: contextvars.ContextVar[str] = contextvars.ContextVar("name")


async def test_every_call_runs_in_one_thread_in_order_with_its_callers_context() -> None:
    compute, ran = ComputeThread(), list[tuple[int, str, int]]()

    def call(number: int, *, factor: int) -> int:
        ran.append((number, NAME.get(), threading.get_ident()))
        return factor * number

    async def ask(number: int) -> int:
        NAME.set(f"caller {number}")
        return await compute.run(call, number, factor=10)

    assert await asyncio.gather(*map(ask, range(8))) == [10 * number for number in range(8)]
    assert [one[:2] for one in ran] == [(number, f"caller {number}") for number in range(8)]
    assert len({thread for _, _, thread in ran}) == 1
    assert ran[0][2] != threading.get_ident()
    compute.close()


async def test_what_a_call_raises_comes_out_and_the_thread_goes_on() -> None:
    compute = ComputeThread()
    with pytest.raises(ZeroDivisionError):
        await compute.run(lambda: 1 // 0)
    assert await compute.run(lambda: 7) == 7
    compute.close()


async def test_a_caller_that_is_cancelled_leaves_while_its_call_runs_on_and_the_next_one_waits() -> None:
    compute, may_end, ended = ComputeThread(), threading.Event(), list[str]()

    def slow() -> None:
        assert may_end.wait(10)
        ended.append("slow")

    running = asyncio.create_task(compute.run(slow))
    await asyncio.sleep(0)
    running.cancel()
    with pytest.raises(asyncio.CancelledError):
        await running
    after = asyncio.create_task(compute.run(ended.append, "after"))
    await asyncio.sleep(0)
    assert ended == []
    may_end.set()
    await after
    assert ended == ["slow", "after"]
    compute.close()
