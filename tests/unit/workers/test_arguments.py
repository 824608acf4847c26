from __future__ import annotations

import errno
import io
import json
import logging
import sys
from pathlib import Path

import pytest
import typer

from async_rl import logs
from async_rl.config import load_config
from async_rl.errors import ConfigError, DataError, DeadlineExceeded, QueueUnavailable, RoleFailed
from async_rl.run_dir.layout import RunLayout
from workers.arguments import RoleArguments, cli_errors, overrides_of, role_main, run_app, split_overrides

OWN = frozenset({"--help", "--index", "--dry-run"})


@pytest.fixture(autouse=True)
def quiet_logs():
    yield
    logs.close()
    logging.captureWarnings(False)
    root = logging.getLogger()
    root.handlers = [handler for handler in root.handlers if type(handler).__module__ != "async_rl.logs"]


@pytest.fixture
def config(tmp_path: Path) -> Path:
    path = tmp_path / "my.toml"
    path.write_text(f'run_dir = "{tmp_path / "run"}"\n[model]\npath = "/m"\n')
    return path


def start(role: str, *argv: object) -> tuple[int, list[RoleArguments]]:
    """Exit code, and what the role was called with."""
    seen: list[RoleArguments] = []
    with pytest.raises(SystemExit) as ended:
        role_main(role, seen.append, [str(word) for word in argv])
    assert isinstance(ended.value.code, int)
    return ended.value.code, seen


@pytest.mark.parametrize(
    ("argv", "own", "overrides"),
    [
        (["c.toml", "--a.b=1", "--index", "2"], ["c.toml", "--index", "2"], ["--a.b=1"]),
        (["--seed", "3", "c.toml"], ["c.toml"], ["--seed", "3"]),
        (["--index=2", "--dry-run", "c.toml"], ["--index=2", "--dry-run", "c.toml"], []),
        (["c.toml", "--a.b", "-1"], ["c.toml"], ["--a.b", "-1"]),
        (["c.toml", "--a.b", "--dry-run"], ["c.toml", "--dry-run"], ["--a.b"]),
        (["c.toml", "--num-epochs", "3"], ["c.toml"], ["--num-epochs", "3"]),
        (["c.toml", "--", "--a.b=1"], ["c.toml", "--", "--a.b=1"], []),
    ],
)
def test_what_is_no_option_of_the_command_is_an_override(argv, own, overrides):
    assert split_overrides(argv, OWN) == (own, overrides)


def test_coordinator_makes_the_run_and_others_join_it_under_its_id(config, tmp_path):
    code, (first,) = start("coordinator", config, "--trainer.max_steps=7")
    assert code == 0
    code, (second,) = start("rollout", tmp_path / "run/config.toml", "--index", "2")
    assert code == 0
    assert second.run_id == first.run_id != ""
    assert second.config == first.config
    assert second.config.trainer.max_steps == 7
    assert second.worker_id.startswith("rollout-2-")
    events = [json.loads(line) for line in (tmp_path / "run/events.jsonl").read_text().splitlines()]
    assert [(line["role"], line["event"]) for line in events] == [
        ("coordinator", "role.started"),
        ("coordinator", "role.ended"),
        ("rollout", "role.started"),
        ("rollout", "role.ended"),
    ]
    assert (tmp_path / "run/logs/coordinator.jsonl").exists()
    assert (tmp_path / "run/logs/rollout-2.jsonl").exists()


def test_worker_ids_of_two_starts_differ(config):
    assert start("coordinator", config)[1][0].worker_id != start("coordinator", config)[1][0].worker_id
    assert start("coordinator", config, "--worker-id=mine")[1][0].worker_id == "mine"


def test_resolved_config_of_a_run_is_not_changed_by_the_environment_but_for_the_server(config, tmp_path, monkeypatch):
    start("coordinator", config, "--trainer.max_steps=7")
    monkeypatch.setenv("ASYNC_RL_TRAINER__MAX_STEPS", "9")
    monkeypatch.setenv("ASYNC_RL_REDIS__URL", "redis://:secret@h")
    code, (role,) = start("rollout", tmp_path / "run/config.toml")
    assert code == 0
    assert role.config.trainer.max_steps == 7
    assert role.config.redis.url == "redis://:secret@h"
    assert start("rollout", config, "--run-dir", tmp_path / "run")[1][0].config.trainer.max_steps == 9


def test_moved_run_directory_is_still_its_own_run(config, tmp_path):
    start("coordinator", config)
    (tmp_path / "run").rename(tmp_path / "moved")
    code, (role,) = start("rollout", "--run-dir", tmp_path / "moved")
    assert code == 0
    assert role.layout == RunLayout(tmp_path / "moved")


def test_role_without_a_run_gives_up_after_its_time(config, capsys):
    code, seen = start("rollout", config, "--redis.retry_s=0.01")
    assert (code, seen) == (4, [])
    assert "holds no run" in capsys.readouterr().err


def test_dry_run_starts_nothing_and_shows_no_password(config, tmp_path, capsys):
    code, seen = start("trainer", config, "--dry-run", "--redis.url=redis://u:hunter2@host:1/0")
    out = capsys.readouterr().out
    assert (code, seen) == (0, [])
    assert not (tmp_path / "run").exists()
    assert "redis://u:***@host:1/0" in out
    assert str(tmp_path / "run") in out


