from __future__ import annotations

import asyncio
import threading
import time
from collections import Counter
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from async_rl.environments.base import Episode, TurnText
from async_rl.environments.prompt_reward import PromptReward
from async_rl.reward.score import score_episode
from async_rl.testing.builders import make_task
from protocol.messages import FinishReason, Reward


class _Verifier:
    """An environment whose `score` is the given function."""

    def __init__(self, score: Callable[[Episode], Any]) -> None:
        self.score = score

    async def observe(self, episode: Episode) -> str | None:
        return None


def _episode(text: str = "abc", index: int = 0) -> Episode:
    return Episode(task=make_task(), index=index, turns=(TurnText(text, FinishReason.STOP),))


async def _outcome(score: Callable[[Episode], Any], timeout_s: float = 30.0) -> Reward:
    return await score_episode(_Verifier(score), _episode(), timeout_s)


def _raising(error: BaseException) -> Callable[[Episode], Any]:
    async def score(episode: Episode) -> Reward:
        raise error

    return score


def _returning(value: object) -> Callable[[Episode], Any]:
    async def score(episode: Episode) -> object:
        return value

    return score


async def test_a_reward_is_returned_as_it_is() -> None:
    assert await _outcome(_returning(Reward(0.5, {"style": 1.0}))) == Reward(0.5, {"style": 1.0})
    assert await _outcome(_returning(Reward.invalid("no verdict", "Undecided"))) == Reward.invalid("no verdict", "Undecided")


async def test_numbers_of_other_libraries_become_plain_floats() -> None:
    reward = await _outcome(_returning(Reward(np.float32(0.5), {"n": 3})))  # type: ignore[arg-type]  # what users do
    assert (type(reward.value), type(reward.components["n"])) == (float, float)
    assert reward == Reward(0.5, {"n": 3.0})


@pytest.mark.parametrize("value", [True, np.bool_(True), np.float64(1), np.array(1.0), 1])
async def test_a_reward_function_may_return_any_kind_of_number(value: object) -> None:
    reward = await score_episode(PromptReward(lambda completion, row: value), _episode("a", 0), 30.0)
    assert (reward, type(reward.value)) == (Reward(1.0), float)


@pytest.mark.parametrize("value", [None, "1.0", np.ones(2), np.ones(1), [1.0], float("inf"), np.array(float("nan")), 10**400])
async def test_what_a_reward_function_returns_else_is_invalid(value: object) -> None:
    reward = await score_episode(PromptReward(lambda completion, row: value), _episode("a", 0), 30.0)
    assert not reward.is_valid
    assert reward.error_type in {"NotANumber", "NotFinite", "OverflowError"}


async def test_a_verifier_that_raises_is_invalid_and_counted_by_type_while_the_others_keep_their_rewards() -> None:
    def verify(completion: str, row: dict[str, Any]) -> float:
        return {"right": 1.0, "wrong": 0.0}[completion]

    environment = PromptReward(verify)
    texts = ["right", "wrong", "right", "unforeseen"]
    rewards = [await score_episode(environment, _episode(text, index), 30.0) for index, text in enumerate(texts)]
    assert [reward.value for reward in rewards] == [1.0, 0.0, 1.0, None]
    assert rewards[3].invalid_reason == "KeyError: 'unforeseen'"
    assert Counter(reward.error_type for reward in rewards if not reward.is_valid) == {"KeyError": 1}


@pytest.mark.parametrize(
    ("error", "error_type"),
    [
        (ZeroDivisionError("division by zero"), "ZeroDivisionError"),
        (SystemExit(0), "SystemExit"),
        (TimeoutError("the judge's own"), "TimeoutError"),
        (asyncio.CancelledError(), "CancelledError"),
        (RecursionError("too deep"), "RecursionError"),
    ],
)
async def test_whatever_is_raised_is_invalid_under_its_own_name(error: BaseException, error_type: str) -> None:
    reward = await _outcome(_raising(error))
    assert (reward.value, reward.error_type) == (None, error_type)
    assert str(error) in str(reward.invalid_reason)


async def test_ctrl_c_is_not_swallowed() -> None:
    score = _raising(KeyboardInterrupt()).__call__(_episode())
    with pytest.raises(KeyboardInterrupt):
        score.send(None)


async def test_cancelling_the_worker_is_not_a_reward() -> None:
    async def score(episode: Episode) -> Reward:
        await asyncio.Event().wait()
        raise AssertionError

    pending = asyncio.ensure_future(_outcome(score))
    await asyncio.sleep(0)
    pending.cancel()
    with pytest.raises(asyncio.CancelledError):
        await pending


async def test_an_async_verifier_is_cancelled_at_the_deadline() -> None:
    ended: list[str] = []

    async def score(episode: Episode) -> Reward:
        try:
            await asyncio.Event().wait()
        finally:
            ended.append("cancelled")
        raise AssertionError

    reward = await _outcome(score, timeout_s=0.02)
    assert reward == Reward.invalid("no score within reward.timeout_s=0.02", "timeout")
    assert ended == ["cancelled"]


async def test_a_sync_verifier_that_hangs_does_not_hold_the_worker() -> None:
    release = threading.Event()
    started = time.monotonic()
    reward = await _outcome(lambda episode: release.wait(30), timeout_s=0.05)
    assert (reward.error_type, time.monotonic() - started < 15) == ("timeout", True)
    release.set()


@pytest.mark.parametrize("value", [float("nan"), float("inf"), float("-inf")])
async def test_what_is_not_finite_is_invalid(value: float) -> None:
    assert (await _outcome(_returning(Reward(value)))).error_type == "NotFinite"
    component = await _outcome(_returning(Reward(1.0, {"style": value})))
    assert component.error_type == "NotFinite"
    assert "components.style" in str(component.invalid_reason)


@pytest.mark.parametrize("value", [None, 1.0, "1.0", Reward("1.0"), Reward(1.0, {"style": "good"})])  # type: ignore[arg-type,dict-item]  # what users do
async def test_what_is_no_reward_is_invalid(value: object) -> None:
    reward = await _outcome(_returning(value))
    assert (reward.value, reward.error_type) == (None, "NotAReward")


async def test_a_long_reason_is_cut() -> None:
    assert len(str((await _outcome(_raising(ValueError("x" * 10_000)))).invalid_reason)) == 500
