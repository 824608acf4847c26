"""What every role does with the queue and with signals."""

from __future__ import annotations

import asyncio
import faulthandler
import os
import signal
import sys
from collections.abc import Callable, Coroutine
from typing import Any, NoReturn, TypeVar

from async_rl.errors import WorkStalled
from async_rl.launch.embedded_redis import resolve_url
from async_rl.logs import Event, get_logger
from protocol.redis_streams import RedisStreams
from workers.arguments import RoleArguments, describe, main_cause

T = TypeVar("T")

STOPPED = 128 + signal.SIGTERM
"""Exit code of a role that the run needs, and that was asked to stop before the run had ended."""
STOP_SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1)


def connect(arguments: RoleArguments) -> RedisStreams:
    """The run's streams on its server, not opened yet."""
    redis = arguments.config.redis
    return RedisStreams(
        resolve_url(redis, arguments.layout.root),
        arguments.run_id,
        max_message_bytes=redis.max_message_bytes,
        timeout_s=redis.timeout_s,
        retry_s=redis.retry_s,
        lease_s=redis.lease_s,
        tls=redis.tls,
    )


async def run_until_stopped(work: Coroutine[Any, Any, T], stop: Callable[[], None]) -> T:
    """Await `work`; SIGTERM, SIGINT and SIGUSR1 (Slurm's warning) call `stop`, and a second one ends at once."""
    loop = asyncio.get_running_loop()
    task = asyncio.ensure_future(work)
    asked = False

    def on_signal() -> None:
        nonlocal asked
        if asked:
            task.cancel()
        asked = True
        stop()

    for one in STOP_SIGNALS:
        loop.add_signal_handler(one, on_signal)
    try:
        return await task
    except BaseException as error:
        if isinstance(stalled := main_cause(error), WorkStalled):
            _end_at_once(stalled)
        raise
    finally:
        for one in STOP_SIGNALS:
            loop.remove_signal_handler(one)


def _end_at_once(error: WorkStalled) -> NoReturn:
    """A thread that hangs would keep an ordinary end waiting for ever: say where every thread is, and go."""
    message, code = describe(error)
    get_logger().error(Event.ROLE_FAILED, error=message)
    faulthandler.dump_traceback(sys.__stderr__ or 2)
    print(f"error: {message}", file=sys.stderr, flush=True)
    os._exit(code)
