"""The built-in task with a tool: only who asks for the right key can answer."""

from __future__ import annotations

from itertools import islice

from msgspec.structs import replace

from async_rl.environments.base import Episode, TurnText
from async_rl.environments.look_up import LookUp
from async_rl.testing.builders import make_task
from protocol.messages import FinishReason

ENVIRONMENT = LookUp(length=4, sort=True)
ROW = ENVIRONMENT.row(5)
KEY, ANSWER = str(ROW.columns["key"]), str(ROW.columns["answer"])


def episode(*turns: str, observations: tuple[str, ...] = (), finish: FinishReason = FinishReason.STOP) -> Episode:
    task = replace(make_task(), prompt=ROW.prompt, columns=ROW.columns)
    return Episode(task, 0, tuple(TurnText(turn, finish) for turn in turns), observations)


async def test_the_right_key_gets_its_entry_and_another_gets_none() -> None:
    assert await ENVIRONMENT.observe(episode(f"*{KEY}")) == f"={ENVIRONMENT.entry(KEY)}>"
    assert await ENVIRONMENT.observe(episode("*0000" if KEY != "0000" else "*1111")) == "->"
    assert await ENVIRONMENT.observe(episode(ANSWER)) is None
    assert await ENVIRONMENT.observe(episode(f"*{KEY}", finish=FinishReason.LENGTH)) is None
    assert await ENVIRONMENT.observe(episode(f"*{KEY}", ANSWER, observations=("=1234>",))) is None


async def test_only_an_answer_after_a_call_counts() -> None:
    found = (f"={ENVIRONMENT.entry(KEY)}>",)
    assert (await ENVIRONMENT.score(episode(f"*{KEY}", ANSWER, observations=found))).value == 1.0
    assert (await ENVIRONMENT.score(episode(f"*{KEY}", "9" + ANSWER[1:], observations=found))).value == float(ANSWER[0] == "9")
    assert (await ENVIRONMENT.score(episode(ANSWER))).value == 0.0
    assert (await ENVIRONMENT.score(episode("*1", ANSWER, observations=("->",)))).value == 0.0


def test_rows_are_split_and_sorted_and_warm_up_shows_both_turns() -> None:
    held_out = {str(row.prompt) for row in ENVIRONMENT.held_out_rows(10**4)}
    assert len(held_out) == 1000
    assert not held_out & {str(ENVIRONMENT.row(index).prompt) for index in range(0, ENVIRONMENT.num_rows(), 97)}
    assert "".join(sorted(ENVIRONMENT.entry(KEY))) == ANSWER
    first, second = islice(ENVIRONMENT.warmup_pairs(2, seed=0), 2)
    assert first[1] == f"*{first[0][:-1]}"
    key = second[0][:4]
    assert second == (f"{key}>*{key}<eos>={ENVIRONMENT.entry(key)}>", "".join(sorted(ENVIRONMENT.entry(key))))