@pytest.mark.parametrize(
    ("argv", "part"),
    [
        (["--trainer.max_steps=x"], "trainer.max_steps = 'x'"),
        (["--num-epochs", "3"], "did you mean data.data_epochs?"),
        (["--rollout.top_p=0.5"], "rollout.top_p=0.5"),
        (["--index", "many"], "Invalid value for '--index'"),
        (["extra"], "unexpected extra argument"),
        (["--dry-run=1"], "--dry-run"),
    ],
)
def test_bad_input_is_one_line_and_exit_code_2(config, argv, part, capsys):
    code, seen = start("rollout", config, *argv)
    err = capsys.readouterr().err
    assert (code, seen) == (2, [])
    assert part in err
    assert err.startswith("error: ")
    assert err.count("\n") == 1


def test_missing_config_is_one_line(tmp_path, capsys):
    assert start("rollout")[0] == 2
    assert start("rollout", tmp_path / "absent.toml")[0] == 2
    first, second = capsys.readouterr().err.splitlines()
    assert "CONFIG is missing" in first
    assert "absent.toml does not exist" in second


@pytest.mark.parametrize(
    ("error", "code", "line"),
    [
        (ConfigError("a"), 2, "error: a"),
        (DataError("a"), 3, "error: a"),
        (DeadlineExceeded("a"), 5, "error: a"),
        (QueueUnavailable("a"), 6, "error: a"),
        (RoleFailed("a", role_exit_code=7), 7, "error: a"),
        (ExceptionGroup("g", [ValueError("x"), ExceptionGroup("h", [DataError("a")])]), 3, "error: a"),
        (OSError(errno.ENOSPC, "No space left on device", "f"), 4, "error: the disk is full while writing f: free space,"),
        (ValueError("a\nb"), 1, "error: unexpected ValueError: a b"),
        (KeyboardInterrupt(), 130, "interrupted"),
    ],
)
def test_errors_end_a_command_with_one_line_and_their_code(error, code, line, capsys):
    with pytest.raises(SystemExit) as ended, cli_errors(debug=False):
        raise error
    err = capsys.readouterr().err
    assert ended.value.code == code
    assert err.startswith(line)
    assert err.count("\n") == 1


def test_debug_shows_the_traceback(capsys):
    with pytest.raises(SystemExit), cli_errors(debug=True):
        raise ConfigError("a")
    assert "Traceback" in capsys.readouterr().err


def test_failure_of_a_role_is_in_its_log_with_the_traceback_only_if_nobody_foresaw_it(config, tmp_path):
    def fail(error: Exception) -> dict[str, object]:
        def run(_: RoleArguments) -> None:
            raise error

        with pytest.raises(SystemExit):
            role_main("coordinator", run, [str(config)])
        line: dict[str, object] = json.loads((tmp_path / "run/logs/coordinator.jsonl").read_text().splitlines()[-1])
        return line

    foreseen = fail(DataError("row 3 is empty"))
    assert (foreseen["event"], foreseen["error"]) == ("role.failed", "row 3 is empty")
    assert "exception" not in foreseen
    assert "Traceback" in str(fail(KeyError("x"))["exception"])


def test_subcommands_without_overrides_refuse_what_they_do_not_know(capsys):
    app = typer.Typer(add_completion=False)
    seen: list[object] = []

    @app.command()
    def run(context: typer.Context, config: str) -> None:
        seen.append((config, overrides_of(context)))

    @app.command()
    def status(path: str) -> None:
        seen.append(path)

    def call(*argv: str) -> object:
        with pytest.raises(SystemExit) as ended:
            run_app(app, argv, prog_name="x", overrides_for={"run"})
        return ended.value.code

    assert call("run", "c.toml", "--a.b", "1", "--c=2") == 0
    assert call("status", "r") == 0
    assert seen == [("c.toml", ["--a.b", "1", "--c=2"]), "r"]
    assert call("status", "r", "--a.b=1") == 2
    assert "--a.b" in capsys.readouterr().err


def test_a_typo_of_an_own_option_is_refused_as_an_unknown_key(config):
    with pytest.raises(ConfigError, match="'dryrun' at the top level"):
        load_config(config, split_overrides(["--dryrun", "1"], OWN)[1], {})


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="needs /dev/full")
def test_an_error_that_cannot_be_printed_still_has_its_exit_code(monkeypatch):
    with io.FileIO("/dev/full", "w") as full:
        monkeypatch.setattr(sys, "stderr", io.TextIOWrapper(full, write_through=True))  # as the interpreter opens it
        with pytest.raises(SystemExit) as end, cli_errors(debug=False):
            raise DataError("x")
    assert end.value.code == 3


@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EDQUOT, errno.EFBIG])
def test_a_full_disk_is_named_with_its_file(number, capsys):
    with pytest.raises(SystemExit) as end, cli_errors(debug=False):
        raise OSError(number, "no room", "/run/x")
    assert end.value.code == 4
    assert capsys.readouterr().err == "error: the disk is full while writing /run/x: free space, then continue with --resume\n"
