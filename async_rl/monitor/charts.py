"""Charts of a run: a curve of braille dots and bars for the terminal, and the same as a PNG."""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from async_rl.run_dir.evaluations import Evaluation

BLOCKS = "▁▂▃▄▅▆▇█"
_DOT = ((0x01, 0x08), (0x02, 0x10), (0x04, 0x20), (0x40, 0x80))  # braille bits by row and column of a cell


def sparkline(values: Sequence[float], width: int, *, low: float | None = None, high: float | None = None) -> str:
    """The values, averaged into at most `width` columns, as blocks between `low` and `high` (their own range if not given)."""
    columns = resample(values, width)
    if not columns:
        return ""
    bottom = min(columns) if low is None else low
    span = (max(columns) if high is None else high) - bottom
    if span <= 0:
        return BLOCKS[0] * len(columns)
    return "".join(BLOCKS[min(7, max(0, int((value - bottom) / span * 8)))] for value in columns)


def resample(values: Sequence[float], count: int) -> list[float]:
    """Means of at most `count` even pieces of the values, in order."""
    if len(values) <= count:
        return list(values)
    edges = [index * len(values) // count for index in range(count + 1)]
    return [sum(values[start:end]) / (end - start) for start, end in itertools.pairwise(edges)]


def smooth(values: Sequence[float], window: int) -> list[float]:
    """Mean of the last `window` values at every position (fewer at the start)."""
    smoothed: list[float] = []
    total = 0.0
    for index, value in enumerate(values):
        total += value - (values[index - window] if index >= window else 0.0)
        smoothed.append(total / min(index + 1, window))
    return smoothed


def braille_curve(values: Sequence[float], *, width: int, height: int, low: float, high: float) -> list[str]:
    """Lines of `width` cells, top first; each cell holds 2 × 4 dots. Neighbouring dots are joined vertically."""
    columns = resample(values, width * 2)
    if not columns or high <= low:
        return [" " * width for _ in range(height)]
    rows = height * 4
    stretch = (len(columns) - 1) / max(1, width * 2 - 1)
    cells = [[0] * width for _ in range(height)]
    previous: int | None = None
    for x in range(width * 2):
        value = columns[round(x * stretch)]
        share = min(1.0, max(0.0, (value - low) / (high - low)))
        y = rows - 1 - round(share * (rows - 1))
        for dot in range(min(y, y if previous is None else previous), max(y, y if previous is None else previous) + 1):
            cells[dot // 4][x // 2] |= _DOT[dot % 4][x % 2]
        previous = y
    return ["".join(chr(0x2800 + cell) for cell in line) for line in cells]


def curve_with_axes(values: Sequence[float], *, width: int, height: int, low: float, high: float, x_label: str) -> list[str]:
    """A braille curve with its scale on the left and `x_label` below (one line more than `height`)."""
    lines = braille_curve(values, width=width - 6, height=height, low=low, high=high)
    labelled: list[str] = []
    for row, line in enumerate(lines):
        at = high - (high - low) * row / max(1, height - 1)
        labelled.append(f"{at:4.2f} ┤{line}" if row % 2 == 0 or row == height - 1 else f"     │{line}")
    return [*labelled, f"     └{x_label:─>{width - 6}}"]


def bars(histogram: Mapping[int, int], *, width: int, label: str) -> list[str]:
    """One line per key from 0 on: `lag 2  ████ 31.0 %`."""
    total = sum(histogram.values())
    if not total:
        return []
    lines: list[str] = []
    largest = max(histogram.values())
    for key in range(max(histogram) + 1):
        count = histogram.get(key, 0)
        eighths = round(count / largest * width * 8)
        bar = "█" * (eighths // 8) + ("", "▏", "▎", "▍", "▌", "▋", "▊", "▉")[eighths % 8]
        lines.append(f"{label} {key}  {bar:<{width}} {count / total:6.1%}")
    return lines


def write_reward_png(
    path: Path,
    *,
    steps: Sequence[int],
    rewards: Sequence[float],
    lag_histogram: Mapping[int, int],
    title: str,
    evaluations: Sequence[Evaluation] = (),
) -> None:
    """Reward over optimizer steps (each step, and a moving mean) beside the lags of what was trained; held-out pass@k, if it
    was measured, with its 95 % intervals."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg  # a second to import: only where a PNG is made
    from matplotlib.figure import Figure

    figure = Figure(figsize=(10, 4), dpi=120, layout="constrained")
    FigureCanvasAgg(figure)
    curve, lags = figure.subplots(1, 2, width_ratios=(3, 1))
    window = max(1, min(25, math.ceil(len(rewards) / 20)))
    curve.plot(steps, rewards, color="#9db8d9", linewidth=0.8, label="per step")
    curve.plot(steps, smooth(rewards, window), color="#1f4e8c", linewidth=2, label=f"mean of {window} steps")
    _add_evaluations(curve, evaluations)
    curve.set(xlabel="optimizer step", ylabel="mean reward", title=title)
    curve.set_ylim(min(0.0, *rewards) if rewards else 0.0, max(1.0, *rewards) if rewards else 1.0)
    curve.grid(alpha=0.25)
    curve.legend(loc="lower right", frameon=False)
    total = sum(lag_histogram.values()) or 1
    lags.bar(list(lag_histogram), [count / total for count in lag_histogram.values()], color="#1f4e8c", width=0.7)
    lags.set(xlabel="lag (optimizer steps)", ylabel="share of trajectories", title="staleness")
    lags.set_xticks(list(lag_histogram))
    for axes in (curve, lags):
        axes.spines[["top", "right"]].set_visible(False)
    figure.savefig(path)


def _add_evaluations(axes: Any, evaluations: Sequence[Evaluation]) -> None:
    """One line per k. Axes of matplotlib."""
    colors = ("#c2571a", "#4d8b31", "#7a3e9d", "#555555")
    for number, k in enumerate(sorted({k for evaluation in evaluations for k in evaluation.total.pass_at})):
        points = [(e.step, e.total.pass_at[k]) for e in evaluations if k in e.total.pass_at]
        values = [estimate.value for _, estimate in points]
        below = [estimate.value - estimate.low for _, estimate in points]
        above = [estimate.high - estimate.value for _, estimate in points]
        axes.errorbar(
            [step for step, _ in points],
            values,
            yerr=[below, above],
            color=colors[number % len(colors)],
            marker="o",
            markersize=4,
            linewidth=1.2,
            capsize=3,
            label=f"held out, pass@{k}",
        )
