from __future__ import annotations

import json
from typing import Any

import pytest
from msgspec.structs import replace

from async_rl.config import check, load_config
from async_rl.environments.base import Episode, TurnText
from async_rl.environments.json_extraction import NUM_SENTENCES, JsonExtraction
from async_rl.environments.load import load_environment
from async_rl.errors import ConfigError
from async_rl.launch.demo import DEMO_CONFIG, demo_config, run_demo
from async_rl.testing.builders import make_task
from protocol.messages import FinishReason

TASK = JsonExtraction()


def episode(said: str, facts: dict[str, Any]) -> Episode:
    task = replace(make_task(), columns={"facts": facts})
    return Episode(task, 0, (TurnText(said, FinishReason.STOP, (1,)),))


@pytest.mark.parametrize("row", [0, 1, 977, 654_321])
async def test_the_object_scores_and_its_facts_stand_in_the_sentence(row: int) -> None:
    facts: Any = TASK.row(row).columns["facts"]
    messages: Any = TASK.row(row).prompt
    assert all(str(value) in messages[-1]["content"] for value in facts.values())
    assert [message["role"] for message in messages] == ["system", "user", "assistant", "user"]
    said = json.dumps(dict(reversed(facts.items())))  # the order of keys is no matter
    assert (await TASK.score(episode(said, facts))).value == 1.0


@pytest.mark.parametrize(
    ("change", "parses"),
    [
        (lambda text: text.replace("35", '"35"'), 1.0),
        (lambda text: text[:-1] + ', "more": 1}', 1.0),
        (lambda text: f"Here it is: {text}", 0.0),
        (lambda text: f"[{text}]", 1.0),
        (lambda text: "[" * 100_000, 0.0),
        (lambda text: "", 0.0),
    ],
)
async def test_anything_else_does_not(change: Any, parses: float) -> None:
    facts = {"name": "Anna", "age": 35, "job": "clerk", "city": "Vienna"}
    reward = await TASK.score(episode(change(json.dumps(facts)), facts))
    assert (reward.value, dict(reward.components)) == (0.0, {"exact_match": 0.0, "parses": parses})


def test_held_out_sentences_are_none_of_the_training_ones() -> None:
    held_out = [str(row.prompt) for row in TASK.held_out_rows(500)]
    training = {str(TASK.row(index).prompt) for index in range(5000)}
    assert len(set(held_out)) == 500
    assert len(training) == 5000
    assert not training & set(held_out)
    assert TASK.num_rows() == NUM_SENTENCES - NUM_SENTENCES // 10


def test_its_config_is_valid_and_needs_a_model_that_chats(tmp_path: Any) -> None:
    path = DEMO_CONFIG.parents[2] / "deploy" / "configs" / "demo_llm.toml"
    config = load_config(path, ["--model.path=m"], {}).config
    check(config)
    assert isinstance(load_environment(config.environment), JsonExtraction)
    with pytest.raises(ConfigError, match="name one with a chat template"):
        run_demo(demo_config([f"--run_dir={tmp_path / 'run'}"], path=path))
    assert not (tmp_path / "run").exists()
