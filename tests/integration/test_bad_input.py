"""What a user gets wrong, on real command lines: one clear line, the documented exit code, no traceback, no process left."""

from __future__ import annotations

import asyncio
import json
import os
import re
import resource
import socket
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import psutil
import pytest
import redis

from async_rl.launch.embedded_redis import EmbeddedRedis
from async_rl.run_dir.intake_log import read_log
from async_rl.run_dir.layout import RunLayout
from async_rl.testing.tiny_models import save_tiny_model
from protocol.redis_streams import RedisStreams

MARK = "BAD_INPUT_TEST"
REWARD = "def score(completion, row):\n    return float(len(completion) % 3)\n\ndef one(completion):\n    return 1.0\n"
BOUNDED_S = 90.0  # far above what any of these takes: a command that hangs fails here, not at the suite's limit


@dataclass(frozen=True)
class Ended:
    """How a command ended."""

    code: int
    out: str
    err: str

    @property
    def error(self) -> str:
        """The one line that says what is wrong; a line with the next command may follow."""
        errors = [line for line in self.err.splitlines() if not line.startswith("next: ")]
        assert len(errors) == 1, self.err + self.out
        assert errors[0].startswith("error: "), self.err
        return errors[0]


@pytest.fixture(scope="module")
def inputs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model, data, a reward function and a config that work: every test spoils one thing."""
    root = tmp_path_factory.mktemp("inputs")
    save_tiny_model(root / "model", num_hidden_layers=1)
    (root / "prompts.jsonl").write_text('{"prompt": "312>"}\n{"prompt": "21>"}\n{"prompt": "9>"}\n')
    (root / "bad_input_reward.py").write_text(REWARD)
    (root / "config.toml").write_text(
        f"""
        [model]
        path = "{root}/model"
        [data]
        source = "{root}/prompts.jsonl"
        shuffle = false
        [environment]
        name = "prompt_reward"
        reward = "bad_input_reward:score"
        [rollout]
        group_size = 2
        max_new_tokens = 4
        [trainer]
        groups_per_step = 2
        max_steps = 2
        """
    )
    return root


@pytest.fixture
def command(inputs: Path, tmp_path: Path) -> Iterator[Callable[..., Ended]]:
    """Run `python -m workers.<module> …` in an environment of its own; at the end nothing that it started is left."""
    mark = f"{MARK}={tmp_path}"
    clean = {name: value for name, value in os.environ.items() if not name.startswith("ASYNC_RL_")}
    env = {
        **clean,
        MARK: str(tmp_path),
        "PYTHONPATH": str(inputs),
        "OMP_NUM_THREADS": "1",
        "TMPDIR": str(tmp_path),
        "CUDA_VISIBLE_DEVICES": "",
    }

    def run(module: str, *arguments: str, before: Callable[[], None] | None = None) -> Ended:
        done = subprocess.run(
            [sys.executable, "-m", f"workers.{module}", *arguments],
            env=env,
            cwd=tmp_path,
            capture_output=True,
            text=True,
            timeout=BOUNDED_S,
            preexec_fn=before,
            check=False,
        )
        assert "Traceback" not in done.stderr + done.stdout, done.stderr + done.stdout
        return Ended(done.returncode, done.stdout, done.stderr)

    yield run
    assert _marked(mark) == []


@pytest.fixture
def config(inputs: Path) -> str:
    return str(inputs / "config.toml")


# -- what the config and its files get wrong: said before anything is made ---------------------------------------------
@pytest.mark.parametrize(
    ("argument", "code", "parts"),
    [
        ("--trainer.max_step=3", 2, ["'max_step'", "'trainer'", "did you mean trainer.max_steps?"]),
        ("--trainer.max_steps=many", 2, ["trainer.max_steps = 'many'", "valid integer"]),
        ("--model.path=absent", 3, ["model.path=", "/absent does not exist", "Hugging Face causal LM"]),
        ("--data.source=absent.jsonl", 3, ["data.source='absent.jsonl' does not exist"]),
        ("--environment.reward=absent_module:score", 2, ["no module 'absent_module'", "PYTHONPATH"]),
        ("--environment.reward=bad_input_reward:one", 2, ["is called as one(completion, row)", "(completion)"]),
        ("--trainer.device=cuda", 2, ["trainer.device='cuda'", "shows no GPU", "set cpu"]),
        ("--weights.host=192.0.2.1", 2, ["weights.host='192.0.2.1' is no address of this machine"]),
        ("--redis.lease_s=1e-9", 2, ["redis.lease_s = 1e-09", "greater than or equal to 0.5"]),
        ("--environment.name=sort_digit", 2, ["environment.name='sort_digit'", "did you mean 'sort_digits'?", "prompt_reward"]),
    ],
    ids=[
        *(
            "wrong key",
            "wrong type",
            "missing model",
            "missing data",
            "missing module",
            "wrong signature",
            "no GPU",
            "not ours",
        ),
        *("absurd value", "unknown environment"),
    ],
)
def test_a_run_that_cannot_work_says_why_and_makes_nothing(
    command: Callable[..., Ended], config: str, tmp_path: Path, argument: str, code: int, parts: Sequence[str]
) -> None:
    ended = command("cli", "run", config, f"--run_dir={tmp_path}/run", argument)
    assert ended.code == code
    for part in parts:
        assert part in ended.error
    assert not (tmp_path / "run").exists()


def test_a_missing_config_file_is_named(command: Callable[..., Ended], tmp_path: Path) -> None:
    ended = command("cli", "run", "absent.toml")
    assert (ended.code, ended.error) == (
        2,
        f"error: config file absent.toml does not exist (working directory {tmp_path})",
    )


@pytest.mark.parametrize(
    ("argument", "code", "part"),
    [
        ("--data.source=bad.jsonl", 3, "bad.jsonl:2"),
        ("--environment.reward=bad_input_reward:scor", 2, "did you mean 'score'?"),
    ],
    ids=["a broken row", "a missing function"],
)
def test_a_dry_run_of_the_coordinator_reads_the_data_and_imports_the_reward(
    command: Callable[..., Ended], config: str, tmp_path: Path, argument: str, code: int, part: str
) -> None:
    (tmp_path / "bad.jsonl").write_text('{"prompt": "1>"}\n{"prompt": \n')
    ended = command("coordinator", config, f"--run_dir={tmp_path}/run", argument, "--dry-run")
    assert ended.code == code
    assert part in ended.error
    assert not (tmp_path / "run").exists()


# -- the server --------------------------------------------------------------------------------------------------------
def test_no_server_at_the_address_is_said_in_time_and_nothing_is_made(
    command: Callable[..., Ended], config: str, tmp_path: Path
) -> None:
    with socket.socket() as taken:  # bound, and nobody listens
        taken.bind(("127.0.0.1", 0))
        address = f"127.0.0.1:{taken.getsockname()[1]}"
        quick = ["--redis.timeout_s=0.5", "--redis.retry_s=0.5"]
        ended = command("cli", "run", config, f"--run_dir={tmp_path}/run", f"--redis.url=redis://u:pw@{address}/0", *quick)
    assert ended.code == 6
    assert f"redis at redis://***@{address}/0 cannot be reached" in ended.error
    assert "pw" not in ended.error
    assert not (tmp_path / "run").exists()


def test_a_server_that_evicts_is_refused(command: Callable[..., Ended], config: str, tmp_path: Path) -> None:
    with EmbeddedRedis(tmp_path / "server", appendfsync="everysec") as server:
        _ask(server, "CONFIG", "SET", "maxmemory-policy", "allkeys-lru")
        ended = command("coordinator", config, f"--run_dir={tmp_path}/run", f"--redis.url={server.url}")
        assert ended.code == 8
        shown = [line for line in ended.err.splitlines() if line.startswith("error: ")]
        assert len(shown) == 1
        for part in ("maxmemory-policy=allkeys-lru", "CONFIG SET maxmemory-policy noeviction"):
            assert part in shown[0]
        assert _ask(server, "DBSIZE") == 0


# -- found only while it runs: nothing is lost -------------------------------------------------------------------------
def test_a_prompt_longer_than_the_context_stops_the_run_and_stays_in_the_queue(
    command: Callable[..., Ended], config: str, tmp_path: Path
) -> None:
    (tmp_path / "long.jsonl").write_text(json.dumps({"prompt": "1" * 300}) + '\n{"prompt": "21>"}\n')
    ended = command("cli", "run", config, f"--run_dir={tmp_path}/run", "--data.source=long.jsonl")
    assert ended.code == 3
    for part in ("rollout-0 failed (exit code 3", "task long:", ":0:0: ", "300 tokens", "256", "data.on_long_prompt = 'skip'"):
        assert part in ended.error
    assert "rollout-0 failed (exit code 3): stopping the other roles" in ended.out
    assert "300 tokens" not in ended.out  # said once
    layout = RunLayout(tmp_path / "run")
    run_id = json.loads(layout.run_json.read_text())["run_id"]
    with EmbeddedRedis(layout.redis_dir) as server:
        issued, outstanding = asyncio.run(_ledger(server.url, run_id))
    index = read_log(layout.intake_dir)
    assert "long:0:0:0" in outstanding
    assert issued == len(outstanding | index.groups.keys())
    assert command("cli", "audit", str(layout.root)).code == 0


def test_a_full_disk_stops_the_run_and_it_goes_on_without_a_loss(
    command: Callable[..., Ended], config: str, tmp_path: Path, small_disk: SmallDisk
) -> None:
    run_dir = small_disk.root / "run"
    heavy = ["--rollout.group_size=32", "--rollout.max_new_tokens=64", "--trainer.max_steps=2", "--checkpoint.every_steps=99"]
    heavy.append("--weights.deadline_s=12")  # the engine of the second start tries the first publisher's address for a quarter
    with EmbeddedRedis(tmp_path / "server", appendfsync="everysec") as server:
        arguments = ["run", config, f"--run_dir={run_dir}", f"--redis.url={server.url}", *heavy]
        ended = command("cli", *arguments, before=small_disk.limit)
        assert ended.code == 4
        for part in ("trainer failed (exit code 4", f"{run_dir}/intake: the disk is full", "free space", "--resume"):
            assert part in ended.error
        small_disk.grow()
        assert command("cli", *arguments, "--resume").code == 0
    audit = command("cli", "audit", str(run_dir))
    assert audit.code == 0
    counts = {name.strip(): int(count) for name, count in re.findall(r"^(\D+?)\s+(\d+)$", audit.out, re.MULTILINE)}
    assert counts["issued"] == counts["trained"] == 4
    assert counts["lost"] == counts["trained twice"] == 0


class SmallDisk:
    """A directory on a disk of 128 KiB: a tmpfs, or where none may be mounted, a limit on the size of every file."""

    SIZE_KIB = 128

    def __init__(self, root: Path) -> None:
        self.root = root
        root.mkdir()
        self.is_mounted = self._mount(f"size={self.SIZE_KIB}k")

    def limit(self) -> None:
        """Called in the child before it starts."""
        if not self.is_mounted:
            resource.setrlimit(resource.RLIMIT_FSIZE, (self.SIZE_KIB * 512, resource.RLIM_INFINITY))

    def grow(self) -> None:
        if self.is_mounted:
            assert self._mount("remount,size=64m")

    def close(self) -> None:
        if self.is_mounted:
            subprocess.run(["umount", "--lazy", str(self.root)], check=True)

    def _mount(self, options: str) -> bool:
        if sys.platform != "linux" or os.geteuid() != 0:
            return False
        done = subprocess.run(
            ["mount", "-t", "tmpfs", "-o", options, "tmpfs", str(self.root)], capture_output=True, check=False, timeout=10
        )
        return done.returncode == 0


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[SmallDisk]:
    disk = SmallDisk(tmp_path / "disk")
    yield disk
    disk.close()


async def _ledger(url: str, run_id: str) -> tuple[int, frozenset[str]]:
    """Tasks issued, and the ids of those that are outstanding."""
    streams = RedisStreams(url, run_id)
    try:
        return (await streams.counters()).issued, await streams.outstanding()
    finally:
        await streams.close()


def _ask(server: EmbeddedRedis, *command: str) -> object:
    with redis.Redis(unix_socket_path=str(server.socket_path)) as client:
        return client.execute_command(*command)


def _marked(mark: str) -> list[str]:
    """Command lines of the processes that have `mark` in their environment."""
    name, _, value = mark.partition("=")
    found = []
    for process in psutil.process_iter():
        try:
            if process.environ().get(name) == value:
                found.append(" ".join(process.cmdline()))
        except (psutil.NoSuchProcess, psutil.AccessDenied):
            continue
    return found
