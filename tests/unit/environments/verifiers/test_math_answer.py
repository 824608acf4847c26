"""Mathematical answers: what is found, what is equal, and what hostile text can do. The comparison runs in real processes."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec.structs import replace

from async_rl.environments.base import Episode, TurnText
from async_rl.environments.verifiers.answers import boxed, find_answer
from async_rl.environments.verifiers.math_answer import MathAnswer
from async_rl.environments.verifiers.math_compare import same_answer
from async_rl.environments.verifiers.math_values import read_value
from async_rl.errors import DataError
from async_rl.testing.builders import make_task
from protocol.messages import FinishReason, Json, Reward

ROWS = Path(__file__).parents[3] / "golden" / "math_rows.jsonl"
HANGS = "9^{9^{9^{9^{9}}}}"


def episode(completion: str, **columns: Json) -> Episode:
    task = replace(make_task(), columns=columns)
    return Episode(task, 0, (TurnText(completion, FinishReason.STOP, (1, 2, 3)),))


@pytest.fixture(name="math")
async def _math() -> AsyncIterator[MathAnswer]:
    verifier = MathAnswer(timeout_s=4.0, processes=2)
    yield verifier
    await verifier.close()


def never_equal(gold: str, answer: str) -> bool:
    return False


async def test_every_row_of_the_table_is_judged_as_expected(math: MathAnswer, tmp_path: Path, monkeypatch: Any) -> None:
    monkeypatch.chdir(tmp_path)
    rows = [json.loads(line) for line in ROWS.read_text().splitlines()]
    rows = [row for row in rows if row["expected"] != "invalid"]  # what takes forever has a test of its own
    verdicts = await asyncio.gather(*(math.verify(episode(row["answer"], answer=row["gold"])) for row in rows))
    wrong = [(row, said) for row, said in zip(rows, verdicts, strict=True) if said != float(row["expected"])]
    assert wrong == []
    assert await asyncio.to_thread(lambda: list(tmp_path.iterdir())) == []  # no hostile row left a file


async def test_what_takes_forever_is_invalid_and_the_next_answer_is_right() -> None:
    math = MathAnswer(timeout_s=0.7, processes=2)
    try:
        verdicts = await asyncio.gather(*(math.verify(episode(f"\\boxed{{{HANGS}}}", answer="1")) for _ in range(8)))
        assert [verdict.error_type for verdict in verdicts if isinstance(verdict, Reward)] == ["timeout"] * 8
        assert await math.verify(episode(r"\boxed{(x+1)^2}", answer="x^2+2x+1")) == 1.0
    finally:
        await math.close()


async def test_a_worker_thread_without_signals_can_verify() -> None:
    """Whoever calls from a thread gets an answer: no alarm is needed, the process is killed instead."""

    async def verify() -> object:
        math = MathAnswer(processes=1)
        try:
            return await math.verify(episode(r"\boxed{\frac{x}{2}}", answer="0.5x"))
        finally:
            await math.close()

    assert await asyncio.to_thread(lambda: asyncio.run(verify())) == 1.0


async def test_a_row_without_a_gold_answer_is_an_error_and_not_a_zero(math: MathAnswer) -> None:
    with pytest.raises(DataError, match=r"no column 'answer' with the gold answer; it has question"):
        await math.verify(episode(r"\boxed{1}", question="?"))


@pytest.mark.parametrize(
    ("text", "strict", "lenient"),
    [
        ("42 might be relevant, I am unsure.", None, "42"),
        ("✅ Final Answer: **73**", None, "73"),
        ("The total is 72 clips, altogether.", None, "72"),
        ("so 5 + 7 = 12\n#### 12", None, "12"),
        ("The answer is $\\frac{1}{2}$, since 3 > 2.", None, "\\frac{1}{2}"),
        ("we get \\boxed{\\frac{1}{3}", None, None),
        ("\\boxed{1} and \\boxed{2}", "1, 2", "1, 2"),
        ("\\boxed{1} was wrong. It is \\boxed{2}", "2", "2"),
        ("\\boxed{\\{1, 2\\}}", "\\{1, 2\\}", "\\{1, 2\\}"),
        ("answer: -3.5 meters. Done.", None, "-3.5 meters"),
        ("nothing", None, None),
    ],
)
def test_what_is_found(text: str, strict: str | None, lenient: str | None) -> None:
    assert find_answer(text, strict=True) == strict
    assert find_answer(text, strict=False) == lenient


@given(st.text(alphabet="\\{}[]()boxed1,$ ", max_size=60))
@settings(max_examples=200, deadline=None)
def test_finding_an_answer_never_fails(text: str) -> None:
    boxed(text)
    find_answer(text, strict=False)
    read_value(text)


@given(st.integers(-(10**12), 10**12), st.integers(1, 999))
@settings(max_examples=100, deadline=None)
def test_a_fraction_equals_itself_in_every_writing(above: int, below: int) -> None:
    gold = f"{above}/{below}"
    for answer in (gold, f"\\frac{{{above}}}{{{below}}}", f"\\dfrac{{{2 * above}}}{{{2 * below}}}"):
        assert same_answer(gold=gold, answer=answer, same_expression=never_equal)
    assert not same_answer(gold=gold, answer=f"{above + 1}/{below}", same_expression=never_equal)


@given(st.integers(0, 10**15))
@settings(max_examples=100, deadline=None)
def test_thousands_separators_are_no_list(value: int) -> None:
    for answer in (f"{value:,}", f"{value:,}".replace(",", "{,}"), f"\\${value:,}"):
        assert same_answer(gold=str(value), answer=answer, same_expression=never_equal)


@given(st.lists(st.integers(-99, 99), min_size=2, max_size=6, unique=True), st.randoms())
@settings(max_examples=100, deadline=None)
def test_several_answers_are_equal_in_any_order_and_only_if_complete(values: list[int], random: Any) -> None:
    gold, shuffled = ", ".join(map(str, values)), random.sample(values, len(values))
    assert same_answer(gold=gold, answer=" and ".join(map(str, shuffled)), same_expression=never_equal)
    assert not same_answer(gold=gold, answer=", ".join(map(str, values[:-1])), same_expression=never_equal)
    assert not same_answer(gold=gold, answer=", ".join(map(str, [*values, 100])), same_expression=never_equal)


def test_gold_and_answer_cannot_be_swapped_by_position() -> None:
    with pytest.raises(TypeError):
        same_answer("0<x<12.5", "(0,12.5)", never_equal)  # type: ignore[misc]  # that is the point
