"""`async_rl.run` with a real embedded server and small stand-ins for the roles."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path

import pytest
import redis

from async_rl import RunConfig, run
from async_rl.config import load_config
from async_rl.config.run import LaunchConfig, ModelConfig, RedisConfig
from async_rl.errors import ConfigError, DataError, QueueUnavailable, RoleFailed, RunDirError
from async_rl.launch import local
from async_rl.launch.embedded_redis import EmbeddedRedis
from async_rl.launch.prepare import changed_settings, prepare, without_password
from async_rl.launch.processes import RoleSpec
from async_rl.launch.role_table import REDIS_URL_VARIABLE
from async_rl.run_dir.files import read_json_lines
from async_rl.run_dir.layout import RunLayout
from async_rl.testing.processes import children

PING = (
    "import os, redis; client = redis.Redis.from_url(os.environ['ASYNC_RL_REDIS__URL']); "
    "client.set('k', 'v'); print(client.get('k').decode(), flush=True)"
)
Roles = Callable[..., None]


@pytest.fixture
def config(tmp_path: Path) -> RunConfig:
    model = tmp_path / "model"
    model.mkdir()
    (model / "config.json").write_text("{}")
    return RunConfig(run_dir=tmp_path / "run", model=ModelConfig(path=model), launch=LaunchConfig(max_restarts=0))


def restarting(config: RunConfig, max_restarts: int) -> RunConfig:
    launch = LaunchConfig(max_restarts=max_restarts, backoff_s=0.05, max_backoff_s=0.1)
    return config.model_copy(update={"launch": launch})


@pytest.fixture
def roles(monkeypatch: pytest.MonkeyPatch) -> Roles:
    """Put `python -c` scripts in the places of the roles; the trainer leads. They get the server's address as roles do."""

    def install(**scripts: str | Callable[[int], str]) -> None:
        def table(config: RunConfig, layout: RunLayout, *, redis_url: str, master_port: int) -> tuple[RoleSpec, ...]:
            return tuple(
                RoleSpec(
                    name,
                    (sys.executable, "-c", script(master_port) if callable(script) else script),
                    {REDIS_URL_VARIABLE: redis_url},
                    leads=name == "trainer",
                    kind=name if name == "rollout" else "",
                )
                for name, script in scripts.items()
            )

        monkeypatch.setattr(local, "role_table", table)

    return install


def nothing_left(run_dir: Path) -> bool:
    return not children() and not (run_dir / "redis" / "redis.sock").exists()


def supervisor_events(run_dir: Path) -> list[str]:
    return [line["event"] for line in read_json_lines(run_dir / "events.jsonl") if line["role"] == "supervisor"]


def test_a_run_has_a_server_of_its_own_and_leaves_nothing_behind(config: RunConfig, roles: Roles) -> None:
    roles(trainer=PING)
    result = run(config, console=False)
    assert (result.end, result.exit_code, result.steps) == ("completed", 0, 0)
    assert RunLayout(config.run_dir).logs_dir.joinpath("trainer.out").read_text() == "v\n"
    assert supervisor_events(config.run_dir) == ["run.started", "run.ended"]
    assert nothing_left(config.run_dir)


def test_an_existing_run_is_refused_then_replaced_or_resumed(config: RunConfig, roles: Roles) -> None:
    roles(trainer="pass")
    first = run(config, console=False)
    with pytest.raises(RunDirError, match="--resume"):
        run(config, console=False)
    resumed = run(config, resume=True, console=False)
    assert resumed.run_id == first.run_id
    assert supervisor_events(config.run_dir)[-2:] == ["run.resumed", "run.ended"]
    assert run(config, overwrite=True, console=False).run_id != first.run_id


def test_there_is_nothing_to_resume_in_an_empty_directory(config: RunConfig) -> None:
    with pytest.raises(RunDirError, match="holds no run"):
        run(config, resume=True, console=False)


def test_the_resolved_config_is_written_and_reads_back_equal(config: RunConfig, roles: Roles) -> None:
    roles(trainer="pass")
    run(config, console=False)
    assert load_config(RunLayout(config.run_dir).config_toml, env={}).config == config


