"""A server with a password, an ACL user and TLS: a run's whole protocol works there, and what is wrong is said at once."""

from __future__ import annotations

import os
import ssl
import tempfile
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest
import trustme
from redis import Redis

from async_rl.launch.embedded_redis import EmbeddedRedis
from async_rl.registry.redis_registry import RedisRegistry
from async_rl.registry.versions import Announcement
from async_rl.testing.proxy import Faults, FaultyProxy
from protocol.errors import QueueRefused, QueueUnavailable
from protocol.redis_streams import RedisStreams
from protocol.streams import Finished, IssuedTask, Publication, Stream
from protocol.tls import TlsFiles

ACL = (
    "on >s3cret/@: ~arl:* resetchannels -@all +@read +@write +@connection +@transaction "
    "-@dangerous +eval +evalsha +script|load +info +time"
)
"""As in docs/operations.md."""
USER_AND_PASSWORD = "async-rl:s3cret%2F%40%3A"


@pytest.fixture
def server() -> Iterator[EmbeddedRedis]:
    binary = os.environ.get("ASYNC_RL_TEST_REDIS_SERVER")
    with (
        tempfile.TemporaryDirectory(prefix="arl-") as directory,
        EmbeddedRedis(Path(directory) / "redis", binary=Path(binary) if binary else None) as redis,
    ):
        yield redis


class Certificates:
    """An authority, a server's certificate for localhost, a client's own, and an authority that signed nothing."""

    def __init__(self, directory: Path) -> None:
        authority = trustme.CA()
        self.authority, self.stranger = directory / "ca.pem", directory / "stranger.pem"
        self.cert, self.key = directory / "client.pem", directory / "client.key"
        authority.cert_pem.write_to_path(self.authority)
        trustme.CA().cert_pem.write_to_path(self.stranger)
        client = authority.issue_cert("client@example.org")
        client.cert_chain_pems[0].write_to_path(self.cert)
        client.private_key_pem.write_to_path(self.key)
        self._authority = authority

    def server(self, host: str = "localhost", *, ask_client: bool = False) -> ssl.SSLContext:
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        self._authority.issue_cert(host).configure_cert(context)
        if ask_client:
            context.verify_mode = ssl.CERT_REQUIRED
            self._authority.configure_trust(context)
        return context


@pytest.fixture
def certificates(tmp_path: Path) -> Certificates:
    return Certificates(tmp_path)


@asynccontextmanager
async def _open(url: str, tls: TlsFiles = TlsFiles(), *, timeout_s: float = 5.0) -> AsyncIterator[RedisStreams]:
    streams = RedisStreams(url, "secured", timeout_s=timeout_s, retry_s=10.0, lease_s=0.0, tls=tls)
    try:
        await streams.open()
        yield streams
    finally:
        await streams.close()


async def whole_life(streams: RedisStreams) -> None:
    """Every kind of command that a run sends: both scripts and plain ones, and the registry's."""
    await streams.heartbeat("w0", "rollout", ttl_s=60)
    cursor = (await streams.counters()).cursor
    assert await streams.issue(cursor, [IssuedTask("a", b"p"), IssuedTask("b", b"p")], next_cursor=cursor + 2)
    a, b = await streams.read(Stream.TASKS, "w0", count=2, block_s=0.1)
    assert await streams.publish([Publication(Stream.TASKS, a.entry_id, Stream.GROUPS, b"g", "a")]) == [True]
    assert await streams.bury(b, task_id="b", reason="r")
    assert list(await streams.claim(Stream.TASKS, "w1", count=1)) == []
    assert list(await streams.own_pending(Stream.TASKS, "w0")) == []
    assert await streams.reissue([]) == 0
    epoch = await streams.raise_epoch(0)
    await streams.take_over(epoch, count=1)
    [group] = await streams.read_groups(epoch, count=5, block_s=0.1)
    await streams.finish(epoch, [Finished(group.entry_id, "a")])
    await streams.finish_dead(epoch, [*await streams.newly_dead(epoch)])
    [dead] = await streams.dead_entries(count=5)
    assert await streams.drop_dead(dead.entry_id)
    assert [worker.worker_id for worker in await streams.workers()] == ["w0"]
    await streams.depths()
    await streams.server_id()
    registry = RedisRegistry(streams.client, "secured")
    await registry.announce(Announcement(epoch=epoch, version=0, trained_through=0, discarded=0, push=None))
    await registry.wait_change((await registry.state()).revision, timeout_s=0.05)
    await streams.leave("w0")
    await streams.end_run(epoch)
    await streams.clear(epoch)
    await streams.reopen(epoch)
    assert await streams.outstanding() == frozenset()


def _protect(server: EmbeddedRedis, *, ask_everybody: bool = True) -> None:
    with Redis.from_url(server.url, protocol=2) as admin:
        admin.execute_command("ACL", "SETUSER", "async-rl", *ACL.split())
        if ask_everybody:
            admin.execute_command("ACL", "SETUSER", "default", "off")


# -- passwords and users -----------------------------------------------------------------------------------------------
async def test_a_password_alone(server: EmbeddedRedis) -> None:
    with Redis.from_url(server.url, protocol=2) as admin:
        admin.config_set("requirepass", "hunter2")
    async with _open(f"unix://:hunter2@{server.socket_path}") as streams:
        await whole_life(streams)
    with pytest.raises(QueueRefused, match="user, password and ACL"):
        async with _open(server.url):
            pass


