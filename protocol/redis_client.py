"""One Redis server behind bounded, named waits: retries of idempotent operations, Lua scripts, errors in our own tree."""

from __future__ import annotations

import asyncio
import random
import re
import ssl
import time
from collections.abc import Awaitable, Callable, Sequence
from hashlib import sha1
from importlib.resources import files
from typing import Any, TypeVar

import hiredis
from redis.asyncio import ConnectionPool, Redis
from redis.asyncio.retry import Retry
from redis.backoff import NoBackoff
from redis.exceptions import (
    AuthenticationError,
    AuthorizationError,
    ClusterDownError,
    ExecAbortError,
    NoPermissionError,
    NoScriptError,
    OutOfMemoryError,
    ReadOnlyError,
    RedisError,
    ResponseError,
    TryAgainError,
)
from redis.exceptions import ConnectionError as RedisConnectionError
from redis.exceptions import TimeoutError as RedisTimeoutError

from protocol.errors import EpochFenced, ProtocolError, QueueFull, QueueRefused, QueueUnavailable
from protocol.tls import TlsFiles

T = TypeVar("T")

_FENCED_SCRIPTS = frozenset(
    {"take_over", "finish", "newly_dead", "finish_dead", "report", "end_run", "clear", "reopen", "restore"}
)  # fmt: skip
_PLAIN_SCRIPTS = frozenset(
    {
        "open", "issue", "mark_exhausted", "reissue", "heartbeat", "leave", "claim", "own_pending", "publish", "bury",
        "raise_epoch", "depths", "note_started", "in_flight", "requeue", "readmit", "mended",
    }
)  # fmt: skip
_FIRST_WAIT_S, _LONGEST_WAIT_S = 0.02, 1.0
_READ_SIZE_BYTES = 2**20
_UNAVAILABLE_ERRORS = (ReadOnlyError, ClusterDownError, TryAgainError)
_UNAVAILABLE_REPLIES = ("MISCONF", "READONLY", "NOREPLICAS", "BUSY Redis", "BUSY Valkey")
"""What a server answers that will be usable again (failing over, its disk full, in a long script)."""
_USER, _QUERY = re.compile(r"//\S*@"), re.compile(r"\?\S*")
_CUT_TLS = frozenset({"UNEXPECTED_EOF_WHILE_READING", "APPLICATION_DATA_AFTER_CLOSE_NOTIFY"})
_LOST_STREAM_REPLIES = ("NOGROUP", "UNBLOCKED", "no longer exists", "no such key")


def _load_scripts() -> dict[str, tuple[str, str]]:
    """Name → (SHA-1, source) of every Lua script; those of the trainer begin with the fence."""
    folder = files("protocol") / "lua"
    fence = (folder / "_fence.lua").read_text(encoding="utf-8")
    sources = {name: (folder / f"{name}.lua").read_text(encoding="utf-8") for name in _PLAIN_SCRIPTS | _FENCED_SCRIPTS}
    sources.update({name: fence + sources[name] for name in _FENCED_SCRIPTS})
    return {name: (sha1(source.encode(), usedforsecurity=False).hexdigest(), source) for name, source in sources.items()}


def _quick(connection_class: type[Any]) -> type[Any]:
    """The same connection, quicker at many commands at once: packed in C by hiredis (redis-py's asyncio side does it in Python,
    part by part), their replies taken without a coroutine for each."""

    def pack_command(self: object, *args: Any) -> list[bytes]:
        if isinstance(args[0], str) and " " in args[0]:  # redis-py names some commands in two words
            args = (*args[0].split(), *args[1:])
        return [hiredis.pack_command(args)]

    def buffered_reply(self: Any) -> Any:
        """A short reply that has arrived; something that is neither bytes nor an error if there is none."""
        reader = getattr(self._parser, "_reader", None)
        return reader.gets() if isinstance(reader, hiredis.Reader) else None

    methods = {"pack_command": pack_command, "buffered_reply": buffered_reply}
    return type(f"Quick{connection_class.__name__}", (connection_class,), methods)


