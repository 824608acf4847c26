"""One task into one group: token in, token out, every sampled id stamped."""

from __future__ import annotations

import asyncio
import inspect
from collections.abc import Callable, Sequence
from typing import cast

import msgspec
import pytest
from tokenizers import Tokenizer as RustTokenizer
from tokenizers import models
from transformers import PreTrainedTokenizerFast

from async_rl.environments.base import Environment, Episode
from async_rl.errors import DataError, NotServing
from async_rl.rollout.group import GroupRollout, RolloutLimits
from async_rl.testing.builders import make_task
from async_rl.testing.engines import Script, ScriptedEngine
from protocol.messages import FinishReason, Reward, SamplingParams

LIMITS = RolloutLimits(max_turns=4, max_context=32, max_new_tokens=8)
A, B, AB, X, EOS = 0, 1, 2, 3, 4


def merging_tokenizer() -> PreTrainedTokenizerFast:
    """Vocabulary a, b, ab, x: text "ab" encodes to the one token `ab`."""
    vocabulary = {"a": A, "b": B, "ab": AB, "x": X, "<eos>": EOS}
    bpe = models.BPE(vocab=vocabulary, merges=[("a", "b")])
    return PreTrainedTokenizerFast(tokenizer_object=RustTokenizer(bpe), eos_token="<eos>")


class Turns(Environment):
    """Answers each turn but the last with an observation."""

    def __init__(self, observations: Sequence[str]) -> None:
        self._observations = observations

    async def observe(self, episode: Episode) -> str | None:
        done = len(episode.turns)
        return self._observations[done - 1] if done <= len(self._observations) else None

    async def score(self, episode: Episode) -> Reward:
        return Reward(float(len(episode.turns)))


def rollout(
    script: Script,
    environment: Environment,
    *,
    scored: bool = True,
    observe_timeout_s: float | None = None,
    **limits: int,
) -> tuple[GroupRollout, ScriptedEngine]:
    engine = ScriptedEngine(script, max_context=32)
    bounds = RolloutLimits(**{"max_turns": 4, "max_context": 32, "max_new_tokens": 8, **limits})
    one = GroupRollout(
        engine,
        merging_tokenizer(),
        environment,
        bounds,
        worker_id="w",
        stop_token_ids=[EOS],
        score=environment.score if scored else None,
        observe_timeout_s=observe_timeout_s,
        clock=lambda: 5.0,
    )
    return one, engine


def always(*token_ids: int, finish: FinishReason = FinishReason.STOP) -> Script:
    return lambda prompt, sampling: (token_ids, finish)


async def test_sampled_ids_are_never_re_encoded_and_the_next_turn_starts_with_them() -> None:
    one, engine = rollout(always(A, B), Turns(["x"]))
    group = await one.run(make_task(prompt="x", group_size=1))
    (trajectory,) = group.trajectories
    assert trajectory.token_ids.tolist() == [X, A, B, X, A, B]
    assert engine.prompts == [[X], [X, A, B, X]]
    assert AB not in trajectory.token_ids


async def test_only_what_the_policy_sampled_is_trained_and_stamped() -> None:
    one, _ = rollout(always(A, B), Turns(["x"]))
    (trajectory,) = (await one.run(make_task(prompt="x", group_size=1))).trajectories
    assert trajectory.loss_mask.tolist() == [0, 1, 1, 0, 1, 1]
    assert trajectory.behavior_logprobs.tolist() == [0, -0.125, -0.25, 0, -0.125, -0.25]
    assert [(span.start, span.end, span.version) for span in trajectory.versions] == [(1, 3, 0), (4, 6, 0)]
    assert trajectory.reward == Reward(2.0)


async def test_every_turn_keeps_its_own_finish_reason() -> None:
    def script(prompt: Sequence[int], sampling: SamplingParams) -> tuple[Sequence[int], FinishReason]:
        return ([A], FinishReason.STOP) if len(prompt) < 3 else ([A, A], FinishReason.LENGTH)

    one, _ = rollout(script, Turns(["x", "x"]))
    (trajectory,) = (await one.run(make_task(prompt="x", group_size=1))).trajectories
    assert [turn.finish_reason for turn in trajectory.turns] == [FinishReason.STOP, FinishReason.LENGTH]
    assert trajectory.finish_reason is FinishReason.LENGTH


async def test_no_two_samples_of_two_engines_share_a_seed() -> None:
    seeds: list[int] = []
    for row in (0, 1):
        one, engine = rollout(always(A), Turns(["x", "x"]))
        await one.run(make_task(prompt="x", group_size=4, row=row))
        seeds += engine.seeds
    assert len(seeds) == 24
    assert len(set(seeds)) == 24


