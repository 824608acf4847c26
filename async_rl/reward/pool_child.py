"""One scoring process: `python -m async_rl.reward.pool_child FD`. Reads episodes, answers rewards, one at a time.

Scoring runs in the main thread, because many verifiers set alarms, which only works there. The connection is read in
another one: when the reward worker is gone, this process and all it started end at once, whatever it is doing.
"""

from __future__ import annotations

import asyncio
import ctypes
import os
import queue
import signal
import socket
import sys
import threading

from async_rl.environments.base import Environment
from async_rl.environments.calls import call_inline
from async_rl.environments.load import load_environment
from async_rl.reward.score import score_episode
from async_rl.reward.wire import LENGTH, framed, pack_reward, unpack_episode, unpack_start
from protocol.packing import pack

_PR_SET_PDEATHSIG = 1


def main() -> None:
    _end_with_parent()
    connection = socket.socket(fileno=int(sys.argv[1]))
    connection.set_inheritable(False)
    start = _read_frame(connection)
    try:
        config, timeout_s, sys.path[:] = unpack_start(start)
        environment = load_environment(config)
    except Exception as error:
        connection.sendall(framed(pack({"error": str(error)})))
        return
    connection.sendall(framed(pack({"error": None})))
    frames: queue.SimpleQueue[bytes] = queue.SimpleQueue()
    threading.Thread(target=_read_frames, args=(connection, frames), daemon=True).start()
    call_inline()
    with asyncio.Runner() as runner:
        while True:
            runner.run(_answer(connection, environment, frames.get(), timeout_s))


async def _answer(connection: socket.socket, environment: Environment, frame: bytes, timeout_s: float) -> None:
    reward = await score_episode(environment, unpack_episode(frame), timeout_s)
    connection.sendall(framed(pack_reward(reward)))


def _end_with_parent() -> None:
    """Linux: also if the thread below cannot run because a verifier holds the interpreter."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)


def _read_frames(connection: socket.socket, frames: queue.SimpleQueue[bytes]) -> None:
    try:
        while True:
            frames.put(_read_frame(connection))
    finally:
        os.killpg(0, signal.SIGKILL)


def _read_frame(connection: socket.socket) -> bytes:
    (length,) = LENGTH.unpack(_read_exactly(connection, LENGTH.size))
    return _read_exactly(connection, length)


def _read_exactly(connection: socket.socket, count: int) -> bytes:
    parts = bytearray()
    while len(parts) < count:
        part = connection.recv(count - len(parts))
        if not part:
            raise EOFError("the reward worker is gone")
        parts += part
    return bytes(parts)


if __name__ == "__main__":
    main()
