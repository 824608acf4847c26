"""What a run looks like while it goes on, and afterwards."""

from __future__ import annotations

import io
import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from async_rl.monitor.figures import RunFigures
from async_rl.monitor.metrics_file import MetricsHistory
from async_rl.monitor.roles import RoleState
from async_rl.monitor.summary import Accuracy, Sample, SummaryPage, print_summary
from async_rl.monitor.terminal import LivePanel, PlainLines, RunView, progress_display
from async_rl.run_dir.layout import RunLayout, create_run

RUNNING = [RoleState("trainer", 11, None), RoleState("rollout-0", 12, None)]


@pytest.fixture
def layout(tmp_path: Path) -> RunLayout:
    return create_run(tmp_path / "run")[0]


def line(step: int, **more: Any) -> str:
    return json.dumps({"record": step, "step": step, "seconds": step * 0.5, "reward_mean": 0.5, "lag_mean": 1.0, **more}) + "\n"


class Screen:
    def __init__(self, *, terminal: bool, width: int = 100) -> None:
        self.file = io.StringIO()
        self.console = Console(file=self.file, force_terminal=terminal, width=width, color_system=None, legacy_windows=False)

    @property
    def text(self) -> str:
        return self.file.getvalue()


class Clock:
    def __init__(self) -> None:
        self.now_s = 0.0

    def __call__(self) -> float:
        return self.now_s


def view(layout: RunLayout) -> RunView:
    return RunView(layout, title="t", max_steps=10, max_lag=4)


def test_a_terminal_gets_the_panel_and_a_file_gets_lines(layout: RunLayout) -> None:
    terminal = progress_display(layout, title="t", max_steps=10, max_lag=4, console=Screen(terminal=True).console)
    file = progress_display(layout, title="t", max_steps=10, max_lag=4, console=Screen(terminal=False).console)
    assert isinstance(terminal, LivePanel)
    assert isinstance(file, PlainLines)


def test_plain_lines_come_every_few_seconds_and_never_twice_the_same(layout: RunLayout) -> None:
    screen, clock = Screen(terminal=False), Clock()
    display = PlainLines(screen.console, view(layout), every_s=5.0, now=clock)
    layout.metrics_jsonl.write_text(line(1))
    display.update(RUNNING)
    assert screen.text == ""
    clock.now_s = 5.0
    display.update(RUNNING)
    clock.now_s = 10.0
    display.update(RUNNING)
    assert screen.text.count("step 1/10") == 1
    layout.metrics_jsonl.write_text(line(1) + line(2, reward_mean=1.0))
    display.close()
    assert "step 2/10 · reward 0.750" in screen.text


def test_plain_lines_say_when_a_role_ends(layout: RunLayout) -> None:
    screen = Screen(terminal=False)
    display = PlainLines(screen.console, view(layout))
    display.update(RUNNING)
    ended = [RoleState("trainer", 11, 3), RoleState("rollout-0", 12, None)]
    display.update(ended)
    display.update(ended)
    assert screen.text == "trainer: failed (3)\n"


@pytest.mark.parametrize(
    ("code", "label"),
    [(None, "running"), (0, "done"), (1, "failed (1)"), (139, "failed (139)"), (143, "stopped"), (137, "killed")],
)
def test_a_role_that_was_told_to_stop_did_not_fail(code: int | None, label: str) -> None:
    assert RoleState("trainer", 11, code).label == label


def test_the_panel_shows_everything_within_its_width(layout: RunLayout) -> None:
    layout.metrics_jsonl.write_text(
        line(1)
        + line(
            2,
            lag_max=3,
            tokens_per_s=2410.0,
            groups_dropped=5,
            tokens_masked_share=0.25,
            pushes=[{"version": 1, "seconds": {"total": 0.04}}],
            trainer_idle_share=0.125,
            loss=-0.01,
            grad_norm=0.5,
        )
    )
    screen = Screen(terminal=False, width=120)
    screen.console.print(view(layout).panel(RUNNING, 100))
    for part in (
        "step 2/10",
        "0.500",
        "mean 1.0, max 3 of 4",
        "2,410",
        "40 ms",
        "12.5 %",
        "● trainer",
        "discarded 5",
        "25.0 %",
    ):
        assert part in screen.text, part
    assert max(len(shown.rstrip()) for shown in screen.text.splitlines()) <= 100


@pytest.mark.parametrize(
    ("lag_max", "masked", "said"),
    [(4, 9, "max 4 of 4 allowed"), (6, 9, "max 6 (tokens beyond 4 masked)"), (6, 0, "max 6 of 4 allowed")],
    ids=["within", "beyond, masked", "of an earlier, larger bound"],
)
def test_a_lag_above_the_bound_is_explained_by_masked_tokens(layout: RunLayout, lag_max: int, masked: int, said: str) -> None:
    layout.metrics_jsonl.write_text(line(1, lag_max=lag_max, tokens_masked=masked, tokens_masked_share=masked / 100))
    screen = Screen(terminal=False, width=120)
    screen.console.print(view(layout).panel(RUNNING, 100))
    assert said in screen.text


