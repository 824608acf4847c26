"""Sources mixed by weight: exact shares, each source's own order, and any cursor again at any time."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from async_rl.config import check, load_config
from async_rl.coordinator.mix import BLOCK, MixedSource
from async_rl.coordinator.prompts import PromptSource, TaskTemplate
from async_rl.coordinator.sources import open_source
from async_rl.environments.sort_digits import SortDigits
from async_rl.errors import ConfigError


def source(name: str, length: int, *, data_epochs: int | None = None) -> PromptSource:
    template = TaskTemplate("run", name, "sort_digits", run_seed=3, group_size=2, temperature=1.0, max_new_tokens=4)
    return PromptSource(SortDigits(length), template, data_epochs=data_epochs)


def test_every_cursor_is_one_task_and_the_shares_are_exact() -> None:
    mixed = MixedSource([source("a", 3), source("b", 2)], [3, 1])
    tasks = [mixed.task_at(cursor) for cursor in range(2 * BLOCK)]
    names = [task.source for task in tasks if task is not None]
    assert Counter(names) == {"a": 1500, "b": 500}
    assert len({task.task_id for task in tasks if task is not None}) == 2 * BLOCK
    for cursor in range(4, 2 * BLOCK, 4):  # evenly, not in blocks
        assert Counter(names[:cursor])["a"] == 3 * cursor // 4


def test_each_source_keeps_its_own_order() -> None:
    alone, mixed = source("b", 2), MixedSource([source("a", 3), source("b", 2)], [0.7, 0.3])
    of_b = [task for cursor in range(300) if (task := mixed.task_at(cursor)) is not None and task.source == "b"]
    assert of_b == [alone.task_at(position) for position in range(len(of_b))]


@given(st.integers(0, 10**9), st.lists(st.floats(0.1, 10), min_size=1, max_size=4))
@settings(max_examples=30, deadline=None)
def test_a_task_is_made_again_from_its_id(cursor: int, weights: list[float]) -> None:
    mixed = MixedSource([source(f"s{index}", 2) for index in range(len(weights))], weights)
    task = mixed.task_at(cursor)
    assert task is not None
    assert mixed.task_of(task.task_id) == task


def test_it_ends_where_the_first_source_has_no_row_left() -> None:
    mixed = MixedSource([source("a", 3, data_epochs=1), source("b", 1, data_epochs=1)], [1, 1])  # 900 and 9 rows
    assert mixed.num_tasks is not None
    tasks = [mixed.task_at(cursor) for cursor in range(mixed.num_tasks)]
    assert Counter(task.source for task in tasks if task is not None) == {"a": 10, "b": 9}
    assert mixed.is_end(mixed.num_tasks)
    assert mixed.task_at(mixed.num_tasks) is None


def test_a_share_too_small_to_be_kept_is_refused() -> None:
    with pytest.raises(ConfigError, match="less than a task in 1000"):
        MixedSource([source("a", 3), source("b", 3)], [10_000, 1])


def test_a_config_mixes_files(tmp_path: Path) -> None:
    for name, column in (("sums", "prompt"), ("words", "question")):
        rows = [json.dumps({column: f"{name} {number}", "answer": "1"}) + "\n" for number in range(5)]
        (tmp_path / f"{name}.jsonl").write_text("".join(rows))
    mix = (
        f'[{{source = "{tmp_path}/sums.jsonl", weight = 3}}, {{source = "{tmp_path}/words.jsonl", prompt_column = "question"}}]'
    )
    arguments = [
        f"--data.mix={mix}",
        "--model.path=m",
        "--environment.name=verify",
        '--environment.args.verifiers=[{use = "exact"}]',
    ]
    config = load_config(None, arguments, {}).config
    check(config)
    mixed = open_source(config, "run", SortDigits())
    assert Counter(task.source for cursor in range(8) if (task := mixed.task_at(cursor)) is not None) == {"sums": 6, "words": 2}
    for wrong, message in (
        (mix.replace("weight = 3", "weight = 0"), "above 0"),
        (mix.replace("words", "sums"), "is named sums too"),
    ):
        with pytest.raises(ConfigError, match=message):
            check(load_config(None, [f"--data.mix={wrong}", *arguments[1:]], {}).config)
