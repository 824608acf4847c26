from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from async_rl.config.rollout import DataConfig, EnvironmentConfig, RolloutConfig
from async_rl.config.run import ModelConfig, RunConfig
from async_rl.coordinator.prompts import PromptSource, TaskTemplate
from async_rl.environments.load import load_environment
from async_rl.environments.sort_digits import SortDigits
from async_rl.errors import ConfigError
from async_rl.testing.environments import NumberedRows
from protocol.messages import PromptTask
from protocol.seeds import group_seed

TEMPLATE = TaskTemplate("run", "rows", "sort_digits", run_seed=7, group_size=4, temperature=0.5, max_new_tokens=9)


def _rows(source: PromptSource, cursors: range) -> list[int]:
    tasks = [source.task_at(cursor) for cursor in cursors]
    return [task.row for task in tasks if task is not None]


@settings(max_examples=40, deadline=None)
@given(count=st.integers(1, 40), seed=st.integers(0, 2**63 - 1), shuffle=st.booleans())
def test_every_data_epoch_visits_every_row_once(count: int, seed: int, shuffle: bool) -> None:
    source = PromptSource(NumberedRows(count), replace(TEMPLATE, run_seed=seed), shuffle=shuffle)
    for epoch in range(2):
        rows = _rows(source, range(epoch * count, (epoch + 1) * count))
        assert sorted(rows) == list(range(count))
        assert shuffle or rows == list(range(count))


def test_order_differs_between_data_epochs_and_between_seeds() -> None:
    source, other = (PromptSource(NumberedRows(1000), replace(TEMPLATE, run_seed=seed)) for seed in (7, 8))
    first, second, of_other = _rows(source, range(1000)), _rows(source, range(1000, 2000)), _rows(other, range(1000))
    for pair in ((first, second), (first, of_other)):
        assert sum(a == b for a, b in zip(*pair, strict=True)) < 12  # 1 is expected of independent orders


def test_task_is_a_pure_function_of_the_cursor() -> None:
    source, another = PromptSource(NumberedRows(50), TEMPLATE), PromptSource(NumberedRows(50), TEMPLATE)
    forwards = [source.task_at(cursor) for cursor in range(120)]
    backwards = [another.task_at(cursor) for cursor in reversed(range(120))]
    assert forwards == backwards[::-1]
    stamped = source.task_at(3, issued_at_s=5.0)
    assert stamped is not None
    assert msgspec.structs.replace(stamped, issued_at_s=0.0) == forwards[3]


def test_task_carries_its_row_its_id_and_its_seed() -> None:
    task = PromptSource(NumberedRows(3), TEMPLATE, shuffle=False).task_at(4)  # second data epoch, row 1
    assert task == PromptTask(
        run_id="run",
        task_id="rows:1:1:0",
        source="rows",
        data_epoch=1,
        row=1,
        repeat=0,
        prompt="1>",
        columns={"n": 1},
        environment="sort_digits",
        group_size=4,
        seed=group_seed(7, "rows:1:1:0"),
        temperature=0.5,
        max_new_tokens=9,
        issued_at_s=0.0,
    )


def test_no_two_tasks_share_a_seed_or_an_id() -> None:
    tasks = [PromptSource(NumberedRows(100), TEMPLATE).task_at(cursor) for cursor in range(1000)]
    assert len({task.task_id for task in tasks if task}) == len({task.seed for task in tasks if task}) == 1000


def test_a_task_is_made_again_from_its_id() -> None:
    source = PromptSource(NumberedRows(50), replace(TEMPLATE, source="my:rows"), data_epochs=2)
    for cursor in (0, 49, 50, 99):
        task = source.task_at(cursor)
        assert task is not None
        assert source.task_of(task.task_id) == task


@pytest.mark.parametrize("identity", ["other:0:1:0", "rows:0:50:0", "rows:2:1:0", "rows:0:x:0", "rows:0:-1:0", "rows", ""])
def test_an_id_of_another_source_is_nobodys_task(identity: str) -> None:
    assert PromptSource(NumberedRows(50), TEMPLATE, data_epochs=2).task_of(identity) is None


def test_data_ends_after_its_epochs() -> None:
    source = PromptSource(NumberedRows(3), TEMPLATE, data_epochs=2)
    assert source.num_tasks == 6
    assert [source.is_end(cursor) for cursor in (5, 6, 7)] == [False, True, True]
    assert source.task_at(5) is not None
    assert [source.task_at(cursor) for cursor in (6, 7, 600)] == [None] * 3
    endless = PromptSource(NumberedRows(3), TEMPLATE)
    assert (endless.num_tasks, endless.is_end(10**9)) == (None, False)


def test_a_negative_cursor_is_refused() -> None:
    with pytest.raises(ValueError, match="must not be negative"):
        PromptSource(NumberedRows(3), TEMPLATE).task_at(-1)


def _config(**settings: object) -> RunConfig:
    return RunConfig(model=ModelConfig(path=Path("model")), rollout=RolloutConfig(group_size=2, max_new_tokens=5), **settings)  # type: ignore[arg-type]  # sections by name


def test_built_in_prompts_come_from_the_environment() -> None:
    config = _config(seed=3)
    source = PromptSource.from_config(config, "run-1", load_environment(config.environment))
    task = source.task_at(0)
    assert task is not None
    assert source.num_rows == SortDigits().num_rows()
    assert (task.source, task.environment, task.group_size, task.max_new_tokens) == ("sort_digits", "sort_digits", 2, 5)
    assert (task.prompt, task.columns) == (SortDigits().row(task.row).prompt, SortDigits().row(task.row).columns)


def test_prompts_of_a_file_are_named_after_it(tmp_path: Path) -> None:
    path = tmp_path / "questions.jsonl"
    path.write_text("".join(json.dumps({"question": f"{n}?", "answer": n}) + "\n" for n in range(4)))
    data = DataConfig(source=str(path), prompt_column="question", shuffle=False, data_epochs=1)
    source = PromptSource.from_config(_config(data=data), "run-1", SortDigits())
    task = source.task_at(2)
    assert task is not None
    assert (task.task_id, task.prompt, task.columns) == ("questions:0:2:0", "2?", {"answer": 2})
    assert source.num_tasks == 4


def test_an_environment_without_prompts_needs_data(tmp_path: Path) -> None:
    environment = EnvironmentConfig(name="async_rl.testing.environments:TwoTurns")
    config = _config(environment=environment)
    with pytest.raises(ConfigError, match=r"data\.source='environment', but .*TwoTurns' brings no prompts"):
        PromptSource.from_config(config, "run-1", load_environment(environment))
