"""What the doctor finds on a machine and on a server, and what it says to change."""

from __future__ import annotations

import itertools
import shutil
import tempfile
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from types import SimpleNamespace

import pytest
from redis import Redis
from rich.console import Console

from async_rl.checks.doctor import _shared_memory, check_machine, check_run_dir, file_system_of, is_broken, print_findings
from async_rl.checks.findings import Finding, Verdict, fail, ok, warn
from async_rl.checks.server import check_server
from async_rl.config.run import ModelConfig, RedisConfig, RunConfig
from async_rl.config.trainer import WeightsConfig
from async_rl.launch.embedded_redis import EmbeddedRedis


def by_name(findings: Sequence[Finding]) -> dict[str, Finding]:
    return {finding.name: finding for finding in findings}


def config(run_dir: Path, *, url: str = "embedded", host: str = "127.0.0.1") -> RunConfig:
    return RunConfig(
        run_dir=run_dir, model=ModelConfig(path=run_dir), redis=RedisConfig(url=url), weights=WeightsConfig(host=host)
    )


# -- machine -----------------------------------------------------------------------------------------------------------
def test_a_healthy_machine_has_nothing_broken_and_nothing_is_left_in_the_directory(tmp_path: Path) -> None:
    findings = check_machine(config(tmp_path / "not" / "there" / "yet"))
    assert not is_broken([finding for finding in findings if finding.name != "free disk"])
    assert list(tmp_path.iterdir()) == []
    assert {"free disk", "fsync", "shared run directory", "push store", "python", "torch", "backend"} <= by_name(
        findings
    ).keys()


def test_a_directory_that_cannot_be_written_is_a_failure() -> None:
    found = by_name(list(check_run_dir(Path("/proc/run"), Path("/proc"))))
    assert found["run directory"].verdict is Verdict.FAIL
    assert "run_dir" in found["run directory"].advice


@pytest.mark.parametrize(("seconds", "verdict"), [(0.001, Verdict.OK), (0.1, Verdict.WARN), (2.0, Verdict.FAIL)])
def test_the_disk_is_judged_by_how_long_a_sync_takes(tmp_path: Path, seconds: float, verdict: Verdict) -> None:
    clock = itertools.count()
    found = by_name(list(check_run_dir(tmp_path, tmp_path, now=lambda: seconds * next(clock))))
    assert found["fsync"].verdict is verdict
    assert f"p50 {1000 * seconds:.1f} ms" in found["fsync"].found


@pytest.mark.parametrize(("gigabytes", "verdict"), [(50, Verdict.OK), (5, Verdict.WARN), (0.5, Verdict.FAIL)])
def test_free_disk_is_judged(tmp_path: Path, gigabytes: float, verdict: Verdict, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shutil, "disk_usage", lambda _: SimpleNamespace(free=int(gigabytes * 2**30)))
    assert by_name(list(check_run_dir(tmp_path, tmp_path)))["free disk"].verdict is verdict


def test_the_file_system_is_that_of_the_nearest_mount(tmp_path: Path) -> None:
    mounts = tmp_path / "mounts"
    mounts.write_text("/dev/a / ext4 rw 0 0\nhost:/x /shared\\040disk nfs4 rw 0 0\n/dev/b /shared\\040disk/local xfs rw 0 0\n")
    assert file_system_of(Path("/shared disk/runs"), mounts) == "nfs4"
    assert file_system_of(Path("/shared disk/local/runs"), mounts) == "xfs"
    assert file_system_of(Path("/home/me"), mounts) == "ext4"
    assert file_system_of(Path("/home/me"), tmp_path / "none") is None


def test_an_address_of_another_machine_cannot_be_bound(tmp_path: Path) -> None:
    found = by_name(check_machine(config(tmp_path, host="192.0.2.1")))["push store"]
    assert (found.verdict, found.advice) == (Verdict.FAIL, "set weights.host to an address of the trainer's machine")


def test_a_run_over_machines_is_told_about_loopback_and_local_disks(tmp_path: Path) -> None:
    found = by_name(check_machine(config(tmp_path, url="rediss://user:pw@redis.example.org:6380/0")))
    assert found["push store"].verdict is Verdict.WARN
    assert found["shared run directory"].verdict is Verdict.WARN
    at_home = by_name(check_machine(config(tmp_path, url="redis://127.0.0.1:6379")))
    assert at_home["push store"].verdict is at_home["shared run directory"].verdict is Verdict.OK


