"""Weighted verifiers: sums, limits, retries, groups, and how one failure makes the whole invalid."""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from msgspec.structs import replace

from async_rl.config.rollout import EnvironmentConfig
from async_rl.environments.base import Episode, GroupScorer, TurnText
from async_rl.environments.load import close_environment, load_environment
from async_rl.errors import ConfigError
from async_rl.reward.score import score_episode, score_group
from async_rl.testing.builders import make_task
from protocol.messages import FinishReason, Json, Reward

MODULE = """
import asyncio

TRIES = {}

def number(completion, row):
    return None if completion == "skip" else float(completion)

def flaky(completion, row):
    TRIES[completion] = TRIES.get(completion, 0) + 1
    if TRIES[completion] < 3:
        raise OSError("not yet")
    return 1.0

async def hangs(completion, row):
    await asyncio.sleep(60)

def novelty(completions, rows):
    return [float(completions.count(one) == 1) for one in completions]

def too_few(completions, rows):
    return [1.0]

class AtOnce:
    most = now = 0

    async def verify(self, episode):
        AtOnce.now += 1
        AtOnce.most = max(AtOnce.most, AtOnce.now)
        await asyncio.sleep(0.01)
        AtOnce.now -= 1
        return 1.0
"""


@pytest.fixture(autouse=True)
def _module(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    (tmp_path / "verifiers_of_a_user.py").write_text(MODULE)
    monkeypatch.syspath_prepend(str(tmp_path))
    yield
    sys.modules.pop("verifiers_of_a_user", None)


def entry(name: str, **more: Any) -> dict[str, Any]:
    return {"use": f"verifiers_of_a_user:{name}", "name": name, **more}


def episode(completion: str, *, tokens: int = 3, finish: FinishReason = FinishReason.STOP, **columns: Json) -> Episode:
    return Episode(replace(make_task(), columns=columns), 0, (TurnText(completion, finish, (1,) * tokens),))


async def rewards(parts: list[dict[str, Any]], *episodes: Episode) -> list[Reward]:
    environment = load_environment(EnvironmentConfig(name="verify", args={"verifiers": parts}))
    try:
        alone = await asyncio.gather(*(score_episode(environment, one, 10.0) for one in episodes))
        return await score_group(environment, episodes, alone, 10.0)
    finally:
        await close_environment(environment)


async def test_the_sum_is_weighted_and_every_part_is_a_component() -> None:
    parts = [entry("number", weight=2.0), {"use": "finished", "weight": 0.5}]
    (reward,) = await rewards(parts, episode("3"))
    assert reward == Reward(6.5, {"number": 3.0, "finished": 1.0})


async def test_none_leaves_the_others_and_from_all_is_no_reward() -> None:
    (some,) = await rewards([entry("number"), {"use": "finished"}], episode("skip"))
    (none,) = await rewards([entry("number")], episode("skip"))
    assert some == Reward(1.0, {"finished": 1.0})
    assert none.error_type == "not_scored"


@pytest.mark.parametrize(("completion", "kind"), [("x", "ValueError"), ("nan", "NotFinite"), ("inf", "NotFinite")])
async def test_one_part_that_fails_makes_the_sum_invalid(completion: str, kind: str) -> None:
    (reward,) = await rewards([{"use": "finished"}, entry("number")], episode(completion))
    assert (reward.value, reward.error_type) == (None, kind)
    assert str(reward.invalid_reason).startswith("number: ")


async def test_a_time_limit_of_its_own_and_retries_of_its_own() -> None:
    (late,) = await rewards([entry("hangs", timeout_s=0.05)], episode("1"))
    assert (late.error_type, late.invalid_reason) == ("timeout", "hangs: no score within timeout_s=0.05")
    (third,) = await rewards([entry("flaky", retries=2)], episode("a"))
    (second,) = await rewards([entry("flaky", retries=1)], episode("b"))
    assert (third.value, second.error_type) == (1.0, "OSError")


async def test_no_more_at_once_than_it_may() -> None:
    import verifiers_of_a_user  # type: ignore[import-not-found]  # made by the fixture

    await rewards([entry("AtOnce", max_concurrent=2)], *(episode(str(number)) for number in range(8)))
    assert verifiers_of_a_user.AtOnce.most == 2


async def test_a_group_is_seen_whole_without_those_that_failed_alone() -> None:
    parts = [entry("number"), {"group": "verifiers_of_a_user:novelty", "name": "novelty", "weight": 0.5}]
    scored = await rewards(parts, episode("1"), episode("x"), episode("1"), episode("2"))
    assert [reward.value for reward in scored] == [1.0, None, 1.0, 2.5]
    assert dict(scored[3].components) == {"number": 2.0, "novelty": 1.0}
    wrong = await rewards([{"group": "verifiers_of_a_user:too_few", "name": "g"}], episode("1"), episode("2"))
    assert [reward.error_type for reward in wrong] == ["ValueError", "ValueError"]


def test_only_what_sees_groups_is_asked_for_them() -> None:
    alone = load_environment(EnvironmentConfig(name="verify", args={"verifiers": [{"use": "finished"}]}))
    group = load_environment(EnvironmentConfig(name="verify", args={"verifiers": [{"group": "verifiers_of_a_user:novelty"}]}))
    assert (isinstance(alone, GroupScorer), isinstance(group, GroupScorer)) == (False, True)


@pytest.mark.parametrize(("tokens", "expected"), [(0, 0.0), (6, 0.0), (8, -0.5), (10, -1.0), (50, -1.0)])
async def test_long_answers_are_punished_softly(tokens: int, expected: float) -> None:
    (reward,) = await rewards([{"use": "length", "max_tokens": 10, "buffer": 4}], episode("x", tokens=tokens))
    assert reward.value == expected


@pytest.mark.parametrize(
    ("part", "completion", "columns", "expected"),
    [
        ({"use": "exact"}, " Paris \n", {"answer": "Paris"}, 1.0),
        ({"use": "exact", "ignore_case": True}, "PARIS", {"answer": ["Rome", "Paris"]}, 1.0),
        ({"use": "exact", "find": "boxed"}, r"It is \boxed{7}.", {"answer": 7}, 1.0),
        ({"use": "exact"}, "Paris!", {"answer": "Paris"}, 0.0),
        ({"use": "regex", "pattern": r"<a>\d+</a>", "whole": True}, "<a>12</a>", {}, 1.0),
        ({"use": "regex", "pattern": r"<a>\d+</a>", "whole": True}, "<a>12</a>.", {}, 0.0),
        ({"use": "regex", "column": "p"}, "abc", {"p": "b."}, 1.0),
        ({"use": "json", "gold": "answer"}, '{"b": [1, true], "a": 2.0}', {"answer": {"a": 2, "b": [1, True]}}, 1.0),
        ({"use": "json", "gold": "answer"}, '{"a": true}', {"answer": '{"a": 1}'}, 0.0),
        ({"use": "json", "schema": {"type": "object", "required": ["a"]}}, '{"a": 1}', {}, 1.0),
        ({"use": "json", "schema": {"type": "object", "required": ["a"]}}, '{"b": 1}', {}, 0.0),
        ({"use": "json"}, '{"a": 1, "a": 2}', {}, 0.0),
        ({"use": "json"}, "[NaN]", {}, 0.0),
        ({"use": "json"}, "[" * 100_000, {}, 0.0),
        ({"use": "json", "fenced": True}, 'So:\n```json\n{"a": 1}\n```', {}, 1.0),
    ],
)
async def test_matches(part: dict[str, Any], completion: str, columns: dict[str, Json], expected: float) -> None:
    (reward,) = await rewards([part], episode(completion, **columns))
    assert reward.value == expected


async def test_a_pattern_that_takes_forever_is_invalid_in_time() -> None:
    part = {"use": "regex", "pattern": "(a+)+$", "whole": True, "timeout_s": 0.3}
    (reward,) = await rewards([part], episode("a" * 40 + "b"))
    assert reward.error_type == "timeout"


@pytest.mark.parametrize(
    ("parts", "message"),
    [
        ([], "needs a list of tables"),
        ([{"use": "maths"}], r"use='maths' is not known \(did you mean 'math'\?\)"),
        ([{"use": "math"}, {"use": "math"}], "the name 'math' is taken"),
        (
            [{"use": "length", "max_token": 3}],
            r"max_token: verifier 'length' has no such argument \(did you mean 'max_tokens'\?\)",
        ),
        ([{"weight": 1}], "needs one of use, group, trl"),
        ([{"use": "finished", "weight": "much"}], "weight='much': needs a number"),
        ([{"use": "regex", "pattern": "("}], "is no regular expression"),
    ],
)
def test_what_cannot_work_is_refused_by_name(parts: list[dict[str, Any]], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        load_environment(EnvironmentConfig(name="verify", args={"verifiers": parts}))