async def test_a_task_done_again_draws_the_same_seeds() -> None:
    first, second = (rollout(always(A), Turns(["x"])) for _ in range(2))
    await first[0].run(make_task(prompt="x", group_size=3))
    await second[0].run(make_task(prompt="x", group_size=3))
    assert first[1].seeds == second[1].seeds


async def test_the_context_bounds_turns_and_observations() -> None:
    one, engine = rollout(always(A, A, A), Turns(["xx", "xx", "xx"]), max_context=7)
    (trajectory,) = (await one.run(make_task(prompt="x", group_size=1))).trajectories
    assert trajectory.token_ids.tolist() == [X, A, A, A, X, X, A]  # one token of room in the second turn
    assert trajectory.finish_reason is FinishReason.LENGTH
    assert len(engine.prompts) == 2


async def test_a_prompt_longer_than_the_context_is_named_or_ends_as_invalid() -> None:
    task = make_task(prompt="x" * 40, group_size=2)
    one, _ = rollout(always(A), Turns([]))
    with pytest.raises(DataError, match=r"40 tokens.*holds 32.*max_context"):
        await one.run(task)
    engine = ScriptedEngine(always(A))
    skipping = GroupRollout(
        engine, merging_tokenizer(), Turns([]), LIMITS, worker_id="w", stop_token_ids=[EOS], score=None, skip_long_prompts=True
    )
    group = await skipping.run(task)
    assert engine.prompts == []
    assert [t.reward.error_type for t in group.trajectories if t.reward] == ["long_prompt", "long_prompt"]
    assert all(t.num_sampled == 0 for t in group.trajectories)


async def test_without_a_scorer_the_group_is_left_for_reward_workers() -> None:
    one, _ = rollout(always(A), Turns([]), scored=False)
    group = await one.run(make_task(prompt="x", group_size=2))
    assert not group.is_scored


async def test_an_engine_without_a_served_version_refuses() -> None:
    engine = ScriptedEngine(always(A), version=None)
    one = GroupRollout(engine, merging_tokenizer(), Turns([]), LIMITS, worker_id="w", stop_token_ids=[EOS], score=None)
    with pytest.raises(NotServing):
        await one.run(make_task(prompt="x", group_size=1))


class Failing(Turns):
    """Cannot answer the first turn of member 1."""

    def __init__(self, fail: Callable[[], object]) -> None:
        super().__init__(["x"])
        self._fail = fail

    async def observe(self, episode: Episode) -> str | None:
        if episode.index == 1:
            result = self._fail()
            return await result if inspect.isawaitable(result) else result  # type: ignore[return-value]  # what users do
        return await super().observe(episode)


def breaks() -> object:
    raise KeyError("no such tool")


def exits() -> object:
    raise SystemExit(0)


@pytest.mark.parametrize(
    ("fail", "error_type", "reason"),
    [
        (breaks, "KeyError", "observe raised KeyError: 'no such tool'"),
        (exits, "SystemExit", "observe raised SystemExit: 0"),
        (lambda: 7, "NotText", "observe returned int 7; it must be text or None"),
        (lambda: asyncio.sleep(60), "timeout", "no answer within reward.timeout_s=0.01"),
    ],
)
async def test_an_environment_that_cannot_answer_makes_its_member_invalid_and_the_group_goes_on(
    fail: Callable[[], object], error_type: str, reason: str
) -> None:
    for scored in (True, False):
        one, _ = rollout(always(A, B), Failing(fail), scored=scored, observe_timeout_s=0.01)
        first, second = (await one.run(make_task(prompt="x", group_size=2))).trajectories
        assert first.reward == (Reward(2.0) if scored else None)
        assert second.reward == Reward.invalid(reason, error_type)
        assert second.token_ids.tolist() == [X, A, B]
        assert [turn.finish_reason for turn in second.turns] == [FinishReason.STOP]


async def test_an_environment_may_be_plain_functions() -> None:
    class Plain:
        def observe(self, episode: Episode) -> str | None:
            return "x" if len(episode.turns) == 1 else None

    one, _ = rollout(always(A), cast(Environment, Plain()), scored=False)
    (trajectory,) = (await one.run(make_task(prompt="x", group_size=1))).trajectories
    assert trajectory.token_ids.tolist() == [X, A, X, A]


async def test_messages_without_a_template_that_can_render_them_are_named() -> None:
    one, _ = rollout(always(A), Turns([]))
    task = msgspec.structs.replace(make_task(group_size=1), prompt=({"role": "user", "content": "x"},))
    with pytest.raises(DataError, match=r"task test:0:0:0: the tokenizer's chat template cannot render .*text prompts"):
        await one.run(task)
