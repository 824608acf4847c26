"""Scoring in processes that can be killed: a verifier that hangs or crashes costs one reward, not the worker.

Each process scores one episode at a time and is a session of its own: after a deadline it is killed with all that it
started, and replaced when it is needed next. Nothing is pickled: specifications and episodes are msgpack frames.
"""

from __future__ import annotations

import asyncio
import os
import signal
import socket
import sys
from contextlib import suppress
from dataclasses import dataclass

from async_rl.environments.base import Episode
from async_rl.environments.load import EnvironmentSpec
from async_rl.errors import CodecError, ConfigError, DeadlineExceeded
from async_rl.logs import get_logger
from async_rl.reward.score import timed_out
from async_rl.reward.wire import LENGTH, framed, pack_episode, pack_start, unpack_reward
from protocol.messages import Reward
from protocol.packing import unpack

CRASHED = "crash"
_GRACE_S = 0.25  # async verifiers are cancelled by their own process at the deadline: let it say so
_LONGEST_FRAME_BYTES = 2**24


class ScoringPool:
    """Scores with `environment` in `processes` processes, each score within `timeout_s` seconds."""

    def __init__(
        self, environment: EnvironmentSpec, *, processes: int, timeout_s: float, start_timeout_s: float = 120.0
    ) -> None:
        self._environment = environment
        self._timeout_s = timeout_s
        self._start_timeout_s = start_timeout_s
        self._num_processes = processes
        self._idle: asyncio.LifoQueue[_Process | None] = asyncio.LifoQueue()  # None: a place whose process must be started
        self._running: set[_Process] = set()
        self._log = get_logger()

    async def start(self) -> None:
        """Start all processes. Raises: ConfigError if the environment cannot be loaded there; DeadlineExceeded."""
        for _ in range(self._num_processes):
            self._idle.put_nowait(None)
        first = await self._take()  # one at first: what cannot be loaded is said once
        others = await asyncio.gather(*(self._take() for _ in range(self._num_processes - 1)))
        for process in (first, *others):
            self._idle.put_nowait(process)

    async def score(self, episode: Episode) -> Reward:
        """The episode's reward; invalid if the process hangs (killed at the deadline) or dies. Waits for a free process."""
        frame = pack_episode(episode)
        process = await self._take()
        place: _Process | None = None
        try:
            async with asyncio.timeout(self._timeout_s + _GRACE_S):
                reward = unpack_reward(await process.ask(frame))
            place = process
            return reward
        except TimeoutError:
            self._log.warning("reward.process_killed", pid=process.pid, timeout_s=self._timeout_s, task_id=episode.task.task_id)
            return timed_out(self._timeout_s)
        except (EOFError, ConnectionError, CodecError) as error:
            code = await self._kill(process)
            self._log.warning("reward.process_died", pid=process.pid, code=code, task_id=episode.task.task_id)
            return Reward.invalid(f"the scoring process died: {_describe(code, error)}", CRASHED)
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
        process = await _Process.spawn()
        self._running.add(process)
        start = pack_start(self._environment, self._timeout_s, sys.path)
        try:
            async with asyncio.timeout(self._start_timeout_s):
                reply = unpack(await process.ask(start))
            if reply["error"] is not None:
                raise ConfigError(str(reply["error"]))
        except TimeoutError as error:
            await self._kill(process)
            raise DeadlineExceeded(
                f"the reward worker waited {self._start_timeout_s:g} s for a scoring process to load {self._environment.name!r}"
            ) from error
        except (EOFError, ConnectionError) as error:
            code = await self._kill(process)
            raise ConfigError(f"loading {self._environment.name!r} ended its process: {_describe(code, error)}") from error
        except BaseException:
            await asyncio.shield(self._kill(process))
            raise
        return process

    async def _kill(self, process: _Process) -> int:
        self._running.discard(process)
        return await process.kill()


@dataclass(eq=False, slots=True)
class _Process:
    """A running `pool_child` and the connection to it."""

    child: asyncio.subprocess.Process
    reader: asyncio.StreamReader
    writer: asyncio.StreamWriter

    @property
    def pid(self) -> int:
        return self.child.pid

    @staticmethod
    async def spawn() -> _Process:
        ours, theirs = socket.socketpair()
        try:
            child = await asyncio.create_subprocess_exec(
                *(sys.executable, "-m", "async_rl.reward.pool_child", str(theirs.fileno())),
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
            raise CodecError(f"a reward of {length} bytes")
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
        return f"it wrote something else than a reward ({error})"
    return f"signal {signal.Signals(-code).name}" if code < 0 else f"exit code {code}"
