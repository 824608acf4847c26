"""Running code that nobody trusts: bubblewrap, an unprivileged user, limits, and a control group where there is one.

Inside there is no network, no file of the host but the interpreter and its libraries, no environment, no other process, and
nothing survives: everything that was started is in a process namespace whose first process is killed at the end.
"""

from __future__ import annotations

import asyncio
import json
import os
import shutil
import signal
import socket
import struct
import sys
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from async_rl.environments.verifiers.cgroups import ControlGroup, make_group
from async_rl.errors import ConfigError

_LENGTH: Final = struct.Struct("<I")
_LONGEST_FRAME_BYTES = 2**20
_GUEST = Path(__file__).with_name("sandbox_guest.py")
_START_S = 20.0
_END_S = 5.0
_FIRST_UID = 200_000
_TMP_BYTES = 64 * 2**20
_RECURSION = 10_000


class SandboxError(Exception):
    """The sandbox itself failed: nothing was found out about the code."""


class Misbehaved(Exception):
    """The code ended its process, hung, used too much, or wrote something else than answers. verdict: which."""

    def __init__(self, verdict: str, why: str) -> None:
        super().__init__(why)
        self.verdict = verdict


@dataclass(frozen=True, slots=True)
class Limits:
    """Of one sandbox."""

    memory_bytes: int = 512 * 2**20
    max_processes: int = 32
    """Processes and threads."""
    output_bytes: int = 2**20


class Sandbox:
    """Starts isolated interpreters. At most `concurrent` at a time, each under a uid of its own if we are root."""

    def __init__(self, limits: Limits, *, concurrent: int, python: str | None = None) -> None:
        self._limits = limits
        self._python = python
        self._layout: Sequence[str] | None = None
        self._free: asyncio.Queue[int] = asyncio.Queue()
        first = _FIRST_UID + (os.getpid() % 4096) * 64
        for slot in range(concurrent):
            self._free.put_nowait(first + slot)

    @asynccontextmanager
    async def interpreter(self, mode: str, order: Mapping[str, Any]) -> AsyncIterator[Interpreter]:
        """A started interpreter that was told what to do; dead with all it started afterwards.

        Raises: ConfigError if this host cannot isolate code; SandboxError if it did not start.
        """
        uid = await self._free.get()
        try:
            group = await asyncio.to_thread(
                make_group, memory_bytes=self._limits.memory_bytes, max_processes=self._limits.max_processes
            )
            try:
                interpreter = await self._start(uid, group)
                try:
                    await interpreter.greet({"mode": mode, "recursion": _RECURSION, **order})
                    yield interpreter
                finally:
                    await asyncio.shield(interpreter.kill())
            finally:
                if group is not None:
                    await asyncio.to_thread(group.remove)
        finally:
            self._free.put_nowait(uid)

    async def _start(self, uid: int, group: ControlGroup | None) -> Interpreter:
        if self._layout is None:
            self._layout = await asyncio.to_thread(find_layout, self._python)
        ours, theirs = socket.socketpair()
        try:
            child = await asyncio.create_subprocess_exec(
                *self._command(uid, group),
                stdin=theirs.fileno(),
                stdout=asyncio.subprocess.PIPE,
                stderr=asyncio.subprocess.PIPE,
                start_new_session=True,
                env={},
                cwd="/",
            )
        except BaseException:
            ours.close()
            raise
        finally:
            theirs.close()
        reader, writer = await asyncio.open_connection(sock=ours)
        return Interpreter(child, reader, writer, group, self._limits)

    def _command(self, uid: int, group: ControlGroup | None) -> list[str]:
        """Join the group, bring the control socket from descriptor 0 to 3, drop the uid, set limits, isolate, run."""
        assert self._layout is not None
        joins = " ".join(f"&& echo 0 > {file}" for file in (group.procs if group else ()))
        script = f'true {joins} && exec "$@" 3<&0 0</dev/null'
        drop = ["/usr/bin/setpriv", f"--reuid={uid}", f"--regid={uid}", "--clear-groups"] if os.geteuid() == 0 else []
        memory = self._limits.memory_bytes
        limits = [
            *(_tool("prlimit"), "--core=0", f"--as={memory}", f"--fsize={_TMP_BYTES}", "--nofile=256"),
            *([f"--nproc={self._limits.max_processes}"] if drop else []),
        ]
        return ["/bin/sh", "-c", script, "sandbox", *drop, *limits, *self._layout, "-c", _GUEST.read_text()]