@pytest.mark.parametrize(
    ("restarts", "said"), [(0, "● trainer  ●"), (1, "● trainer (restarted once)"), (3, "(restarted 3 times)")]
)
def test_the_panel_counts_restarts_in_words(layout: RunLayout, restarts: int, said: str) -> None:
    screen = Screen(terminal=False, width=120)
    roles = [RoleState("trainer", 11, None, restarts), RoleState("rollout-0", 12, None)]
    screen.console.print(view(layout).panel(roles, 100))
    assert said in screen.text


def test_a_run_that_is_over_has_nothing_to_stop(layout: RunLayout) -> None:
    screen = Screen(terminal=True)
    display = LivePanel(screen.console, view(layout))
    display.update(RUNNING)
    assert "Ctrl-C stops" in screen.text
    drawn = len(screen.text)
    display.close()
    assert "async-rl" in screen.text[drawn:]
    assert "Ctrl-C" not in screen.text[drawn:]


def test_the_panel_has_something_to_say_before_the_first_step(layout: RunLayout) -> None:
    screen = Screen(terminal=True)
    display = LivePanel(screen.console, view(layout))
    display.update([])
    display.close()
    assert "starting" in screen.text


FIGURES = RunFigures(
    steps=2,
    train_seconds=100.0,
    lag_mean=1.25,
    lag_max=3,
    dropped_share=0.05,
    masked_share=0.0,
    push_p50_s=0.04,
    trainer_idle_share=0.2,
    rollout_idle_share=0.1,
    parity_max_abs=2e-6,
    parity_tokens=1200,
    tokens_trained_per_s=2000.0,
    lag_histogram={0: 1, 1: 3},
    num_pushes=2,
)


@pytest.mark.parametrize("width", [100, 80])
def test_the_summary_fits_the_terminal_and_tells_all_of_it(layout: RunLayout, width: int) -> None:
    layout.metrics_jsonl.write_text(line(1) + line(2))
    history = MetricsHistory(layout.metrics_jsonl)
    history.refresh()
    page = SummaryPage(
        title="sort_digits",
        figures=FIGURES,
        max_lag=4,
        history=history,
        num_prompts=512,
        start=Accuracy(0.4, 0.02),
        end=Accuracy(0.95, 0.01),
        samples=[Sample("402913>", "01234", 0.0, "012349", 1.0)],
        places=[("model", Path("runs/demo/trained"))],
        next_commands=[("async-rl show runs/demo", "a trajectory")],
        held_out="step 800: pass@1 0.944 [0.921, 0.961] on 256 prompts",
    )
    screen = Screen(terminal=False, width=width)
    print_summary(page, screen.console)
    for part in (
        "0.400 ± 0.020",
        "0.950 ± 0.010",
        "512 held-out",
        "mean 1.25, max 3",
        "5.0 %",
        "40 ms",
        "2.0e-06",
        "012349 ✓",
        "01234 ✗",
        "pass@1 0.944 [0.921, 0.961]",
    ):
        assert part in screen.text, part
    assert "async-rl show runs/demo" in screen.text
    assert max(len(shown.rstrip()) for shown in screen.text.splitlines()) <= width


def plain_page(figures: RunFigures, history: MetricsHistory) -> SummaryPage:
    nothing = Accuracy(0.0, 0.0)
    return SummaryPage(
        title="t",
        figures=figures,
        max_lag=4,
        history=history,
        num_prompts=1,
        start=nothing,
        end=nothing,
        samples=[],
        places=[],
        next_commands=[],
    )


def test_a_run_without_a_step_has_a_summary_too(layout: RunLayout) -> None:
    page = plain_page(FIGURES, MetricsHistory(layout.metrics_jsonl))
    screen = Screen(terminal=False)
    print_summary(page, screen.console)
    assert "no optimizer step was logged" in screen.text


@pytest.mark.parametrize(
    ("highest", "masked", "told"),
    [(3, 0.1, "max 3"), (6, 0.1, "max 6 (beyond 4 masked)"), (6, 0.0, "max 6"), (None, 0.0, "max –")],
)
def test_the_summary_explains_a_lag_above_what_may_train(
    layout: RunLayout, highest: int | None, masked: float, told: str
) -> None:
    layout.metrics_jsonl.write_text(line(1) + line(2))
    history = MetricsHistory(layout.metrics_jsonl)
    history.refresh()
    page = plain_page(replace(FIGURES, lag_max=highest, masked_share=masked), history)
    screen = Screen(terminal=False)
    print_summary(page, screen.console)
    assert f"mean 1.25, {told}" in screen.text
    assert ("beyond" in screen.text) == ("beyond" in told)
