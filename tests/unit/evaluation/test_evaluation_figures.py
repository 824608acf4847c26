from __future__ import annotations

import pytest

from async_rl.evaluation.figures import PromptResult, figures


def test_what_could_not_be_scored_is_in_no_figure_but_its_own() -> None:
    results = [
        PromptResult("a", "s", (1.0, None, 0.0), (5, 900, 3), (False, True, True)),
        PromptResult("b", "s", (None, None, None), (900, 900, 900), (True, True, True)),
    ]
    found = figures(results, (1, 2, 3), success=1.0)
    assert (found.prompts, found.samples, found.num_invalid) == (2, 2, 4)
    assert (found.reward_mean, found.tokens_mean, found.truncated_share) == (0.5, 4.0, 0.5)
    assert set(found.pass_at) == {1, 2}  # no prompt has three valid completions
    assert (found.pass_at[1].value, found.pass_at[2].value) == (pytest.approx(0.5), pytest.approx(1.0))


def test_a_reward_passes_from_the_threshold_on() -> None:
    results = [PromptResult("a", "s", (0.9, 0.5, 0.89), (1, 1, 1), (False, False, False))]
    assert figures(results, (1,), success=0.9).pass_at[1].value == pytest.approx(1 / 3)


def test_nothing_scored_is_no_zero() -> None:
    found = figures([PromptResult("a", "s", (None,), (1,), (False,))], (1,), success=1.0)
    assert (dict(found.pass_at), found.reward_mean, found.tokens_mean) == ({}, None, None)
