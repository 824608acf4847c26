"""Charts for the terminal and as PNG."""

from __future__ import annotations

from pathlib import Path

import pytest

from async_rl.monitor.charts import bars, braille_curve, curve_with_axes, resample, smooth, sparkline, write_reward_png
from async_rl.monitor.text import count, number, seconds, share
from async_rl.run_dir.evaluations import Estimate, Evaluation, EvaluationFigures


def test_a_sparkline_spans_its_range() -> None:
    assert sparkline([0.0, 0.5, 1.0], 10) == "▁▅█"
    assert sparkline([0.0, 0.5, 1.0], 10, low=0.0, high=2.0) == "▁▃▅"
    assert sparkline([0.3, 0.3], 10) == "▁▁"
    assert sparkline([], 10) == ""


def test_resampling_averages_even_pieces() -> None:
    assert resample([1.0, 3.0, 5.0, 7.0], 2) == [2.0, 6.0]
    assert resample([1.0, 3.0], 5) == [1.0, 3.0]


def test_smoothing_looks_back_only() -> None:
    assert smooth([1.0, 2.0, 6.0, 10.0], 2) == [1.0, 1.5, 4.0, 8.0]
    assert smooth([5.0], 4) == [5.0]


def test_a_curve_puts_low_values_at_the_bottom_and_high_ones_at_the_top() -> None:
    flat_low = braille_curve([0.0, 0.0], width=1, height=2, low=0.0, high=1.0)
    flat_high = braille_curve([1.0, 1.0], width=1, height=2, low=0.0, high=1.0)
    assert flat_low == ["\u2800", "\u28c0"]  # dots 7 and 8, the lowest row of the lower cell
    assert flat_high == ["\u2809", "\u2800"]  # dots 1 and 4, the highest row of the upper cell
    rising = braille_curve([0.0, 1.0], width=1, height=1, low=0.0, high=1.0)
    assert rising == [chr(0x2800 + 0x40 + 0x08 + 0x10 + 0x20 + 0x80)]  # left dot at the bottom, right column joined to it


def test_values_outside_the_range_stay_on_the_chart() -> None:
    assert braille_curve([-5.0, 7.0], width=1, height=1, low=0.0, high=1.0) != ["\u2800"]


def test_axes_fit_the_width() -> None:
    lines = curve_with_axes([0.1, 0.9], width=40, height=5, low=0.0, high=1.0, x_label=" step 2")
    assert [len(line) for line in lines] == [40] * 6
    assert lines[0].startswith("1.00 ┤")
    assert lines[4].startswith("0.00 ┤")


def test_bars_show_every_lag_up_to_the_largest_with_its_share() -> None:
    lines = bars({0: 1, 2: 3}, width=4, label="lag")
    assert [line.split()[1] for line in lines] == ["0", "1", "2"]
    assert [line.split()[-1] for line in lines] == ["25.0%", "0.0%", "75.0%"]
    assert "████" in lines[2]
    assert bars({}, width=4, label="lag") == []


def evaluated(step: int, share: float) -> Evaluation:
    estimate = Estimate(share, max(0.0, share - 0.1), min(1.0, share + 0.1), 20)
    figures = EvaluationFigures(20, 40, 0, {1: estimate}, share, 3.0, 0.0)
    return Evaluation(step, 0.0, 1.0, 1.0, figures)


@pytest.mark.parametrize("rewards", [[], [0.5], [-1.0, 2.0, 0.5]])
def test_the_png_is_written_for_any_number_of_steps(tmp_path: Path, rewards: list[float]) -> None:
    path = tmp_path / "reward.png"
    evaluations = [evaluated(0, 0.0), evaluated(2, 1.0)] if rewards else []
    lags = {0: 2, 1: 1}
    write_reward_png(path, steps=range(len(rewards)), rewards=rewards, lag_histogram=lags, title="t", evaluations=evaluations)
    assert path.read_bytes().startswith(b"\x89PNG")


def test_numbers_read_well() -> None:
    assert (share(0.1234), share(None)) == ("12.3 %", "–")
    assert [seconds(value) for value in (0.038, 4.2, 38.0, 187.0, 7387.0)] == ["38 ms", "4.20 s", "38 s", "3:07", "2:03:07"]
    assert (number(0.12345), number(2e-6), number(0.0), number(None)) == ("0.123", "2.0e-06", "0.000", "–")
    assert count(2410.4) == "2,410"
