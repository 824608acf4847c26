"""What a config names of the user's own (`module:name`), tried in a process of its own before anything is made.

Somebody else's module may be missing, take for ever, or end its process: none of that may happen to who asks.
"""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import tempfile
from collections.abc import Callable, Mapping
from contextlib import suppress
from typing import IO, Any

from async_rl.config import RunConfig
from async_rl.config.dump import toml_value
from async_rl.environments.processes import LENGTH, framed
from async_rl.errors import ConfigError
from protocol.packing import unpack

CHILD = "async_rl.launch.user_code_child"
QUIET_S = 15.0  # a loaded machine takes seconds to start a process
_TAIL_BYTES = 4096


def require_user_code(config: RunConfig, *, say: Callable[[str], None] | None = None, quiet_s: float = QUIET_S) -> None:
    """Build the environment, and import the functions that `config` names, as its roles will: from this working directory.

    Waits for launch.start_timeout_s at most; what takes longer than `quiet_s` is said with `say` (default: on stderr).
    Raises: ConfigError for what cannot be imported, built or called, takes longer, or ends its process.
    """
    limit_s = config.launch.start_timeout_s
    with tempfile.TemporaryFile() as output:
        child, connection = _start(output)
        try:
            connection.sendall(framed(_asked(config).encode()))
            try:
                answer = _answer(connection, min(quiet_s, limit_s))
            except TimeoutError:
                if limit_s <= quiet_s:
                    raise
                (say or _on_stderr)(f"loading {_what(config)} takes its time (up to launch.start_timeout_s={limit_s:g} s) …")
                answer = _answer(connection, limit_s - quiet_s)
        except TimeoutError:
            raise ConfigError(
                f"{_what(config)} did not load within launch.start_timeout_s={limit_s:g} s: mend what hangs when it is "
                f"imported or built, or raise launch.start_timeout_s"
            ) from None
        except (EOFError, ConnectionError):
            raise ConfigError(_ended(config, child, output)) from None
        finally:
            connection.close()
            _end(child)
    if answer["error"] is not None:
        raise ConfigError(str(answer["error"]))


def _start(output: IO[bytes]) -> tuple[subprocess.Popen[bytes], socket.socket]:
    ours, theirs = socket.socketpair()
    with theirs:
        child = subprocess.Popen(
            [sys.executable, "-m", CHILD, str(theirs.fileno())],
            pass_fds=(theirs.fileno(),),
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
    return child, ours


def _asked(config: RunConfig) -> str:
    """As TOML: what roles read is TOML too, dates included."""
    environment, algorithm = config.environment, config.algorithm
    fields: Mapping[str, Any] = {
        "name": environment.name,
        "args": environment.args,
        "reward": environment.reward,
        "loss": algorithm.loss,
        "advantage": algorithm.advantage,
    }
    return "".join(f"{key} = {toml_value(value, key)}\n" for key, value in fields.items() if value is not None)


def _answer(connection: socket.socket, timeout_s: float) -> Mapping[str, Any]:
    """Raises: TimeoutError if nothing comes for so long; EOFError, ConnectionError if the process is gone."""
    connection.settimeout(timeout_s)
    (length,) = LENGTH.unpack(_exactly(connection, LENGTH.size))
    answer: Mapping[str, Any] = unpack(_exactly(connection, length))
    return answer


def _exactly(connection: socket.socket, count: int) -> bytes:
    parts = bytearray()
    while len(parts) < count:
        part = connection.recv(count - len(parts))
        if not part:
            raise EOFError
        parts += part
    return bytes(parts)


def _ended(config: RunConfig, child: subprocess.Popen[bytes], output: IO[bytes]) -> str:
    code = child.wait()
    how = f"by {signal.Signals(-code).name}" if code < 0 else f"with exit code {code}"
    size = output.seek(0, os.SEEK_END)
    output.seek(max(0, size - _TAIL_BYTES))
    lines = output.read().decode(errors="replace").split("\n")
    last = next((line.strip() for line in reversed(lines) if line.strip()), "")
    return (
        f"loading {_what(config)} ended its process {how}{f' (it said: {last})' if last else ''}: mend what it does at import"
    )


def _end(child: subprocess.Popen[bytes]) -> None:
    """With all that it started."""
    with suppress(ProcessLookupError, PermissionError):
        os.killpg(child.pid, signal.SIGKILL)
    child.wait()


def _what(config: RunConfig) -> str:
    environment, algorithm = config.environment, config.algorithm
    own = {
        "environment.reward": environment.reward,
        "algorithm.loss": algorithm.loss,
        "algorithm.advantage": algorithm.advantage,
    }
    parts = [f"environment.name={environment.name!r}"]
    return ", ".join([*parts, *(f"{key}={value!r}" for key, value in own.items() if value is not None and ":" in value)])


def _on_stderr(text: str) -> None:
    print(text, file=sys.stderr, flush=True)
