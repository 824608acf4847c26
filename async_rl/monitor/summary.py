"""The end of a run, told in a page: what it learned, how stale its data was, where its time went."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from rich.console import Console, Group, RenderableType
from rich.panel import Panel
from rich.table import Table
from rich.text import Text

from async_rl.monitor.charts import bars, curve_with_axes, smooth
from async_rl.monitor.figures import RunFigures
from async_rl.monitor.metrics_file import MetricsHistory
from async_rl.monitor.text import count, number, seconds, share

WIDTH = 96
LAG_WIDTH = 32


@dataclass(frozen=True, slots=True)
class Accuracy:
    """A held-out figure with its standard error."""

    value: float
    standard_error: float

    def __str__(self) -> str:
        return f"{self.value:.3f} ± {self.standard_error:.3f}"


@dataclass(frozen=True, slots=True)
class Sample:
    """One held-out prompt, what the policy answered before and after, and the rewards."""

    prompt: str
    before: str
    reward_before: float
    after: str
    reward_after: float


@dataclass(frozen=True, slots=True)
class SummaryPage:
    """Everything on the page."""

    title: str
    figures: RunFigures
    max_lag: int
    """staleness.max_lag of the run."""
    history: MetricsHistory
    num_prompts: int
    start: Accuracy
    end: Accuracy
    samples: Sequence[Sample]
    places: Sequence[tuple[str, Path]]
    """What lies where."""
    next_commands: Sequence[tuple[str, str]]
    """(command, what it does)."""
    held_out: str = ""
    """The last evaluation beside training, if there was one."""


def print_summary(page: SummaryPage, console: Console) -> None:
    """Print the page, at most 100 columns wide."""
    width = min(WIDTH, console.width)
    console.print()
    console.print(
        Panel(_body(page, width - 4), title=f"[bold]{page.title}[/]", title_align="left", width=width, padding=(1, 1))
    )
    console.print(_next(page))


def _body(page: SummaryPage, width: int) -> RenderableType:
    headline = Text.assemble(
        "sampled accuracy  ",
        (str(page.start), "yellow"),
        "  →  ",
        (str(page.end), "bold green"),
        (f"   on {page.num_prompts} held-out prompts, T = 1", "dim"),
    )
    if page.held_out:
        headline.append(f"\nheld out, beside training  {page.held_out}")
    parts: list[RenderableType] = [headline, Text(), _curve(page, width), Text(), _middle(page, width), Text()]
    if page.samples:
        parts += [_samples(page.samples), Text()]
    parts.append(_places(page.places))
    return Group(*parts)


def _curve(page: SummaryPage, width: int) -> RenderableType:
    rewards = page.history.series("reward_mean")
    if not rewards:
        return Text("no optimizer step was logged", style="yellow")
    window = max(1, min(25, len(rewards) // 20))
    high = max(1.0, *rewards)
    lines = curve_with_axes(
        smooth(rewards, window), width=width, height=9, low=min(0.0, *rewards), high=high, x_label=f" step {len(rewards)}"
    )
    title = Text(f"reward while training (mean of {window} steps)", style="dim")
    return Group(title, *(Text(line, style="green", no_wrap=True) for line in lines))


def _middle(page: SummaryPage, width: int) -> RenderableType:
    """Figures on the left, the lag histogram on the right."""
    figures = page.figures
    left = Table.grid(padding=(0, 2))
    left.add_column(style="dim", no_wrap=True)
    left.add_column(no_wrap=True)
    for name, value in (
        ("steps", f"{figures.steps} in {seconds(figures.train_seconds)}"),
        ("trained", f"{count(figures.tokens_trained_per_s)} tokens/s"),
        ("idle", f"trainer {share(figures.trainer_idle_share)}, rollout {share(figures.rollout_idle_share)}"),
        ("push", f"{seconds(figures.push_p50_s)} (median of {figures.num_pushes})"),
        ("parity", f"{number(figures.parity_max_abs)} max over {figures.parity_tokens:,} tokens"),
        ("lag", f"mean {number(figures.lag_mean, 2)}, max {count(figures.lag_max)}{_masked_beyond(page)}"),
        ("dropped", f"{share(figures.dropped_share)} of trajectories"),
        ("masked", f"{share(figures.masked_share)} of trajectories"),
    ):
        left.add_row(name, value)
    histogram = bars(figures.lag_histogram, width=LAG_WIDTH - 15, label="lag")
    right = Group(
        Text("lag of trajectories, in steps", style="dim"), *(Text(line, style="cyan", no_wrap=True) for line in histogram)
    )
    table = Table.grid(padding=(0, 3))
    table.add_column(width=width - 3 - LAG_WIDTH)
    table.add_column()
    table.add_row(left, right)
    return table


def _masked_beyond(page: SummaryPage) -> str:
    """A trajectory's lag is that of its oldest token, masked or not: say so where it is above what may train."""
    highest, masked = page.figures.lag_max, page.figures.masked_share
    return f" (beyond {page.max_lag} masked)" if highest is not None and highest > page.max_lag and masked else ""


def _samples(samples: Sequence[Sample]) -> RenderableType:
    table = Table(box=None, padding=(0, 3, 0, 0), header_style="dim")
    for name in ("prompt", "before", "after"):
        table.add_column(name, no_wrap=True, overflow="ellipsis", max_width=32)
    for sample in samples:
        table.add_row(
            Text(sample.prompt), _answer(sample.before, sample.reward_before), _answer(sample.after, sample.reward_after)
        )
    return table


def _answer(text: str, reward: float) -> Text:
    right = reward > 0
    return Text.assemble(text, " ", ("✓" if right else "✗", "green" if right else "red"))


def _places(places: Sequence[tuple[str, Path]]) -> RenderableType:
    table = Table.grid(padding=(0, 2))
    table.add_column(style="dim", no_wrap=True)
    table.add_column(overflow="fold")
    for name, path in places:
        table.add_row(name, Text(str(path)))
    return table


def _next(page: SummaryPage) -> RenderableType:
    lines: list[RenderableType] = [Text("Try next")]
    for command, what in page.next_commands:
        lines += [Text(f"  {command}", style="bold", overflow="fold"), Text(f"      {what}", style="dim")]
    return Group(*lines)
