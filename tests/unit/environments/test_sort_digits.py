from __future__ import annotations

import pytest
from msgspec.structs import replace

from async_rl.environments.base import Environment, Episode, RowSource, TurnText
from async_rl.environments.sort_digits import SortDigits
from async_rl.errors import ConfigError
from async_rl.testing.builders import make_task
from protocol.messages import FinishReason


def _episode(text: str, finish: FinishReason = FinishReason.STOP) -> Episode:
    task = replace(make_task(), prompt="402913>", columns={"answer": "012349"})
    return Episode(task=task, index=0, turns=(TurnText(text, finish),))


@pytest.mark.parametrize(
    ("text", "finish", "expected"),
    [
        ("012349", FinishReason.STOP, 1.0),
        ("012394", FinishReason.STOP, 0.0),
        ("01234", FinishReason.STOP, 0.0),
        ("0123499", FinishReason.STOP, 0.0),
        ("", FinishReason.STOP, 0.0),
        ("012349", FinishReason.LENGTH, 0.0),  # no stop token behind the digits
    ],
)
async def test_reward_is_exact_match_up_to_the_stop_token(text: str, finish: FinishReason, expected: float) -> None:
    reward = await SortDigits().score(_episode(text, finish))
    assert reward.value == expected
    assert reward.components == {"exact_match": expected}


async def test_an_episode_ends_after_one_turn() -> None:
    assert await SortDigits().observe(_episode("012349")) is None


def test_rows_are_six_digits_and_a_separator_with_the_sorted_answer() -> None:
    for index in range(50):
        row = SortDigits().row(index)
        assert isinstance(row.prompt, str)
        digits, separator = row.prompt[:6], row.prompt[6:]
        assert separator == ">"
        assert digits.isdigit()
        assert row.columns == {"answer": "".join(sorted(digits))}


def test_row_is_the_same_in_every_instance() -> None:
    assert [SortDigits().row(index) for index in range(20)] == [SortDigits().row(index) for index in range(20)]


def test_training_and_held_out_rows_cover_all_strings_once() -> None:
    environment = SortDigits(length=3, held_out_share=0.25)
    training = [environment.row(index).prompt for index in range(environment.num_rows())]
    held_out = [row.prompt for row in environment.held_out_rows(10_000)]
    assert (len(training), len(held_out)) == (750, 250)
    assert {*training, *held_out} == {f"{number:03d}>" for number in range(1000)}


def test_held_out_rows_grow_with_the_count_asked_for() -> None:
    environment = SortDigits()
    assert environment.held_out_rows(512)[:100] == environment.held_out_rows(100)
    assert len({row.prompt for row in environment.held_out_rows(512)}) == 512


def test_length_one_still_has_both_kinds_of_rows() -> None:
    environment = SortDigits(length=1)
    assert (environment.num_rows(), len(environment.held_out_rows(5))) == (9, 1)


def test_warmup_pairs_are_training_rows_and_follow_the_seed() -> None:
    environment = SortDigits(length=3, held_out_share=0.5)
    held_out = {row.prompt for row in environment.held_out_rows(1000)}
    pairs = list(environment.warmup_pairs(300, seed=1))
    assert len(pairs) == 300
    assert all(prompt not in held_out and answer == "".join(sorted(prompt[:3])) for prompt, answer in pairs)
    assert pairs == list(environment.warmup_pairs(300, seed=1))
    assert pairs != list(environment.warmup_pairs(300, seed=2))


def test_it_is_an_environment_and_a_row_source() -> None:
    environment: Environment = SortDigits()
    assert isinstance(environment, RowSource)


@pytest.mark.parametrize("length", [0, 19, True, 2.5, "6"])
def test_a_length_that_cannot_work_is_refused(length: int) -> None:
    with pytest.raises(ConfigError, match=r"environment\.args\.length=.*from 1 to 18"):
        SortDigits(length=length)


@pytest.mark.parametrize("share", [0, 1, -0.1, "half"])
def test_a_held_out_share_that_cannot_work_is_refused(share: float) -> None:
    with pytest.raises(ConfigError, match=r"environment\.args\.held_out_share="):
        SortDigits(held_out_share=share)