async def test_a_user_without_the_right_to_transactions_is_refused_before_anything_is_sent(server: EmbeddedRedis) -> None:
    with Redis.from_url(server.url, protocol=2) as admin:
        admin.execute_command("ACL", "SETUSER", "async-rl", *ACL.split(), "-multi")
    with pytest.raises(QueueRefused, match=r"(?i)multi.*check user, password and ACL"):
        async with _open(f"unix://{USER_AND_PASSWORD}@{server.socket_path}"):
            pass


async def test_a_user_with_the_documented_rights_and_a_password_with_odd_characters(server: EmbeddedRedis) -> None:
    _protect(server)
    async with _open(f"unix://{USER_AND_PASSWORD}@{server.socket_path}") as streams:
        await whole_life(streams)


async def test_a_user_without_a_right_is_told_which_at_once_and_no_password_is_shown(server: EmbeddedRedis) -> None:
    _protect(server)
    with (
        Redis.from_url(f"unix://{USER_AND_PASSWORD}@{server.socket_path}", protocol=2) as admin,
        pytest.raises(Exception, match="permission"),
    ):
        admin.flushall()
    with pytest.raises(QueueRefused) as refused:
        async with _open(f"unix://async-rl:wr0ng@{server.socket_path}"):
            pass
    assert "user, password and ACL" in str(refused.value)
    assert "wr0ng" not in str(refused.value)


async def test_keys_of_others_are_out_of_reach(server: EmbeddedRedis) -> None:
    with Redis.from_url(server.url, protocol=2) as admin:
        admin.execute_command("ACL", "SETUSER", "async-rl", *ACL.replace("~arl:*", "~other:*").split())
    with pytest.raises(QueueRefused, match="user, password and ACL"):
        async with _open(f"unix://{USER_AND_PASSWORD}@{server.socket_path}"):
            pass


async def test_rights_that_are_withdrawn_in_the_middle_stop_the_role_at_once(server: EmbeddedRedis) -> None:
    _protect(server, ask_everybody=False)
    async with _open(f"unix://{USER_AND_PASSWORD}@{server.socket_path}") as streams:
        with Redis.from_url(server.url, protocol=2) as admin:
            admin.execute_command("ACL", "SETUSER", "async-rl", "-evalsha")
        with pytest.raises(QueueRefused, match=r"(?i)permission"):
            await streams.raise_epoch(0)


# -- TLS ---------------------------------------------------------------------------------------------------------------
async def test_tls_with_an_authority_of_ones_own_and_a_user(server: EmbeddedRedis, certificates: Certificates) -> None:
    _protect(server)
    async with (
        FaultyProxy(server.socket_path, tls=certificates.server()) as proxy,
        _open(f"rediss://{USER_AND_PASSWORD}@{proxy.address}", TlsFiles(ca=certificates.authority)) as streams,
    ):
        await whole_life(streams)


async def test_tls_where_the_server_asks_for_the_clients_certificate(server: EmbeddedRedis, certificates: Certificates) -> None:
    both = TlsFiles(certificates.authority, certificates.cert, certificates.key)
    async with FaultyProxy(server.socket_path, tls=certificates.server(ask_client=True)) as proxy:
        async with _open(f"rediss://{proxy.address}", both) as streams:
            await whole_life(streams)
        with pytest.raises(
            (QueueRefused, QueueUnavailable), match=r"redis\.cert_file"
        ):  # who closes first decides what is seen
            async with _open(f"rediss://{proxy.address}", TlsFiles(certificates.authority), timeout_s=0.3):
                pass


async def test_a_certificate_that_nobody_known_signed_is_refused_at_once(
    server: EmbeddedRedis, certificates: Certificates
) -> None:
    async with FaultyProxy(server.socket_path, tls=certificates.server()) as proxy:
        for trusted in (TlsFiles(certificates.stranger), TlsFiles()):
            with pytest.raises(QueueRefused, match=r"TLS: .*redis\.ca_file"):
                async with _open(f"rediss://{proxy.address}", trusted):
                    pass


async def test_a_certificate_for_another_host_is_refused_at_once(server: EmbeddedRedis, certificates: Certificates) -> None:
    async with FaultyProxy(server.socket_path, tls=certificates.server("elsewhere.example.org")) as proxy:
        with pytest.raises(QueueRefused, match=r"TLS: .*mismatch.*host"):
            async with _open(f"rediss://{proxy.address}", TlsFiles(certificates.authority)):
                pass


async def test_tls_connections_that_break_are_made_again(server: EmbeddedRedis, certificates: Certificates) -> None:
    faults = Faults(lose_requests=0.02, lose_replies=0.02)
    async with (
        FaultyProxy(server.socket_path, tls=certificates.server(), faults=faults, seed=3) as proxy,
        _open(f"rediss://{proxy.address}", TlsFiles(certificates.authority)) as streams,
    ):
        for number in range(100):
            await streams.issue(number, [IssuedTask(f"t{number}", b"p")], next_cursor=number + 1)
        counters = await streams.counters()
        assert (counters.cursor, counters.issued, counters.outstanding) == (100, 100, 100)
        assert proxy.counted.connections > 2
