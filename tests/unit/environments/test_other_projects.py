"""Environments of other projects, the real libraries: reasoning-gym datasets and a verifiers taskset."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from msgspec.structs import replace

from async_rl.config.rollout import EnvironmentConfig
from async_rl.environments.base import Episode, Row, RowSource, TurnText
from async_rl.environments.load import load_environment
from async_rl.errors import ConfigError
from async_rl.reward.score import score_episode
from async_rl.testing.builders import make_task
from protocol.messages import FinishReason

MIX = {
    "datasets": [{"name": "chain_sum", "weight": 3, "config": {"min_terms": 2, "max_terms": 2}}, {"name": "letter_counting"}],
    "size": 40,
    "held_out": 5,
}
TASKSET = """
import verifiers.v1 as vf

class Data(vf.TaskData):
    answer: str = ""

class Task(vf.Task[Data]):
    @vf.reward(weight=2.0)
    async def right(self, task, trace):
        return float(trace.last_reply == task.answer)

    @vf.reward(weight=0.5)
    async def stopped(self, trace):
        return float(trace.stop_condition == "said_enough")

    @vf.metric
    async def length(self, trace):
        return len(trace.last_reply)

    @vf.stop
    async def said_enough(self, trace):
        return len(trace.last_reply) > 3

class Numbers(vf.Taskset[Task, vf.TasksetConfig]):
    def load(self):
        for number in range(6):
            yield Task(Data(prompt=f"What is {number} in words?", answer="three"))

class Endless(Numbers):
    INFINITE = True
"""


@pytest.fixture(autouse=True)
def _module(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    (tmp_path / "taskset_of_a_user.py").write_text(TASKSET)
    monkeypatch.syspath_prepend(str(tmp_path))
    yield
    sys.modules.pop("taskset_of_a_user", None)


def answered(row: Row, text: str) -> Episode:
    return Episode(replace(make_task(), prompt=row.prompt, columns=row.columns), 0, (TurnText(text, FinishReason.STOP),))


async def test_reasoning_gym_questions_are_scored_by_their_dataset() -> None:
    environment = load_environment(EnvironmentConfig(name="reasoning_gym", args=MIX))
    assert isinstance(environment, RowSource)
    rows = [environment.row(index) for index in range(environment.num_rows())]
    assert rows == [environment.row(index) for index in range(40)]
    assert 20 <= sum(row.columns["dataset"] == 0 for row in rows) < 40  # three of four, by weight
    for row in (*rows[:6], *environment.held_out_rows(99)):
        right = f"I think.<answer>{row.columns['answer']}</answer>"
        assert (await score_episode(environment, answered(row, right), 9.0)).value == 1.0
        assert (await score_episode(environment, answered(row, "<answer>zzz</answer>"), 9.0)).value in (0.0, 0.01)
        assert (await score_episode(environment, answered(row, str(row.columns["answer"])), 9.0)).value == 0.0


def test_an_unknown_dataset_names_the_nearest() -> None:
    with pytest.raises(ConfigError, match=r"no dataset 'chain_sums' \(did you mean 'chain_sum'"):
        load_environment(EnvironmentConfig(name="reasoning_gym", args={"datasets": [{"name": "chain_sums"}]}))


@pytest.mark.filterwarnings("ignore")  # of the library's own imports
async def test_a_taskset_scores_with_rewards_metrics_and_stops() -> None:
    arguments = {"taskset": "taskset_of_a_user:Numbers", "held_out": 2}
    environment = load_environment(EnvironmentConfig(name="verifiers", args=arguments))
    assert isinstance(environment, RowSource)
    assert (environment.num_rows(), len(environment.held_out_rows(9))) == (4, 2)
    row = environment.row(3)
    assert row.prompt == ({"role": "user", "content": "What is 3 in words?"},)
    right = await score_episode(environment, answered(row, "three"), 9.0)
    assert right.value == 2.5
    assert dict(right.components) == {"right": 1.0, "stopped": 1.0, "metric.length": 5.0}
    assert (await score_episode(environment, answered(row, "two"), 9.0)).value == 0.0
    with pytest.raises(ConfigError, match="never ends; set how many tasks to read"):
        load_environment(EnvironmentConfig(name="verifiers", args={"taskset": "taskset_of_a_user:Endless"}))