class RedisClient:
    """A pool of connections with deadlines.

    timeout_s bounds one answer; a blocking command may take its block time more. retry_s bounds how long an operation is
    tried again while the server is away (every operation here is idempotent, so a lost reply is safe to repeat).
    """

    def __init__(
        self,
        url: str,
        *,
        timeout_s: float,
        retry_s: float,
        now: Callable[[], float] = time.monotonic,
        sleep: Callable[[float], Awaitable[None]] = asyncio.sleep,
        tls: TlsFiles = TlsFiles(),
    ) -> None:
        self.shown_url = _QUERY.sub("?***", _USER.sub("//***@", url))
        # Without the client's certificate that it asks for, a TLS 1.3 server just closes the connection.
        lacks_certificate = url.startswith("rediss://") and tls.cert is None
        self._hint = (
            " (if it asks for a client's certificate, set redis.cert_file and redis.key_file)" if lacks_certificate else ""
        )
        self.retry_s = retry_s
        self._timeout_s = timeout_s
        self._now = now
        self._sleep = sleep
        self.repair: Callable[[], Awaitable[None]] | None = None
        """Called once when an operation finds the run's streams gone; the operation is then tried again."""
        self._scripts = _load_scripts()
        try:
            self._pool: ConnectionPool = ConnectionPool.from_url(
                url,
                protocol=2,
                decode_responses=False,
                retry=Retry(NoBackoff(), 0),  # `run` retries, with a bound and a name
                socket_timeout=None,  # `_bounded` sets the deadline of each call, above its block time
                socket_connect_timeout=timeout_s,
                socket_read_size=_READ_SIZE_BYTES,
                **(tls.as_redis_arguments() if url.startswith("rediss://") else {}),
            )
        except ValueError as error:
            raise QueueRefused(f"redis.url={self.shown_url!r}: {error}; use redis://, rediss:// or unix://") from error
        self._pool.connection_class = _quick(self._pool.connection_class)
        self.redis: Redis = Redis(connection_pool=self._pool)
        """An ordinary redis-py client over the same connections."""
        # Replies as they come: reshaping thousands of entries costs more than reading them. (`execute_command` is untyped.)
        self._raw: Any = Redis(connection_pool=self._pool)
        self._raw.response_callbacks.clear()

    async def close(self) -> None:
        await self._pool.disconnect()

    async def execute(self, *command: Any, block_s: float = 0.0, retry_s: float | None = None) -> Any:
        """One command's raw reply."""
        return await self.run(str(command[0]), lambda: self._raw.execute_command(*command), block_s=block_s, retry_s=retry_s)

    async def pipeline(self, commands: Sequence[Sequence[Any]], *, block_s: float = 0.0) -> list[Any]:
        """Several commands in one round trip; their raw replies."""

        async def send() -> list[Any]:
            async with self._raw.pipeline(transaction=False) as pipe:
                for command in commands:
                    pipe.execute_command(*command)
                return list(await pipe.execute())

        return await self.run(str(commands[0][0]), send, block_s=block_s)

    async def script(self, name: str, keys: Sequence[str], args: Sequence[Any], *, retry_s: float | None = None) -> Any:
        """One Lua script's raw reply. Raises: EpochFenced, QueueFull (at once)."""
        digest, source = self._scripts[name]

        async def call() -> Any:
            try:
                return await self._raw.execute_command("EVALSHA", digest, len(keys), *keys, *args)
            except NoScriptError:  # a new server, or SCRIPT FLUSH
                await self._raw.execute_command("SCRIPT", "LOAD", source)
                return await self._raw.execute_command("EVALSHA", digest, len(keys), *keys, *args)

        return await self.run(name, call, retry_s=retry_s)

    async def transaction(
        self, script: str, commands: Sequence[tuple[Any, ...]], keys: Sequence[str], args: Sequence[Any]
    ) -> list[Any]:
        """`commands` and, after them, a script, in one MULTI; their raw replies. While the server is full it is tried again.

        The script's source is sent with it: that a server does not know a digest shows only when the commands are done.
        Raises: QueueFull after retry_s.
        """
        _, source = self._scripts[script]
        pool: Any = self._pool  # its methods are untyped
        whole: list[tuple[Any, ...]] = [("MULTI",), *commands, ("EVAL", source, len(keys), *keys, *args), ("EXEC",)]

        async def send() -> list[Any]:
            # Not redis-py's pipeline: what that does for each of hundreds of commands costs more than sending them.
            connection = await pool.get_connection()
            try:
                await connection.send_packed_command([hiredis.pack_command(command) for command in whole])
                return _executed(await _replies(connection, len(whole)))
            finally:
                await pool.release(connection)

        return await self.run(script, send, wait_if_full=True)

    async def load_scripts(self) -> None:
        """Send the server every script, so that later calls need one round trip."""
        await self.pipeline([("SCRIPT", "LOAD", source) for _, source in self._scripts.values()])

    async def run(
        self,
        name: str,
        operation: Callable[[], Awaitable[T]],
        *,
        block_s: float = 0.0,
        retry_s: float | None = None,
        wait_if_full: bool = False,
    ) -> T:
        """Do `operation`, again and again while the server is away, for at most retry_s."""
        deadline = self._now() + (self.retry_s if retry_s is None else retry_s)
        wait_s, repaired = _FIRST_WAIT_S, False
        while True:
            try:
                async with asyncio.timeout(self._timeout_s + block_s):
                    return await operation()
            except (RedisError, OSError, TimeoutError) as error:
                translated = self._translate(name, error)
                if isinstance(translated, StreamsLost) and self.repair is not None and not repaired:
                    repaired = True
                    await self.repair()
                    continue
                again = isinstance(translated, QueueUnavailable) and (wait_if_full or not isinstance(translated, QueueFull))
                if not again or self._now() + wait_s > deadline:
                    raise translated from error
            await self._sleep(wait_s * random.uniform(0.5, 1.0))
            wait_s = min(2 * wait_s, _LONGEST_WAIT_S)

    def _translate(self, name: str, error: Exception) -> ProtocolError:
        text = str(error)
        if isinstance(error, OutOfMemoryError) or "OOM command not allowed" in text:  # as 6.2 and EXEC say it
            return QueueFull(f"redis at {self.shown_url} is at maxmemory and refuses {name}; raise maxmemory or let it drain")
        if (refusal := _refusal(error)) is not None:
            return QueueRefused(f"redis at {self.shown_url} refuses {name}: {refusal}")
        if isinstance(error, TimeoutError | RedisTimeoutError):
            return QueueUnavailable(f"redis at {self.shown_url} did not answer {name} within {self._timeout_s} s")
        if isinstance(error, RedisConnectionError | OSError):
            return QueueUnavailable(
                f"redis at {self.shown_url} cannot be reached for {name}: {text}; start it, or correct redis.url{self._hint}"
            )
        if text.startswith("FENCED "):
            return EpochFenced(f"this trainer is fenced: epoch {text.split()[1]} has started; this process must stop")
        if isinstance(error, _UNAVAILABLE_ERRORS) or any(sign in text for sign in _UNAVAILABLE_REPLIES):
            return QueueUnavailable(f"redis at {self.shown_url} cannot serve {name} now: {text}")
        if any(sign in text for sign in _LOST_STREAM_REPLIES):
            return StreamsLost(f"redis at {self.shown_url} lost a stream or its group ({name}: {text})")
        return QueueRefused(f"redis at {self.shown_url} refuses {name}: {text}")


