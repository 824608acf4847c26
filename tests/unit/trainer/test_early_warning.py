from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from async_rl.trainer.early_warning import STEPS_IN_A_ROW, THRESHOLDS, EarlyWarning

PAGE = Path(__file__).parents[3] / "docs/algorithms.md"
FINE: dict[str, Any] = {
    "kl_behavior_k3": 0.001,
    "ess_token": 0.99,
    "ess_sequence": 0.8,
    "clipped_share": 0.02,
    "truncated_share": 0.0,
    "importance_masked_share": 0.0,
    "clamped_tokens": 0.0,
    "entropy": 0.8,
    "skip_reason": None,
}


def test_it_warns_once_after_some_steps_in_a_row_and_again_only_after_a_recovery() -> None:
    watch = EarlyWarning()
    bad = {**FINE, "kl_behavior_k3": 0.05}
    said = [[w.figure for w in watch.look(line)] for line in [bad] * 5 + [FINE] + [bad] * 4]
    assert said == [[], [], ["kl_behavior_k3"], [], [], [], [], [], ["kl_behavior_k3"], []]


def test_a_step_that_changed_nothing_neither_counts_nor_recovers() -> None:
    watch = EarlyWarning()
    bad = {**FINE, "ess_token": 0.2}
    skipped = {**FINE, "skip_reason": "no_tokens"}
    said = [bool(watch.look(line)) for line in (bad, bad, skipped, bad)]
    assert said == [False, False, False, True]


@pytest.mark.parametrize("threshold", THRESHOLDS, ids=lambda threshold: threshold.figure)
def test_every_threshold_warns_on_its_own_side_and_says_what_to_do(threshold: Any) -> None:
    watch = EarlyWarning()
    beyond = threshold.bound + 0.01 if threshold.is_upper else threshold.bound - 0.01
    for _ in range(STEPS_IN_A_ROW - 1):
        assert watch.look({**FINE, threshold.figure: beyond}) == []
    (warning,) = watch.look({**FINE, threshold.figure: beyond})
    assert (warning.figure, warning.value, warning.bound) == (threshold.figure, beyond, threshold.bound)
    assert warning.advice == threshold.advice
    assert EarlyWarning().look({**FINE, threshold.figure: None}) == []


def test_the_documentation_names_every_threshold_with_its_bound() -> None:
    text = PAGE.read_text(encoding="utf-8")
    for threshold in THRESHOLDS:
        sign = ">" if threshold.is_upper else "<"
        assert f"| `{threshold.figure}` | {sign} {threshold.bound:g} |" in text
