"""`async-rl stop` and `async-rl clean` on real processes."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from async_rl.config import RunConfig
from async_rl.config.run import ModelConfig, RedisConfig
from async_rl.config.trainer import WeightsConfig
from async_rl.errors import DeadlineExceeded, RunDirError
from async_rl.launch.clean import clean_run
from async_rl.launch.embedded_redis import EmbeddedRedis
from async_rl.launch.prepare import prepare, write_config
from async_rl.launch.run_lock import lock_holder, run_lock
from async_rl.launch.stop import stop_run
from async_rl.run_dir.layout import RunLayout, open_run
from async_rl.run_dir.segments_of_run import segment_name
from protocol.redis_streams import RedisStreams

SUPERVISOR = """
import sys, time, signal
from pathlib import Path
from async_rl.launch.run_lock import run_lock
stubborn = sys.argv[2] == "stubborn"
if stubborn: signal.signal(signal.SIGTERM, signal.SIG_IGN)
with run_lock(Path(sys.argv[1])):
    print("up", flush=True)
    time.sleep(600)
"""


@pytest.fixture
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[EmbeddedRedis]:
    with EmbeddedRedis(tmp_path_factory.mktemp("server")) as running:
        yield running


@pytest.fixture
def layout(tmp_path: Path, server: EmbeddedRedis) -> RunLayout:
    config = RunConfig(run_dir=tmp_path / "run", model=ModelConfig(path=tmp_path), redis=RedisConfig(url=server.url))
    return prepare(config, resume=False, overwrite=False).layout


def supervised(layout: RunLayout, how: str) -> subprocess.Popen[str]:
    command = [sys.executable, "-c", SUPERVISOR, str(layout.root), how]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    assert process.stdout.readline() == "up\n"
    process.stdout.close()
    return process


def sleeper() -> subprocess.Popen[bytes]:
    return subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])


async def lease(layout: RunLayout, server: EmbeddedRedis, worker_id: str, **info: str) -> None:
    run_id = json.loads(layout.run_json.read_text())["run_id"]
    streams = RedisStreams(server.url, run_id)
    await streams.heartbeat(worker_id, "rollout", ttl_s=60.0, info=info)
    await streams.close()


def test_a_supervisor_gets_sigterm_and_is_waited_for(layout: RunLayout) -> None:
    process = supervised(layout, "willing")
    stopped = stop_run(layout.root, {}, timeout_s=20)
    assert stopped.supervisor == process.pid
    assert process.wait(5) == -signal.SIGTERM
    assert lock_holder(layout.root) is None


def test_a_supervisor_that_does_not_end_is_named(layout: RunLayout) -> None:
    process = supervised(layout, "stubborn")
    try:
        with pytest.raises(DeadlineExceeded, match=f"process {process.pid}"):
            stop_run(layout.root, {}, timeout_s=0.2)
    finally:
        process.kill()
        process.wait()


async def test_roles_started_by_hand_are_found_by_their_leases_and_those_of_other_hosts_named(
    layout: RunLayout, server: EmbeddedRedis
) -> None:
    by_hand = await asyncio.to_thread(sleeper)
    await lease(layout, server, "rollout-7", host=socket.gethostname(), pid=str(by_hand.pid))
    await lease(layout, server, "rollout-8", host="elsewhere.example", pid=str(os.getpid()))
    stopping = asyncio.create_task(asyncio.to_thread(stop_run, layout.root, {}, timeout_s=20))
    assert await asyncio.to_thread(by_hand.wait, 20) == -signal.SIGTERM
    stopped = await stopping
    assert [worker.worker_id for worker in stopped.roles] == ["rollout-7"]
    assert [worker.worker_id for worker in stopped.elsewhere] == ["rollout-8"]


def test_a_run_that_does_not_go_on_needs_no_stop(layout: RunLayout) -> None:
    assert not stop_run(layout.root, {}, timeout_s=5).anything


def test_no_run_no_stop(tmp_path: Path) -> None:
    with pytest.raises(RunDirError, match="holds no run"):
        stop_run(tmp_path / "nothing", {})


def test_what_a_killed_run_left_is_removed_and_what_resuming_needs_stays(layout: RunLayout) -> None:
    half, whole = layout.checkpoints_dir / "step_00000012.e000002.tmp", layout.checkpoints_dir / "step_00000010"
    for directory in (half, whole, layout.weights_dir, layout.redis_dir):
        directory.mkdir(exist_ok=True)
        (directory / "file").write_text("x")
    (layout.redis_dir / "redis.url").write_text("unix:///nobody")
    (layout.root / ".summary.json.123.tmp").write_text("half")
    (layout.intake_dir / "1-1.log").write_text("records")
    removed = clean_run(layout.root, {})
    assert {path.name for path in removed} == {half.name, "weights", "redis.url", ".summary.json.123.tmp"}
    assert not any(path.exists() for path in removed)
    assert (whole / "file").exists()
    assert (layout.intake_dir / "1-1.log").exists()
    assert (layout.redis_dir / "file").exists()


def test_shared_memory_of_a_killed_trainer_is_removed_and_that_of_other_runs_stays(layout: RunLayout, tmp_path: Path) -> None:
    _, identity = open_run(layout.root)
    config = RunConfig(
        run_dir=layout.root, model=ModelConfig(path=tmp_path), weights=WeightsConfig(backend="shm", shm_dir=tmp_path)
    )
    write_config(config, layout)
    mine, other = (tmp_path / segment_name(run_id, 1, 0) for run_id in (identity.run_id, "another"))
    mine.write_bytes(bytes(16))
    other.write_bytes(bytes(16))
    assert mine in clean_run(layout.root, {})
    assert not mine.exists()
    assert other.exists()


def test_a_run_that_lives_is_not_cleaned(layout: RunLayout) -> None:
    with run_lock(layout.root), pytest.raises(RunDirError, match="async-rl stop"):
        clean_run(layout.root, {}, everything=True)
    assert layout.run_json.exists()


async def test_a_run_with_a_living_worker_is_not_cleaned(layout: RunLayout, server: EmbeddedRedis) -> None:
    await lease(layout, server, "rollout-7", host="elsewhere.example", pid="1")
    with pytest.raises(RunDirError, match="rollout-7 still work"):
        await asyncio.to_thread(clean_run, layout.root, {})


def test_everything_goes_when_asked_for(layout: RunLayout) -> None:
    clean_run(layout.root, {}, everything=True)
    assert not layout.root.exists()
    assert not [path for path in layout.root.parent.iterdir() if path.name.endswith(".lock")]


def test_all_asks_for_a_confirmation(layout: RunLayout) -> None:
    command = [sys.executable, "-m", "workers.cli", "clean", str(layout.root), "--all"]
    refused = subprocess.run(command, capture_output=True, text=True, check=False)
    assert (refused.returncode, "--yes" in refused.stderr) == (2, True)
    assert layout.root.exists()
    assert subprocess.run([*command, "--yes"], capture_output=True, check=False).returncode == 0
    assert not layout.root.exists()
