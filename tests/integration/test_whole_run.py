"""Whole runs: every role a process, a real server, a real engine, a real trainer, a task small enough for seconds."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import psutil
import pytest

from async_rl import RunConfig, run
from async_rl.checks.audit import audit
from async_rl.config import load_config
from async_rl.errors import ConfigError
from async_rl.launch.demo_model import demo_model, demo_tokenizer, save_model
from async_rl.run_dir.files import read_json_lines
from async_rl.run_dir.intake_log import read_log, task_ends

DEADLINE_S = 90


@pytest.fixture(scope="module")
def model_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("model") / "tiny"
    tokenizer = demo_tokenizer()
    save_model(path, demo_model(tokenizer, seed=0), tokenizer)
    return path


@pytest.fixture
def make_config(model_dir: Path, tmp_path: Path) -> Callable[..., RunConfig]:
    def make(**settings: Any) -> RunConfig:
        base: dict[str, Any] = {
            "run_dir": tmp_path / "run",
            "model.path": model_dir,
            "environment.args.length": 3,
            "rollout.group_size": 4,
            "rollout.max_new_tokens": 5,
            "trainer.groups_per_step": 4,
            "trainer.learning_rate": 1e-3,
            "trainer.max_steps": 4,
            "redis.lease_s": 3.0,
        }
        chosen = {**base, **{name.replace("__", "."): value for name, value in settings.items()}}
        return load_config(None, [f"--{key}={value}" for key, value in chosen.items()], {}).config

    return make


def metrics(config: RunConfig) -> list[dict[str, Any]]:
    return list(read_json_lines(config.run_dir / "metrics.jsonl"))


def ends(config: RunConfig) -> Mapping[str, int]:
    result = audit(config.run_dir)
    assert result.is_exact, result
    return result.ends


def nothing_left(config: RunConfig) -> bool:
    """No role or server of this run is alive (other tests may have children of their own)."""
    commands = (" ".join(child.cmdline()) for child in psutil.Process().children(recursive=True))
    return not any(str(config.run_dir) in command for command in commands)


def test_on_policy_with_max_lag_0_every_ratio_is_1_and_every_push_is_proven(make_config: Callable[..., RunConfig]) -> None:
    config = make_config(staleness__max_lag=0, trainer__max_steps=5)
    assert run(config, console=False).exit_code == 0
    lines = metrics(config)
    assert [line["step"] for line in lines] == [1, 2, 3, 4, 5]
    assert {line["lag_max"] for line in lines} == {0}
    assert max(line["behavior_gap_max"] for line in lines) <= 1e-4
    assert all(abs(line[bound] - 1) <= 1e-4 for line in lines for bound in ("ratio_min", "ratio_max"))
    pushes = [push for line in lines for push in line["pushes"]]
    assert len(pushes) >= 4
    assert all(push["live"] and push["parity_tokens"] > 0 and push["parity_max_abs"] <= 1e-4 for push in pushes)
    assert ends(config)["trained"] == 20
    assert nothing_left(config)


def test_data_that_ends_in_the_middle_of_a_batch_is_trained_to_its_last_row(
    make_config: Callable[..., RunConfig], tmp_path: Path
) -> None:
    rows = [{"prompt": f"{number}>", "answer": f"{number}"} for number in range(6)]
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    module = tmp_path / "my_reward.py"
    module.write_text(
        "def score(completion, row):\n"
        "    if row['answer'] == '3':\n"
        "        raise ZeroDivisionError('no such digit')\n"
        "    return float(completion[:1] == row['answer'])\n"
    )
    config = make_config(
        data__source=tmp_path / "rows.jsonl",
        data__data_epochs=1,
        environment__name="prompt_reward",
        environment__reward="my_reward:score",
        trainer__max_steps=50,
        reward__placement="workers",
        weights__backend="disk",
    )
    flags = config.model_copy(update={"environment": config.environment.model_copy(update={"args": {}})})
    os.environ["PYTHONPATH"] = str(tmp_path)
    try:
        assert run(flags, console=False).exit_code == 0
    finally:
        del os.environ["PYTHONPATH"]
    result = ends(config)
    assert (result["trained"], result["invalid"]) == (5, 1)  # what could not be scored is invalid, never 0
    assert sum(result.values()) == 6
    events = [line for line in read_json_lines(config.run_dir / "events.jsonl") if line["event"] == "group.invalid"]
    assert len(events) == 1


def start(config: RunConfig, *flags: str) -> subprocess.Popen[str]:
    command = [sys.executable, "-m", "workers.cli", "run", str(config.run_dir.parent / "config.toml"), *flags]
    return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, start_new_session=True)


def wait_for_steps(config: RunConfig, count: int) -> None:
    deadline = time.monotonic() + DEADLINE_S
    while len(metrics(config)) < count:
        assert time.monotonic() < deadline, "no progress"
        time.sleep(0.05)


def write_config(config: RunConfig) -> None:
    from async_rl.config import dump_toml

    (config.run_dir.parent / "config.toml").write_text(dump_toml(config))


def finish(process: subprocess.Popen[str]) -> tuple[int, str]:
    output, _ = process.communicate(timeout=DEADLINE_S)
    return process.returncode, output


def trainer_of(process: subprocess.Popen[str]) -> psutil.Process:
    children = psutil.Process(process.pid).children(recursive=True)
    return next(child for child in children if "workers.trainer" in child.cmdline())


def test_a_killed_trainer_and_ctrl_c_lose_nothing_and_resume_goes_on(make_config: Callable[..., RunConfig]) -> None:
    config = make_config(trainer__max_steps=40, checkpoint__every_steps=4, launch__max_restarts=0)
    write_config(config)
    killed = start(config)
    wait_for_steps(config, 8)
    trainer_of(killed).send_signal(signal.SIGKILL)
    code, output = finish(killed)
    assert code != 0
    assert "trainer" in output
    before = {use.task_id for record in read_log(config.run_dir / "intake").steps for use in record.groups}
    assert len(before) >= 32

    interrupted = start(config, "--resume")
    wait_for_steps(config, 16)
    interrupted.send_signal(signal.SIGINT)
    code, output = finish(interrupted)
    assert code == 130, output
    assert "--resume" in output

    assert finish(start(config, "--resume"))[0] == 0
    lines = metrics(config)
    assert [line["step"] for line in lines] == list(range(1, 41))
    result = ends(config)
    assert result["trained"] == 160
    index = read_log(config.run_dir / "intake")
    assert before <= task_ends(index).keys()
    assert index.base_step > 0  # what no checkpoint needs any more was compacted
    epochs = [line["epoch"] for line in lines]
    assert epochs == sorted(epochs)
    assert len(set(epochs)) == 3
    assert nothing_left(config)


def test_a_run_of_one_step_ends_well_and_goes_on_when_max_steps_is_raised(make_config: Callable[..., RunConfig]) -> None:
    config = make_config(trainer__max_steps=1, staleness__max_lag=1)
    assert run(config, console=False).exit_code == 0
    assert len(metrics(config)) == 1
    assert ends(config)["trained"] == 4
    longer = make_config(trainer__max_steps=4, weights__push_every=2, rollout__kv="keep")
    assert run(longer, resume=True, console=False).exit_code == 0
    assert [line["step"] for line in metrics(longer)] == [1, 2, 3, 4]
    assert ends(longer)["trained"] == 16


def test_two_ranks_and_two_steps_per_batch(make_config: Callable[..., RunConfig]) -> None:
    config = make_config(
        trainer__world_size=2, trainer__steps_per_batch=2, trainer__max_steps=6, rollout__workers=2, staleness__max_lag=3
    )
    assert run(config, console=False).exit_code == 0
    assert [line["step"] for line in metrics(config)] == [1, 2, 3, 4, 5, 6]
    assert ends(config)["trained"] == 24


def test_an_environment_that_cannot_be_built_is_refused_before_anything_is_made(
    make_config: Callable[..., RunConfig],
) -> None:
    config = make_config(environment__args__length=99)
    with pytest.raises(ConfigError, match=r"environment.args.length=99: sort_digits needs an integer from 1 to 18"):
        run(config, console=False)
    assert not config.run_dir.exists()