@pytest.mark.parametrize(("free", "verdict"), [(3000, Verdict.OK), (2999, Verdict.FAIL)])
def test_shared_memory_must_hold_three_versions(
    tmp_path: Path, free: int, verdict: Verdict, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "model.safetensors").write_bytes(bytes(1000))
    shared = WeightsConfig(backend="shm", shm_dir=tmp_path)
    settings = config(tmp_path).model_copy(update={"weights": shared})
    real = shutil.disk_usage
    monkeypatch.setattr(shutil, "disk_usage", lambda path: SimpleNamespace(free=free) if path == tmp_path else real(path))
    found = by_name(list(_shared_memory(settings)))["shared memory"]
    assert (found.verdict, "--shm-size" in found.advice) == (verdict, verdict is Verdict.FAIL)
    nowhere = settings.model_copy(update={"weights": WeightsConfig(backend="shm", shm_dir=tmp_path / "nowhere")})
    assert by_name(list(_shared_memory(nowhere)))["shared memory"].verdict is Verdict.FAIL
    assert list(_shared_memory(config(tmp_path))) == []


def test_findings_are_a_line_each_with_counts_at_the_end() -> None:
    console = Console(width=100, record=True, file=None, quiet=False)
    with console.capture() as printed:
        print_findings([ok("a", "fine"), warn("b", "so so", "do this"), fail("c", "[broken]", "do that")], console)
    text = printed.get()
    assert "[broken]" in text
    assert text.splitlines()[-1] == "1 ok, 1 warn, 1 fail"
    assert is_broken([fail("c", "x", "y")])
    assert not is_broken([warn("b", "x", "y")])


# -- server ------------------------------------------------------------------------------------------------------------
@pytest.fixture(scope="module")
def server() -> Iterator[EmbeddedRedis]:
    with tempfile.TemporaryDirectory(prefix="arl-") as directory, EmbeddedRedis(Path(directory) / "redis") as redis:
        yield redis


@pytest.fixture
def admin(server: EmbeddedRedis) -> Iterator[Redis]:
    """Settings that a test changes are set back."""
    names = ("maxmemory", "maxmemory-policy", "appendonly", "appendfsync")
    with Redis.from_url(server.url, protocol=2, decode_responses=True) as client:
        before = {name: client.config_get(name)[name] for name in names}
        yield client
        for name, value in before.items():
            client.config_set(name, value)


async def examine(server: EmbeddedRedis, *, url: str | None = None, shift_s: float = 0.0) -> dict[str, Finding]:
    redis = RedisConfig(timeout_s=1.0)
    return by_name(await check_server(redis, url or server.url, unix_clock=lambda: time.time() + shift_s))


async def test_a_server_as_we_start_it_is_fine_and_is_left_as_it_was(server: EmbeddedRedis, admin: Redis) -> None:
    found = await examine(server)
    assert {finding.verdict for finding in found.values()} == {Verdict.OK}
    assert {
        "server version",
        "memory policy",
        "memory",
        "persistence",
        "round trip",
        "clock",
        "queue operations",
    } == found.keys()
    assert admin.dbsize() == 0


@pytest.mark.parametrize(
    ("setting", "value", "name", "verdict", "advice"),
    [
        ("maxmemory-policy", "allkeys-lru", "memory policy", Verdict.FAIL, "noeviction"),
        ("appendonly", "no", "persistence", Verdict.FAIL, "appendonly yes"),
        ("appendfsync", "no", "persistence", Verdict.FAIL, "appendfsync always"),
        ("appendfsync", "everysec", "persistence", Verdict.WARN, "always"),
        ("maxmemory", "1mb", "memory", Verdict.FAIL, "raise maxmemory"),
    ],
)
async def test_settings_that_lose_work_are_named_with_their_remedy(
    server: EmbeddedRedis, admin: Redis, setting: str, value: str, name: str, verdict: Verdict, advice: str
) -> None:
    admin.config_set(setting, value)
    found = (await examine(server))[name]
    assert found.verdict is verdict
    assert advice in found.advice


async def test_clocks_that_differ_are_said_with_their_difference(server: EmbeddedRedis) -> None:
    found = (await examine(server, shift_s=10.0))["clock"]
    assert found.verdict is Verdict.WARN
    assert -10_100 < float(found.found.split()[0]) < -9_900


async def test_a_server_that_is_not_there_is_one_failure(server: EmbeddedRedis) -> None:
    found = await examine(server, url=f"unix://{server.directory}/none.sock")
    assert [(finding.verdict, "cannot be reached" in finding.advice) for finding in found.values()] == [(Verdict.FAIL, True)]


async def test_a_user_who_may_not_do_what_a_run_does_is_told_so(server: EmbeddedRedis, admin: Redis) -> None:
    admin.execute_command("ACL", "SETUSER", "poor", "on", ">pw", "~*", "+@read", "+info", "+ping", "+time", "+config|get")
    found = await examine(server, url=f"unix://poor:pw@{server.socket_path}")
    assert found["queue operations"].verdict is Verdict.FAIL
    assert "ACL" in found["queue operations"].advice
    assert "pw" not in found["queue operations"].advice.replace("poor:pw", "pw")
