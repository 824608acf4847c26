"""A proxy between roles and their Redis server that does what networks do: delays, lost replies, cut connections. Also TLS."""

from __future__ import annotations

import asyncio
import random
import ssl
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType

CHUNK_BYTES = 2**20


@dataclass(slots=True)
class Faults:
    """What goes wrong, by itself. Shares are per chunk of bytes that passes; each is an independent draw."""

    delay_s: float = 0.0  # of each chunk, uniform between 0 and this
    lose_requests: float = 0.0  # the connection is cut; the server never sees the request
    lose_replies: float = 0.0  # the connection is cut; the server has acted, the client does not learn of it


@dataclass(slots=True)
class Counted:
    """What went wrong so far."""

    connections: int = 0
    lost_requests: int = 0
    lost_replies: int = 0
    cuts: int = 0  # connections closed by `cut`


class FaultyProxy:
    """Listens on a unix socket (`path`), or on a free loopback port (without), and passes bytes to the server's unix socket.

    tls: wraps the listening side, as stunnel would. drop_replies_of: the next request that contains these bytes is passed on,
    and its reply dropped; then nothing is dropped again.
    """

    def __init__(
        self,
        target: Path,
        path: Path | None = None,
        *,
        tls: ssl.SSLContext | None = None,
        faults: Faults | None = None,
        seed: int = 0,
    ) -> None:
        self.path = path
        self.faults = faults or Faults()
        self.counted = Counted()
        self.drop_replies_of: bytes | None = None
        self._target = target
        self._tls = tls
        self._random = random.Random(seed)
        self._writers: set[asyncio.StreamWriter] = set()
        self._serving: set[asyncio.Task[None]] = set()
        self._listener: asyncio.Server | None = None

    @property
    def address(self) -> str:
        """Host and port, or the path: what follows `redis://` or `unix://`."""
        if self.path is not None:
            return str(self.path)
        assert self._listener is not None
        return f"localhost:{self._listener.sockets[0].getsockname()[1]}"

    async def __aenter__(self) -> FaultyProxy:
        if self.path is not None:
            self._listener = await asyncio.start_unix_server(self._accept, str(self.path), ssl=self._tls)
        else:
            self._listener = await asyncio.start_server(self._accept, "127.0.0.1", 0, ssl=self._tls)
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        assert self._listener is not None
        self._listener.close()
        self.cut()
        for task in self._serving:
            task.cancel()
        await asyncio.gather(*self._serving, return_exceptions=True)

    def cut(self) -> int:
        """Break every connection that is open now; how many there were. New ones are accepted at once."""
        cut = len(self._writers)
        for writer in self._writers:
            writer.transport.abort()
        self.counted.cuts += cut
        return cut

    # -- inside --------------------------------------------------------------------------------------------------
    def _accept(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.ensure_future(self._serve(reader, writer))
        self._serving.add(task)
        task.add_done_callback(self._serving.discard)

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """One client's connection, until either side ends or a fault ends both."""
        self.counted.connections += 1
        try:
            up_reader, up_writer = await asyncio.open_unix_connection(str(self._target))
        except OSError:  # the server is away
            writer.transport.abort()
            return
        self._writers.add(writer)
        doomed = asyncio.Event()
        ways = [
            asyncio.create_task(self._pass_requests(reader, up_writer, doomed)),
            asyncio.create_task(self._pass_replies(up_reader, writer, doomed)),
        ]
        try:
            await asyncio.wait(ways, return_when=asyncio.FIRST_COMPLETED)
        finally:
            for way in ways:
                way.cancel()
            await asyncio.gather(*ways, return_exceptions=True)
            self._writers.discard(writer)
            for one in (writer, up_writer):
                one.transport.abort()

    async def _pass_requests(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, doomed: asyncio.Event) -> None:
        with suppress(OSError):
            while request := await reader.read(CHUNK_BYTES):
                if self._happens(self.faults.lose_requests):
                    self.counted.lost_requests += 1
                    return
                if self.drop_replies_of is not None and self.drop_replies_of in request:
                    self.drop_replies_of = None
                    doomed.set()
                await self._delay()
                writer.write(request)
                await writer.drain()

    async def _pass_replies(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, doomed: asyncio.Event) -> None:
        with suppress(OSError):
            while reply := await reader.read(CHUNK_BYTES):
                if doomed.is_set() or self._happens(self.faults.lose_replies):
                    self.counted.lost_replies += 1
                    return
                await self._delay()
                writer.write(reply)
                await writer.drain()

    async def _delay(self) -> None:
        if self.faults.delay_s > 0:
            await asyncio.sleep(self._random.uniform(0.0, self.faults.delay_s))

    def _happens(self, share: float) -> bool:
        return share > 0 and self._random.random() < share
