"""Held-out prompts: where they come from, what they count under, and that none is trained on."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

import pytest

from async_rl.config import RunConfig, check, load_config
from async_rl.environments.load import load_environment
from async_rl.environments.sort_digits import SortDigits
from async_rl.errors import ConfigError, DataError
from async_rl.launch.held_out_tasks import held_out_tasks_of


def write(path: Path, prompts: Sequence[str], **columns: str) -> Path:
    path.write_text("".join(json.dumps({"prompt": prompt, **columns}) + "\n" for prompt in prompts))
    return path


def config(*flags: str) -> RunConfig:
    loaded = load_config(None, ["--model.path=m", "--evaluation.every_steps=10", *flags], {}).config
    check(loaded)
    return loaded


def with_files(trained: Path, *held_out: Path, more: Sequence[str] = ()) -> RunConfig:
    sources = json.dumps([{"source": str(path)} for path in held_out]).replace('": ', '" = ')
    flags = ("--environment.name=prompt_reward", "--environment.reward=math:pow", f"--data.source={trained}")
    return config(*flags, f"--evaluation.sources={sources}", *more)


def test_an_environments_own_held_out_rows_are_none_of_its_training_rows() -> None:
    run = config("--environment.args.length=3", "--evaluation.prompts=20", "--evaluation.samples=3")
    tasks = held_out_tasks_of(run, load_environment(run.environment))
    environment = SortDigits(length=3)
    training = {environment.row(index).prompt for index in range(environment.num_rows())}
    assert list(tasks) == ["sort_digits"]
    assert len(tasks["sort_digits"]) == 20
    assert not {task.prompt for task in tasks["sort_digits"]} & training
    assert {task.group_size for task in tasks["sort_digits"]} == {3}
    assert len({task.seed for task in tasks["sort_digits"]}) == 20


def test_files_are_told_apart_by_name_and_cut_at_the_number_of_prompts(tmp_path: Path) -> None:
    trained = write(tmp_path / "train.jsonl", ["1", "2"])
    easy, hard = write(tmp_path / "easy.jsonl", ["3", "4", "5"]), write(tmp_path / "hard.jsonl", ["6"])
    run = with_files(trained, easy, hard, more=["--evaluation.prompts=2", "--evaluation.temperature=0.5"])
    tasks = held_out_tasks_of(run, load_environment(run.environment))
    assert {name: [task.prompt for task in those] for name, those in tasks.items()} == {"easy": ["3", "4"], "hard": ["6"]}
    assert {task.temperature for those in tasks.values() for task in those} == {0.5}
    ids = [task.task_id for those in tasks.values() for task in those]
    assert len(set(ids)) == 3


def test_a_column_can_divide_them(tmp_path: Path) -> None:
    trained = write(tmp_path / "train.jsonl", ["1"])
    rows = write(tmp_path / "rows.jsonl", ["3", "4"], level="easy")
    with rows.open("a") as file:
        file.write(json.dumps({"prompt": "5", "level": "hard"}) + "\n")
    run = with_files(trained, rows, more=["--evaluation.by=level"])
    tasks = held_out_tasks_of(run, load_environment(run.environment))
    assert {name: len(those) for name, those in tasks.items()} == {"level easy": 2, "level hard": 1}
    other = with_files(trained, rows, more=["--evaluation.by=colour"])
    with pytest.raises(DataError, match=r"evaluation.by='colour' is no column of rows; it has level"):
        held_out_tasks_of(other, load_environment(other.environment))


def test_a_prompt_that_is_trained_on_is_refused_whatever_its_file(tmp_path: Path) -> None:
    trained, rows = write(tmp_path / "train.jsonl", ["1", "2"]), write(tmp_path / "rows.jsonl", ["3", "2"])
    run = with_files(trained, rows)
    with pytest.raises(DataError, match=r"prompt 1 of rows is row 1 of .*train.jsonl, which is trained on"):
        held_out_tasks_of(run, load_environment(run.environment))


def test_the_file_that_is_trained_on_is_refused_at_start(tmp_path: Path) -> None:
    trained = write(tmp_path / "train.jsonl", ["1"])
    with pytest.raises(ConfigError, match=r"evaluation.sources\[0\].source=.*train.jsonl' is trained on"):
        with_files(trained, trained)


@pytest.mark.parametrize(
    ("flags", "says"),
    [
        (["--evaluation.k=[1, 8]"], r"evaluation.k holds 8: pass@k needs k from 1 to evaluation.samples=4"),
        (["--evaluation.k=[]"], "evaluation.k is empty"),
        (["--evaluation.sources=[{path = 'x'}]"], r"evaluation.sources\[0\].* needs source"),
        (["--environment.name=prompt_reward", "--environment.reward=a:b", "--data.source=x.jsonl"], "no held-out prompts"),
        (["--evaluation.samples=300"], r"evaluation.samples=300 exceeds rollout.max_running=256"),
    ],
)
def test_what_cannot_be_evaluated_is_refused_at_start(flags: list[str], says: str) -> None:
    with pytest.raises(ConfigError, match=says):
        config(*flags)
