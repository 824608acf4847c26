"""The `async-rl` command: what it prints, and with which exit code it ends."""

from __future__ import annotations

import json
from importlib import metadata
from pathlib import Path

import pytest

from async_rl.config.dump import dump_toml
from async_rl.config.run import ModelConfig, RedisConfig, RunConfig
from async_rl.run_dir.intake_log import IntakeLog
from async_rl.run_dir.layout import RunLayout, create_run
from async_rl.run_dir.records import EndRecord, GroupRecord, GroupUse, StepRecord
from async_rl.testing.builders import make_group
from async_rl.testing.tiny_models import save_tiny_model
from protocol.codec import encode
from protocol.messages import EndReason
from workers.cli import main

TRAINED, UNUSED = "test:0:0:0", "test:0:1:0"


def call(*arguments: str) -> int:
    with pytest.raises(SystemExit) as ended:
        main(list(arguments))
    assert isinstance(ended.value.code, int)
    return ended.value.code


@pytest.fixture(autouse=True)
def _wide_terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "200")
    monkeypatch.delenv("ASYNC_RL_REDIS__URL", raising=False)


@pytest.fixture
def config_file(tmp_path: Path) -> Path:
    path = tmp_path / "config.toml"
    path.write_text(f'run_dir = "{tmp_path}/run"\n[model]\npath = "{tmp_path}/model"\n')
    return path


@pytest.fixture
def finished_run(tmp_path: Path) -> RunLayout:
    """A run of one step: the group of row 0 trained, that of row 1 left over."""
    layout, _ = create_run(tmp_path / "run")
    config = RunConfig(run_dir=layout.root, model=ModelConfig(path=save_tiny_model(tmp_path / "model")))
    layout.config_toml.write_text(dump_toml(config))
    verdict = {"current_version": 0, "max_lag": 4, "trajectories": [["train", 0, 0, 4, 4, None]] * 4}
    log = IntakeLog.open(layout.intake_dir, epoch=1)
    log.append([GroupRecord(group.task_id, encode(group)) for group in (make_group(row=0), make_group(row=1))])
    log.append([StepRecord(0, 0, 0, True, (GroupUse(TRAINED, EndReason.TRAINED, verdict),), 0)])
    log.append([EndRecord(unused=(UNUSED,), issued=2)])
    log.close()
    layout.metrics_jsonl.write_text(json.dumps({"record": 0, "step": 1, "seconds": 2.0, "reward_mean": 0.5}) + "\n")
    layout.events_jsonl.write_text(json.dumps({"event": "run.ended", "role": "supervisor"}) + "\n")
    return layout