def test_a_servers_password_is_handed_over_and_never_written(config: RunConfig, roles: Roles, tmp_path: Path) -> None:
    with EmbeddedRedis(tmp_path / "server", appendfsync="everysec") as server:
        admin = redis.Redis.from_url(server.url)
        admin.execute_command("ACL", "SETUSER", "user", "on", ">hunter2", "~*", "&*", "+@all")  # type: ignore[no-untyped-call]
        admin.close()
        place = server.url.removeprefix("unix://")
        url = f"unix://user:hunter2@{place}"
        roles(trainer="import os; print(os.environ['ASYNC_RL_REDIS__URL'] == " + repr(url) + ")")
        run(config.model_copy(update={"redis": RedisConfig(url=url)}), console=False)
    assert RunLayout(config.run_dir).logs_dir.joinpath("trainer.out").read_text() == "True\n"
    written = RunLayout(config.run_dir).config_toml.read_text()
    assert f"unix://user@{place}" in written
    assert not [path for path in config.run_dir.rglob("*") if path.is_file() and b"hunter2" in path.read_bytes()]


@pytest.mark.parametrize(
    ("url", "shown"),
    [
        ("embedded", "embedded"),
        ("unix:///tmp/redis.sock", "unix:///tmp/redis.sock"),
        ("redis://:secret@host:6379/2", "redis://host:6379/2"),
        ("rediss://me:se:cr@et@host/0?timeout=3", "rediss://me@host/0?timeout=3"),
        ("unix://:secret@/tmp/redis.sock", "unix:///tmp/redis.sock"),
        ("unix://me:secret@/tmp/redis.sock", "unix://me@/tmp/redis.sock"),
    ],
)
def test_only_the_password_leaves_an_address(url: str, shown: str) -> None:
    assert without_password(url) == shown


def test_the_first_failure_ends_the_run_with_its_reason_and_is_on_record(config: RunConfig, roles: Roles) -> None:
    roles(trainer="import time; time.sleep(600)", rollout="import sys; sys.exit('error: model.path=/x does not exist')")
    with pytest.raises(RoleFailed, match=r"^rollout failed \(exit code 1, output in .*\): model.path=/x does not exist$"):
        run(config, console=False)
    assert supervisor_events(config.run_dir) == ["run.started", "role.failed", "role.given_up", "run.failed"]
    assert nothing_left(config.run_dir)


def test_a_server_that_dies_and_may_not_be_restarted_ends_the_run(config: RunConfig, roles: Roles) -> None:
    roles(trainer="import time; time.sleep(600)")
    killer = threading.Thread(target=_kill_server, args=(config.run_dir,))
    killer.start()
    with pytest.raises(QueueUnavailable, match="the embedded Redis server ended"):
        run(config, console=False)
    killer.join()
    assert not children()


def _kill_server(run_dir: Path) -> None:
    deadline = time.monotonic() + 20
    while not (run_dir / "logs" / "trainer.out").exists() and time.monotonic() < deadline:
        time.sleep(0.02)
    os.kill(int((run_dir / "redis" / "redis.pid").read_text()), signal.SIGKILL)