class Interpreter:
    """One process in the sandbox, spoken to through its control socket."""

    def __init__(
        self,
        child: asyncio.subprocess.Process,
        reader: asyncio.StreamReader,
        writer: asyncio.StreamWriter,
        group: ControlGroup | None,
        limits: Limits,
    ) -> None:
        self._child, self._reader, self._writer = child, reader, writer
        self._group, self._limits = group, limits

    @property
    def pid(self) -> int:
        return self._child.pid

    async def greet(self, order: Mapping[str, Any]) -> None:
        """Wait until the guest is up, and send it its order. Raises: SandboxError."""
        try:
            async with asyncio.timeout(_START_S):
                ready = await self._frame()
                await self.send(order)
        except (TimeoutError, EOFError, ConnectionError, ValueError) as error:
            assert self._child.stderr is not None
            _end(self._child.pid)
            said = (await self._child.stderr.read(2000)).decode(errors="replace").strip()
            raise SandboxError(f"the sandbox did not start: {said or type(error).__name__}") from error
        if ready != {"ready": True}:
            raise SandboxError(f"the sandbox said {ready!r:.100} instead of that it is ready")

    async def send(self, value: Mapping[str, Any]) -> None:
        """What nobody reads any more is noticed when the answer is read."""
        body = json.dumps(value).encode()
        with suppress(ConnectionError):
            self._writer.write(_LENGTH.pack(len(body)) + body)
            await self._writer.drain()

    async def read(self) -> dict[str, Any]:
        """The next frame. Raises: Misbehaved if the process is gone or speaks something else."""
        try:
            frame = await self._frame()
        except (EOFError, ConnectionError):
            raise await self._gone() from None
        except ValueError as error:
            raise Misbehaved("forged", f"it wrote something else than answers: {error}") from None
        if not isinstance(frame, dict):
            raise Misbehaved("forged", "it wrote something else than answers")
        return frame

    async def output(self) -> str:
        """What a program prints until its end. Raises: Misbehaved if it failed or wrote too much."""
        child = self._child
        assert child.stdout is not None
        assert child.stderr is not None
        limit = self._limits.output_bytes
        pumps = [asyncio.ensure_future(_bounded(stream, limit)) for stream in (child.stdout, child.stderr)]
        try:
            output, errors = await asyncio.gather(*pumps)
        finally:
            for task in pumps:
                task.cancel()
            await asyncio.gather(*pumps, return_exceptions=True)
        code = await child.wait()
        said = errors.decode(errors="replace")
        if code != 0:
            if "MemoryError" in said[-2000:] or self._is_out_of_memory():
                raise Misbehaved("memory", "out of memory")
            raise Misbehaved("error", f"exit code {code}: {said.strip().splitlines()[-1:] or ''}")
        return output.decode(errors="replace")

    async def kill(self) -> None:
        """End it with everything that it started, and wait until all of it is gone.

        The first process of its namespace is killed, and the kernel ends the others with it; bwrap, its parent, takes note of
        its end and leaves. Killing bwrap alone would do too, but leave a dead process for whoever adopts it.
        """
        self._writer.close()
        with suppress(ConnectionError):
            await self._writer.wait_closed()
        first = _children(self._child.pid)
        for pid in first:
            _end(pid)
        if not first:
            _end(self._child.pid)
        try:
            async with asyncio.timeout(_END_S):
                await self._ended()
        except TimeoutError:
            _end(self._child.pid)
            await self._ended()

    async def _ended(self) -> None:
        assert self._child.stdout is not None
        assert self._child.stderr is not None
        await asyncio.gather(_drain(self._child.stdout), _drain(self._child.stderr))  # a full pipe would hide the end
        await self._child.wait()

    async def _frame(self) -> Any:
        (length,) = _LENGTH.unpack(await self._reader.readexactly(_LENGTH.size))
        if length > _LONGEST_FRAME_BYTES:
            raise ValueError(f"a frame of {length} bytes")
        return json.loads(await self._reader.readexactly(length))

    async def _gone(self) -> Misbehaved:
        with suppress(TimeoutError):
            async with asyncio.timeout(1.0):
                await self._child.wait()
        if self._is_out_of_memory():
            return Misbehaved("memory", "out of memory")
        return Misbehaved("ended", "it ended its process before it was done")

    def _is_out_of_memory(self) -> bool:
        return self._group is not None and self._group.hit_memory_limit()


