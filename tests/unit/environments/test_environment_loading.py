from __future__ import annotations

import sys
from pathlib import Path

import pytest
from msgspec.structs import replace

from async_rl.config.rollout import EnvironmentConfig
from async_rl.environments.base import Episode, RowSource, TurnText
from async_rl.environments.load import load_environment
from async_rl.errors import ConfigError
from async_rl.testing.builders import make_task
from async_rl.testing.environments import TwoTurns
from protocol.messages import FinishReason, Reward

MODULE = """
from protocol.messages import Reward

NOT_A_FUNCTION = 3

def length(completion, row):
    return len(completion) + row["bonus"]

async def length_async(completion, row):
    return len(completion)

class Judge:
    async def __call__(self, completion, row):
        return Reward(0.5, {"style": 0.25})

judge = Judge()

def verdict(completion, row):
    return Reward.invalid("no verdict", "NoVerdict")

def nothing(completion, row):
    return None

def echo_prompt(completion, row):
    return float(row["prompt"] == "402913>")

class NoScore:
    async def observe(self, episode):
        return None
"""


@pytest.fixture
def user_module(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    name = "rewards_of_a_user"
    (tmp_path / f"{name}.py").write_text(MODULE)
    (tmp_path / "broken_module_of_a_user.py").write_text("raise RuntimeError('no licence')\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    sys.modules.pop(name, None)
    return name


def _episode(text: str = "abc") -> Episode:
    task = replace(make_task(), columns={"bonus": 10})
    return Episode(task=task, index=0, turns=(TurnText(text, FinishReason.STOP),))


async def _score(reward: str, text: str = "abc") -> Reward:
    return await load_environment(EnvironmentConfig(name="prompt_reward", reward=reward)).score(_episode(text))


async def test_a_plain_function_gets_completion_and_row(user_module: str) -> None:
    assert await _score(f"{user_module}:length") == Reward(13.0)
    assert await _score(f"{user_module}:echo_prompt") == Reward(1.0)


async def test_async_functions_and_callable_objects_work(user_module: str) -> None:
    assert await _score(f"{user_module}:length_async") == Reward(3.0)
    assert await _score(f"{user_module}:judge") == Reward(0.5, {"style": 0.25})


async def test_a_reward_that_is_returned_is_kept_as_it_is(user_module: str) -> None:
    assert await _score(f"{user_module}:verdict") == Reward.invalid("no verdict", "NoVerdict")


async def test_what_is_no_number_is_invalid_and_not_zero(user_module: str) -> None:
    reward = await _score(f"{user_module}:nothing")
    assert (reward.value, reward.error_type) == (None, "NotANumber")
    assert "NoneType" in str(reward.invalid_reason)


def test_built_in_by_name_with_args() -> None:
    environment = load_environment(EnvironmentConfig(args={"length": 4}))
    assert isinstance(environment, RowSource)
    assert len(str(environment.row(0).prompt)) == len("1234>")


async def test_own_class_by_module_and_name() -> None:
    environment = load_environment(EnvironmentConfig(name="async_rl.testing.environments:TwoTurns", args={"answer": "7"}))
    assert isinstance(environment, TwoTurns)
    task = make_task()
    first = Episode(task=task, index=0, turns=(TurnText("7", FinishReason.STOP),))
    assert await environment.observe(first) == "again>"
    both = Episode(task=task, index=0, turns=(*first.turns, TurnText("8", FinishReason.STOP)), observations=("again>",))
    assert await environment.observe(both) is None
    assert (await environment.score(both)).value == 0.5


@pytest.mark.parametrize(
    ("config", "message"),
    [
        (EnvironmentConfig(name="sort_digit"), r"'sort_digit' is not known \(did you mean 'sort_digits'\?\)"),
        (EnvironmentConfig(name="prompt_reward"), r"needs environment\.reward = module:function"),
        (EnvironmentConfig(name="prompt_reward", reward="rewards"), r"needs the form module:function"),
        (EnvironmentConfig(name="prompt_reward", reward="no_such_module:f"), r"no module 'no_such_module'"),
        (
            EnvironmentConfig(name="prompt_reward", reward="rewards_of_a_user:lenght"),
            r"has no 'lenght' \(did you mean 'length'\?\)",
        ),
        (EnvironmentConfig(name="prompt_reward", reward="rewards_of_a_user:NOT_A_FUNCTION"), r"is a int, not a function"),
        (EnvironmentConfig(name="prompt_reward", reward="broken_module_of_a_user:f"), r"raised RuntimeError: no licence"),
        (EnvironmentConfig(name="prompt_reward", reward="rewards_of_a_user:length", args={"x": 1}), r"takes no arguments"),
        (
            EnvironmentConfig(name="sort_digits", reward="rewards_of_a_user:length"),
            r"is for environment\.name='prompt_reward' only",
        ),
        (EnvironmentConfig(args={"lenght": 6}), r"args\.lenght: .*did you mean 'length'"),
        (EnvironmentConfig(args={"length": 60}), r"args\.length=60: sort_digits needs an integer from 1 to 18"),
        (EnvironmentConfig(name="rewards_of_a_user:NoScore"), r"is not an environment: it has no score"),
        (EnvironmentConfig(name="async_rl.testing.environments:Missing"), r"has no 'Missing'"),
    ],
)
def test_what_cannot_be_loaded_is_refused_with_a_name(user_module: str, config: EnvironmentConfig, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        load_environment(config)