@pytest.mark.parametrize(
    ("arguments", "code", "message"),
    [
        (("run", "nofile.toml"), 2, "config file nofile.toml does not exist"),
        (("run", "{config}", "--trainer.max_stepz=3"), 2, "did you mean trainer.max_steps?"),
        (("run", "{config}", "--trainer.max_steps=three"), 2, "trainer.max_steps"),
        (("run", "{config}", "--rollout.top_p=0.9"), 2, "rollout.top_p=0.9"),
        (("run", "{config}"), 3, "does not exist"),
        (("run", "{config}", "--resume", "--overwrite"), 2, "exclude each other"),
        (("run", "{config}", "--resume", "--fork", "run@3"), 2, "exclude each other"),
        (("run", "{config}", "--fork", "somewhere"), 2, "is not RUN@STEP"),
        (("replay", "/no/such/run"), 4, "holds no run"),
        (("demo", "--environment.args.lenght=5"), 2, "did you mean 'length'?"),
        (("status", "/no/such/run"), 4, "holds no run"),
        (("audit", "/no/such/run"), 4, "holds no run"),
        (("show", "/no/such/run"), 4, "holds no run"),
        (("export", "/no/such/run", "--to", "/tmp/x"), 4, "holds no run"),
        (("export", "/no/such/run"), 2, "--to"),
        (("nonsense",), 2, "nonsense"),
    ],
)
def test_bad_input_is_one_clear_line(
    arguments: tuple[str, ...], code: int, message: str, config_file: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert call(*(argument.format(config=config_file) for argument in arguments)) == code
    error = capsys.readouterr().err
    assert error.startswith("error: ")
    assert message in error
    assert error.count("\n") == 1
    assert "Traceback" not in error


def test_nothing_is_written_by_a_refused_run(config_file: Path, tmp_path: Path) -> None:
    call("run", str(config_file))
    assert not (tmp_path / "run").exists()


def test_help_ends_well(capsys: pytest.CaptureFixture[str]) -> None:
    assert call("--help") == 0
    shown = capsys.readouterr().out
    for command in ("run", "demo", "status", "show", "config", "export", "audit"):
        assert f" {command} " in shown


def test_the_bare_command_shows_the_help(capsys: pytest.CaptureFixture[str]) -> None:
    assert call() == 0
    shown = capsys.readouterr()
    assert "Usage" in shown.out
    assert shown.err == ""


def test_version_is_that_of_the_package(capsys: pytest.CaptureFixture[str]) -> None:
    assert call("--version") == 0
    assert capsys.readouterr().out == f"async-rl {metadata.version('async-rl')}\n"


def test_a_dry_run_names_every_process_and_starts_none(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert call("demo", "--dry-run", f"--run_dir={tmp_path}/d", "--rollout.workers=2") == 0
    shown = capsys.readouterr().out
    for role in ("coordinator", "trainer", "rollout-0", "rollout-1"):
        assert role in shown
    assert not (tmp_path / "d").exists()


def test_config_shows_values_with_where_they_came_from(config_file: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert call("config", str(config_file), "--trainer.max_steps=7", "--redis.url=redis://me:hunter2@host/0") == 0
    shown = capsys.readouterr().out
    row = next(line for line in shown.splitlines() if line.startswith("trainer.max_steps"))
    assert row.split() == ["trainer.max_steps", "7", "flag", "--trainer.max_steps=7"]
    assert next(line for line in shown.splitlines() if line.startswith("seed")).split() == ["seed", "0", "default"]
    assert "hunter2" not in shown


def test_config_of_a_run_is_what_it_runs_with_whatever_the_environment_says(
    finished_run: RunLayout, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("ASYNC_RL_SEED", "5")
    assert call("config", str(finished_run.root)) == 0
    row = next(line for line in capsys.readouterr().out.splitlines() if line.startswith("seed"))
    assert row.split()[:2] == ["seed", "0"]


def test_config_shows_a_file_that_names_no_model(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "config.toml"
    path.write_text("[trainer]\nmax_steps = 7\n")
    assert call("config", str(path)) == 0
    lines = {line.split()[0]: line for line in capsys.readouterr().out.splitlines()}
    assert lines["model.path"].split()[1:] == ["not", "set", "needed:", "--model.path=…", "or", "ASYNC_RL_MODEL__PATH"]
    assert lines["trainer.max_steps"].split()[1] == "7"
    assert call("config", str(path), "--toml") == 2  # what it prints can be loaded, so it is whole
    assert "model.path is not set" in capsys.readouterr().err


def test_config_as_toml_hides_passwords(config_file: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert call("config", str(config_file), "--toml", "--redis.url=redis://me:hunter2@host/0") == 0
    shown = capsys.readouterr().out
    assert 'url = "redis://me:***@host/0"' in shown


def test_status_of_a_finished_run(finished_run: RunLayout, capsys: pytest.CaptureFixture[str]) -> None:
    assert call("status", str(finished_run.root)) == 0
    shown = capsys.readouterr().out
    assert "completed" in shown
    assert "1 of 100" in shown
    assert "reward 0.500" in shown
    assert f"export {finished_run.root}" in shown


@pytest.mark.parametrize(
    ("events", "state"),
    [
        ([{"event": "run.started", "role": "supervisor"}], "died"),
        ([{"event": "run.started", "role": "supervisor"}, {"event": "run.ended", "role": "trainer"}], "died"),
        ([{"event": "run.interrupted", "role": "supervisor"}], "interrupted"),
        ([{"event": "run.failed", "role": "supervisor", "error": "the disk is full"}], "failed"),
    ],
)
def test_status_of_a_run_that_did_not_complete(
    finished_run: RunLayout, capsys: pytest.CaptureFixture[str], events: list[dict[str, str]], state: str
) -> None:
    finished_run.events_jsonl.write_text("".join(json.dumps(event) + "\n" for event in events))
    assert call("status", str(finished_run.root)) == 0
    shown = capsys.readouterr().out
    assert state in shown
    assert "--resume" in shown
    if state == "failed":
        assert "the disk is full" in shown


def test_status_of_a_run_whose_server_does_not_answer(finished_run: RunLayout, capsys: pytest.CaptureFixture[str]) -> None:
    config = RunConfig(
        run_dir=finished_run.root, model=ModelConfig(path=Path("/m")), redis=RedisConfig(url="redis://127.0.0.1:1/0")
    )
    finished_run.config_toml.write_text(dump_toml(config))
    assert call("status", str(finished_run.root)) == 0
    assert "the server does not answer" in capsys.readouterr().out


def test_show_prints_tokens_with_logprobs_versions_and_rewards(
    finished_run: RunLayout, capsys: pytest.CaptureFixture[str]
) -> None:
    assert call("show", str(finished_run.root), "--task", TRAINED) == 0
    shown = capsys.readouterr().out
    trajectory = make_group(row=0).trajectories[0]
    assert f"task {TRAINED}  trained at version 0" in shown
    assert "train, lag 0" in shown
    for token in trajectory.token_ids.tolist():
        assert f" {token} " in shown
    assert call("show", str(finished_run.root), "--step", "0") == 0
    assert f"task {TRAINED}" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("arguments", "message"), [(("--task", "z"), f"newest task is '{UNUSED}'"), (("--step", "9"), "it has those from 0 to 0")]
)
def test_show_names_what_there_is(
    finished_run: RunLayout, capsys: pytest.CaptureFixture[str], arguments: tuple[str, str], message: str
) -> None:
    assert call("show", str(finished_run.root), *arguments) == 3
    assert message in capsys.readouterr().err


def test_audit_counts_every_end(finished_run: RunLayout, capsys: pytest.CaptureFixture[str]) -> None:
    assert call("audit", str(finished_run.root)) == 0
    lines = {line.rsplit(maxsplit=1)[0]: line.split()[-1] for line in capsys.readouterr().out.splitlines()}
    assert (lines["issued"], lines["trained"], lines["unused"], lines["lost"]) == ("2", "1", "1", "0")


def test_audit_of_a_log_that_lost_a_task_fails(finished_run: RunLayout, capsys: pytest.CaptureFixture[str]) -> None:
    log = IntakeLog.open(finished_run.intake_dir, epoch=2)
    log.append([EndRecord(unused=(UNUSED,), issued=3)])
    log.close()
    assert call("audit", str(finished_run.root)) == 1
    assert "NOT exact" in capsys.readouterr().out