@pytest.mark.parametrize(("signum", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_a_signal_stops_the_run_and_it_can_be_resumed(
    config: RunConfig, roles: Roles, signum: signal.Signals, code: int
) -> None:
    roles(trainer=f"import os, signal, time; os.kill(os.getppid(), {int(signum)}); time.sleep(600)")
    result = run(config, console=False)
    assert (result.end, result.exit_code) == ("interrupted", code)
    assert supervisor_events(config.run_dir) == ["run.started", "run.interrupted"]
    assert nothing_left(config.run_dir)
    roles(trainer="pass")
    assert run(config, resume=True, console=False).end == "completed"


def test_a_port_that_somebody_took_is_replaced(config: RunConfig, roles: Roles, tmp_path: Path) -> None:
    seen = tmp_path / "ports"
    roles(
        trainer=lambda port: (
            f"import pathlib, sys; path = pathlib.Path({str(seen)!r}); first = not path.exists()\n"
            f"with path.open('a') as file: file.write('{port} ')\n"
            "if first: sys.exit('RuntimeError: EADDRINUSE, address already in use')"
        )
    )
    assert run(restarting(config, 1), console=False).end == "completed"
    first, second = seen.read_text().split()
    assert first != second


def test_restarts_have_a_cap(config: RunConfig, roles: Roles, tmp_path: Path) -> None:
    seen = tmp_path / "starts"
    roles(trainer=f"import os; open({str(seen)!r}, 'a').write('x'); os.kill(os.getpid(), 9)")
    with pytest.raises(
        RoleFailed, match=r"^trainer failed 3 times \(launch.max_restarts\): trainer failed \(killed by SIGKILL\)"
    ):
        run(restarting(config, 2), console=False)
    assert seen.read_text() == "xxx"
    again = ["role.failed", "role.restarted"]
    assert supervisor_events(config.run_dir) == ["run.started", *again, *again, "role.failed", "run.failed"]
    assert nothing_left(config.run_dir)


def test_a_server_that_dies_is_started_again_with_what_it_had(config: RunConfig, roles: Roles) -> None:
    roles(
        trainer="import os, pathlib, redis, time\n"
        "client = redis.Redis.from_url(os.environ['ASYNC_RL_REDIS__URL'])\n"
        "client.set('k', 'kept')\n"
        f"os.kill(int(pathlib.Path({str(config.run_dir)!r}, 'redis', 'redis.pid').read_text()), 9)\n"
        "while True:\n"
        "    try: print(client.get('k').decode()); break\n"
        "    except (redis.ConnectionError, redis.BusyLoadingError): time.sleep(0.02)\n"
    )
    assert run(restarting(config, 1), console=False).end == "completed"
    assert RunLayout(config.run_dir).logs_dir.joinpath("trainer.out").read_text() == "kept\n"
    assert supervisor_events(config.run_dir) == ["run.started", "role.failed", "role.restarted", "run.ended"]
    assert nothing_left(config.run_dir)


def test_what_cannot_work_is_refused_before_anything_is_written(config: RunConfig) -> None:
    bad = config.model_copy(update={"rollout": config.rollout.model_copy(update={"group_size": 1})})
    with pytest.raises(ConfigError, match="group_size=1"):
        run(bad, console=False)
    missing = config.model_copy(update={"model": ModelConfig(path=Path("/no/such/model"))})
    with pytest.raises(DataError, match=r"model\.path=/no/such/model does not exist"):
        run(missing, console=False)
    assert not config.run_dir.exists()


def test_a_run_in_use_is_not_overwritten(config: RunConfig, roles: Roles) -> None:
    roles(trainer="pass")
    run(config, console=False)
    identity = json.loads(RunLayout(config.run_dir).run_json.read_text())
    with local.run_lock(config.run_dir), pytest.raises(RunDirError, match="in use by process"):
        run(config, overwrite=True, console=False)
    assert json.loads(RunLayout(config.run_dir).run_json.read_text()) == identity


def test_a_resumed_run_names_what_changed_since_its_last_start(config: RunConfig) -> None:
    with_password = config.model_copy(update={"redis": RedisConfig(url="redis://me:hunter2@host/0")})
    prepare(with_password, resume=False, overwrite=False)
    assert prepare(with_password, resume=True, overwrite=False).changes == []
    further = with_password.model_copy(
        update={
            "trainer": config.trainer.model_copy(update={"max_steps": 7}),
            "redis": RedisConfig(url="redis://me:other@host/1"),
        }
    )
    assert prepare(further, resume=True, overwrite=False).changes == [
        "trainer.max_steps: 100 → 7",
        'redis.url: "redis://me@host/0" → "redis://me@host/1"',
    ]


def test_unset_settings_are_compared_too(config: RunConfig) -> None:
    bounded = config.model_copy(update={"data": config.data.model_copy(update={"data_epochs": 2})})
    assert changed_settings(config, bounded) == ["data.data_epochs: not set → 2"]


def test_the_supervisor_stays_small(config: RunConfig) -> None:
    code = (
        "import sys, async_rl.launch.local, async_rl.launch.look; print(sorted({'torch', 'transformers'} & set(sys.modules)))"
    )
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout == "[]\n"
