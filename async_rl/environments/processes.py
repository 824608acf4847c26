"""Processes that can be killed: what hangs or crashes costs one answer, not the worker that asked.

Each process answers one frame at a time and is a session of its own: after a deadline it is killed with all that it
started, and replaced when it is needed next. Nothing is pickled: frames are msgpack, each behind its length.
"""

from __future__ import annotations

import asyncio
import os
import signal
import socket
import struct
import sys
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from typing import Final, TypeVar

from async_rl.errors import CodecError, ConfigError, DeadlineExceeded
from async_rl.logs import get_logger
from protocol.packing import unpack

T = TypeVar("T")
LENGTH: Final = struct.Struct("<I")
_LONGEST_FRAME_BYTES = 2**24


def framed(body: bytes) -> bytes:
    """A frame: the length of `body` as a little-endian uint32, then `body`."""
    return LENGTH.pack(len(body)) + body


class ProcessHung(Exception):
    """No answer within the deadline; the process was killed."""


class ProcessDied(Exception):
    """The process ended, or wrote something else than a frame."""


class ProcessPool:
    """`processes` processes running `python -m module FD`, asked one frame each at a time.

    The first frame of each is `start_frame`; it answers with {"error": text or None}. what: names the pool in errors.
    Started when needed, or all at once with `start`.
    """

    def __init__(self, module: str, start_frame: bytes, *, what: str, processes: int, start_timeout_s: float = 120.0) -> None:
        self._module, self._start_frame, self._what = module, start_frame, what
        self._start_timeout_s = start_timeout_s
        self._num_processes = processes
        self._idle: asyncio.LifoQueue[_Process | None] = asyncio.LifoQueue()  # None: a place whose process must be started
        for _ in range(processes):
            self._idle.put_nowait(None)
        self._running: set[_Process] = set()
        self._log = get_logger()
        self.greeting: Mapping[str, object] = {}
        """What a process that was started said first, beside that nothing went wrong."""

    @property
    def pids(self) -> list[int]:
        """Of the processes that run now."""
        return [process.pid for process in self._running]

    async def start(self) -> None:
        """Start all processes. Raises: ConfigError if they cannot load what they serve; DeadlineExceeded."""
        first = await self._take()  # one at first: what cannot be loaded is said once
        others = await asyncio.gather(*(self._take() for _ in range(self._num_processes - 1)))
        for process in (first, *others):
            self._idle.put_nowait(process)

    async def ask(self, frame: bytes, decode: Callable[[bytes], T], *, timeout_s: float) -> T:
        """The decoded answer to `frame`. Waits for a free process; `timeout_s` counts from then on.

        decode raises CodecError for what is no answer. Raises: ProcessHung (killed at the deadline); ProcessDied;
        ConfigError, DeadlineExceeded as `start`.
        """
        process = await self._take()
        place: _Process | None = None
        try:
            async with asyncio.timeout(timeout_s):
                answer = decode(await process.ask(frame))
            place = process
            return answer
        except TimeoutError as error:
            self._log.warning("process.killed", what=self._what, pid=process.pid, timeout_s=timeout_s)
            raise ProcessHung(f"no answer within {timeout_s:g} s") from error
        except (EOFError, ConnectionError, CodecError) as error:
            code = await self._kill(process)
            self._log.warning("process.died", what=self._what, pid=process.pid, code=code)
            raise ProcessDied(_describe(code, error)) from error
        finally:
            if place is None:
                await asyncio.shield(self._kill(process))
            self._idle.put_nowait(place)

    async def close(self) -> None:
        """Kill all processes and wait for their end."""
        await asyncio.gather(*(self._kill(process) for process in list(self._running)))

    async def _take(self) -> _Process:
        process = await self._idle.get()
        if process is not None:
            return process
        try:
            return await self._start_process()
        except BaseException:
            self._idle.put_nowait(None)
            raise

    async def _start_process(self) -> _Process:
        process = await _Process.spawn(self._module)
        self._running.add(process)
        try:
            async with asyncio.timeout(self._start_timeout_s):
                reply = unpack(await process.ask(self._start_frame))
            if reply["error"] is not None:
                raise ConfigError(str(reply["error"]))
            self.greeting = reply
        except TimeoutError as error:
            await self._kill(process)
            raise DeadlineExceeded(f"waited {self._start_timeout_s:g} s for a process to load {self._what}") from error
        except (EOFError, ConnectionError) as error:
            code = await self._kill(process)
            raise ConfigError(f"loading {self._what} ended its process: {_describe(code, error)}") from error
        except BaseException:
            await asyncio.shield(self._kill(process))
            raise
        return process

    async def _kill(self, process: _Process) -> int:
        self._running.discard(process)
        return await process.kill()


@dataclass(eq=False, slots=True)
class _Process:
    """A running process and the connection to it."""

    child: asyncio.subprocess.Process
    reader: asyncio.StreamReader
    writer: asyncio.StreamWriter

    @property
    def pid(self) -> int:
        return self.child.pid

    @staticmethod
    async def spawn(module: str) -> _Process:
        ours, theirs = socket.socketpair()
        try:
            child = await asyncio.create_subprocess_exec(
                *(sys.executable, "-m", module, str(theirs.fileno())),
                stdin=asyncio.subprocess.DEVNULL,
                pass_fds=(theirs.fileno(),),
                start_new_session=True,
            )
        except BaseException:
            ours.close()
            raise
        finally:
            theirs.close()
        reader, writer = await asyncio.open_connection(sock=ours)
        return _Process(child, reader, writer)

    async def ask(self, frame: bytes) -> bytes:
        """Send a frame, return the next. Raises: EOFError or ConnectionError if the process is gone; CodecError."""
        self.writer.write(framed(frame))
        await self.writer.drain()
        (length,) = LENGTH.unpack(await self.reader.readexactly(LENGTH.size))
        if length > _LONGEST_FRAME_BYTES:
            raise CodecError(f"an answer of {length} bytes")
        return await self.reader.readexactly(length)

    async def kill(self) -> int:
        """End the process and its group; its exit code, negative for a signal."""
        with suppress(ProcessLookupError, PermissionError):
            os.killpg(self.pid, signal.SIGKILL)
        code = await self.child.wait()
        self.writer.close()
        with suppress(ConnectionError):
            await self.writer.wait_closed()
        return code


def _describe(code: int, error: BaseException) -> str:
    if isinstance(error, CodecError):
        return f"it wrote something else than an answer ({error})"
    return f"signal {signal.Signals(-code).name}" if code < 0 else f"exit code {code}"
