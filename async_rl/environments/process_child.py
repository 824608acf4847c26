"""The child's side of a `ProcessPool`: frames from the parent, read in a thread so that its end is noticed at once."""

from __future__ import annotations

import ctypes
import os
import queue
import signal
import socket
import sys
import threading

from async_rl.environments.processes import LENGTH, framed

_PR_SET_PDEATHSIG = 1


class ParentConnection:
    """The connection whose descriptor is the first argument of the process.

    When the parent is gone, this process and all it started end at once, whatever it is doing.
    """

    def __init__(self) -> None:
        end_with_parent()
        self._socket = socket.socket(fileno=int(sys.argv[1]))
        self._socket.set_inheritable(False)
        self._frames: queue.SimpleQueue[bytes] = queue.SimpleQueue()

    def read(self) -> bytes:
        """The next frame, in this thread: the first one, and all of them where `listen` is not called."""
        try:
            return self._read_frame()
        except EOFError:
            sys.exit(0)

    def listen(self) -> None:
        """From here on frames are read in a thread: the main thread is for work that may set alarms."""
        threading.Thread(target=self._read_frames, daemon=True).start()

    def next(self) -> bytes:
        """Wait for a frame."""
        return self._frames.get()

    def send(self, body: bytes) -> None:
        self._socket.sendall(framed(body))

    def _read_frames(self) -> None:
        try:
            while True:
                self._frames.put(self._read_frame())
        finally:
            os.killpg(0, signal.SIGKILL)

    def _read_frame(self) -> bytes:
        (length,) = LENGTH.unpack(self._read_exactly(LENGTH.size))
        return self._read_exactly(length)

    def _read_exactly(self, count: int) -> bytes:
        parts = bytearray()
        while len(parts) < count:
            part = self._socket.recv(count - len(parts))
            if not part:
                raise EOFError("the parent is gone")
            parts += part
        return bytes(parts)


def end_with_parent() -> None:
    """Linux: also if the reading thread cannot run because some C code holds the interpreter."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