def _children(pid: int) -> list[int]:
    with suppress(OSError):
        return [int(child) for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]
    return []


def _end(pid: int) -> None:
    with suppress(ProcessLookupError, PermissionError):
        os.kill(pid, signal.SIGKILL)


async def _bounded(stream: asyncio.StreamReader, limit: int) -> bytes:
    """All of the stream. Raises: Misbehaved as soon as it is longer than `limit`."""
    parts = bytearray()
    while part := await stream.read(2**16):
        parts += part
        if len(parts) > limit:
            raise Misbehaved("output", f"it wrote more than {limit} bytes")
    return bytes(parts)


async def _drain(stream: asyncio.StreamReader) -> None:
    while await stream.read(2**16):
        pass


def find_layout(python: str | None) -> Sequence[str]:
    """bwrap with what is visible inside, up to the interpreter. Raises: ConfigError if this host cannot isolate code."""
    if sys.platform != "linux":
        raise ConfigError(f"the verifier code needs Linux to isolate what it runs, and this is {sys.platform}")
    bwrap = _tool("bwrap")
    _tool("prlimit")
    executable = _interpreter(python)
    library = [path for path in ("/lib", "/lib64", "/usr/lib", "/usr/lib64") if Path(path).exists()]
    binds = [argument for path in library for argument in ("--ro-bind", path, path)]
    return [
        *(bwrap, "--unshare-all", "--unshare-user", "--disable-userns", "--die-with-parent", "--new-session", "--clearenv"),
        "--as-pid-1",  # bwrap itself waits for it and leaves no dead process to others
        *("--cap-drop", "ALL", "--hostname", "sandbox", *binds, "--ro-bind", executable, executable),
        *("--dev", "/dev", "--size", str(_TMP_BYTES), "--tmpfs", "/tmp", "--chdir", "/tmp", "--remount-ro", "/"),
        *("--setenv", "PYTHONIOENCODING", "utf-8", "--setenv", "PYTHONHASHSEED", "0", executable, "-I", "-S", "-B"),
    ]


def _tool(name: str) -> str:
    path = shutil.which(name, path="/usr/bin:/bin:/usr/local/bin")
    if path is None:
        package = {"bwrap": "bubblewrap", "prlimit": "util-linux"}[name]
        raise ConfigError(
            f"the verifier code isolates what it runs with {name}, which is not installed; install the package {package}, "
            f"or score elsewhere: unisolated code is never run"
        )
    return path


def _interpreter(python: str | None) -> str:
    """An interpreter whose library is below /usr/lib or /lib, where an unprivileged user may read it."""
    path = shutil.which(python or "python3", path="/usr/bin:/bin")
    if path is None:
        raise ConfigError("the verifier code needs an interpreter in /usr/bin (python3) to run inside the sandbox")
    return str(Path(path).resolve())