async def _replies(connection: Any, count: int) -> list[Any]:
    """The next `count` replies; an error reply is one of them, for others follow it."""
    replies: list[Any] = []
    while len(replies) < count:
        try:
            replies.append(await connection.read_response())
        except ResponseError as error:
            replies.append(error)
        # What came together is taken together: a coroutine for each QUEUED costs more than what is queued.
        while len(replies) < count - 1 and isinstance(reply := connection.buffered_reply(), bytes | ResponseError):
            replies.append(reply)
    return replies


def _executed(answers: Sequence[Any]) -> list[Any]:
    """What EXEC answered, the last one. Raises: the error of a command that was refused, or that failed."""
    executed = answers[-1]
    if isinstance(executed, ExecAbortError):  # the reason is what a command was answered instead of QUEUED, if it was
        raise next(answer for answer in answers if isinstance(answer, ResponseError))
    if isinstance(executed, ResponseError):
        raise executed
    for answer in executed:
        if isinstance(answer, ResponseError):
            raise answer
    return list(executed)


def _refusal(error: Exception) -> str | None:
    """Why the server (or this client) will never accept the connection or the command; None if it may."""
    kinds = (AuthenticationError, AuthorizationError, NoPermissionError)
    if isinstance(error, kinds) or isinstance(error.__cause__, kinds):
        return f"{error}; check user, password and ACL in redis.url"
    if (problem := _tls_problem(error)) is not None:
        return (
            f"TLS: {problem}; check redis.ca_file, redis.cert_file and redis.key_file, "
            f"and that redis.url names the host in the server's certificate"
        )
    return None


def _tls_problem(error: BaseException) -> str | None:
    """What is wrong with the certificates, in OpenSSL's words; None if nothing (a connection cut in a handshake is not)."""
    cause: BaseException | None = error
    while cause is not None:
        if isinstance(cause, ssl.SSLCertVerificationError):
            return cause.verify_message
        if isinstance(cause, ssl.SSLError) and cause.reason is not None and cause.reason not in _CUT_TLS:
            return cause.reason
        cause = cause.__cause__ or cause.__context__
    return None


class StreamsLost(QueueRefused):
    """The server has lost the run's streams (it was emptied); they can be made again."""
