"""A run on the terminal while it goes on: a live panel where there is one, plain lines where there is not."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence

from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.panel import Panel
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from async_rl.monitor.charts import sparkline
from async_rl.monitor.figures import rollout_idle_share
from async_rl.monitor.metrics_file import MetricsHistory, StepMetrics
from async_rl.monitor.roles import Display, RoleState
from async_rl.monitor.text import count, number, seconds, share
from async_rl.run_dir.layout import RunLayout

MAX_WIDTH = 100
RECENT = 10  # steps that "now" is averaged over


def progress_display(layout: RunLayout, *, title: str, max_steps: int, max_lag: int, console: Console | None = None) -> Display:
    """The live panel on a terminal, plain lines elsewhere."""
    console = console or Console()
    view = RunView(layout, title=title, max_steps=max_steps, max_lag=max_lag)
    return LivePanel(console, view) if console.is_terminal else PlainLines(console, view)


class RunView:
    """What there is to see of a run, now."""

    def __init__(
        self, layout: RunLayout, *, title: str, max_steps: int, max_lag: int, now: Callable[[], float] = time.monotonic
    ) -> None:
        self._layout = layout
        self._title = title
        self._max_steps = max_steps
        self._max_lag = max_lag
        self._now = now
        self._started = now()
        self._first_step: int | None = None
        self.history = MetricsHistory(layout.metrics_jsonl)
        self.history.refresh()
        self._steps_before = len(self.history.steps)

    def line(self) -> str:
        """One line: `step 120/800 · reward 0.71 · lag 1.2 (max 3) · 2,410 tokens/s · push 38 ms · idle trainer 12 %`."""
        last = self.history.last()
        if last is None:
            return f"starting (model, engine, first weight push), {seconds(self._now() - self._started)}"
        return (
            f"step {last.step}/{self._max_steps} · reward {number(self._recent('reward_mean'))} · "
            f"lag {number(self._recent('lag_mean'), 1)} (max {count(self._maximum('lag_max'))}) · "
            f"{count(self._recent('tokens_per_s'))} tokens/s · push {seconds(self._push_s())} · "
            f"idle trainer {share(self._recent('trainer_idle_share'))}, rollout {share(rollout_idle_share(self._layout))}"
        )

    def panel(self, roles: Sequence[RoleState], width: int, *, over: bool = False) -> RenderableType:
        """The whole picture, `width` columns wide. over: the run has ended, there is nothing left to stop."""
        last = self.history.last()
        rows = Table.grid(padding=(0, 2))
        rows.add_column(style="dim", no_wrap=True)
        rows.add_column(no_wrap=True, overflow="ellipsis")
        for name, text in self._rows(last):
            rows.add_row(name, text)
        rows.add_row("roles", _roles(roles))
        body = Group(self._progress(last, width - 4), Text(), rows)
        title = f"[bold]async-rl[/] [dim]{self._title}[/]"
        hint = None if over else "[dim]Ctrl-C stops; --resume goes on[/]"
        return Panel(body, title=title, title_align="left", subtitle=hint, width=width)

    def _progress(self, last: StepMetrics | None, width: int) -> RenderableType:
        step = last.step if last else 0
        grid = Table.grid(expand=True, padding=(0, 1))
        grid.add_column(ratio=1)
        grid.add_column(justify="right", no_wrap=True)
        elapsed = self._now() - self._started
        done = len(self.history.steps) - self._steps_before
        left = (
            f", about {seconds(elapsed / done * (self._max_steps - step))} left" if done >= 5 and step < self._max_steps else ""
        )
        grid.add_row(
            ProgressBar(total=self._max_steps, completed=step, pulse=last is None, animation_time=self._now()),
            f"step {step}/{self._max_steps}  [dim]{seconds(elapsed)}{left}[/]",
        )
        del width
        return grid

    def _rows(self, last: StepMetrics | None) -> Sequence[tuple[str, RenderableType]]:
        if last is None:
            return [("state", Text("starting: model, engine, first weight push …"))]
        rewards = self.history.series("reward_mean")
        high = max(1.0, *rewards) if rewards else 1.0
        curve = sparkline(rewards, 60, low=min(0.0, *rewards) if rewards else 0.0, high=high)
        return [
            ("reward", Text.assemble((f"{number(self._recent('reward_mean'))}  ", "bold green"), (curve, "green"))),
            ("lag", self._lag()),
            (
                "speed",
                Text(
                    f"{count(self._recent('tokens_per_s'))} trained tokens/s, {seconds(self._step_s())} a step, "
                    f"push {seconds(self._push_s())}"
                ),
            ),
            (
                "idle",
                Text(f"trainer {share(self._recent('trainer_idle_share'))}, rollout {share(rollout_idle_share(self._layout))}"),
            ),
            (
                "loss",
                Text(
                    f"{number(last.get('loss'))}, gradient norm {number(last.get('grad_norm'))}, "
                    f"entropy {number(last.get('entropy'))}"
                ),
            ),
        ]

    def _lag(self) -> Text:
        last = self.history.last()
        discarded = count(None if last is None else last.get("groups_dropped"))
        highest = self._maximum("lag_max")
        bound = f" of {self._max_lag} allowed"
        if highest is not None and highest > self._max_lag and self._maximum("tokens_masked"):
            bound = f" (tokens beyond {self._max_lag} masked)"  # a trajectory's lag is that of its oldest token, masked or not
        text = f"mean {number(self._recent('lag_mean'), 1)}, max {count(highest)}{bound}"
        return Text(f"{text}; groups discarded {discarded}; tokens masked {share(self._recent('tokens_masked_share'))}")

    def _recent(self, key: str) -> float | None:
        values = [value for step in self.history.steps[-RECENT:] if (value := step.get(key)) is not None]
        return sum(values) / len(values) if values else None

    def _maximum(self, key: str) -> float | None:
        return max(self.history.series(key), default=None)

    def _step_s(self) -> float | None:
        recent = self.history.steps[-RECENT:]
        return (recent[-1].seconds - recent[0].seconds) / (len(recent) - 1) if len(recent) > 1 else None

    def _push_s(self) -> float | None:
        recent = [push.seconds for push in self.history.pushes()[-RECENT:] if push.seconds is not None]
        return sum(recent) / len(recent) if recent else None


def _roles(roles: Sequence[RoleState]) -> Text:
    text = Text()
    for role in roles:
        color = {"running": "green", "done": "dim", "stopped": "dim", "drained": "dim", "restarting": "yellow"}.get(
            role.label, "red"
        )
        text.append("● ", style=color).append(f"{role.name} ")
        if role.restarts:
            times = "once" if role.restarts == 1 else f"{role.restarts} times"
            text.append(f"(restarted {times}) ", style="yellow")
        if role.label != "running":
            text.append(f"{role.label} ", style=color)
        text.append(" ")
    return text


class LivePanel:
    """Redraws the panel twice a second, from the caller's thread."""

    def __init__(
        self, console: Console, view: RunView, *, every_s: float = 0.5, now: Callable[[], float] = time.monotonic
    ) -> None:
        self._console = console
        self._view = view
        self._every_s = every_s
        self._now = now
        self._next = 0.0
        self._roles: Sequence[RoleState] = ()
        self._live = Live(console=console, auto_refresh=False, transient=False)
        self._started = False

    def note(self, text: str) -> None:
        self._console.print(Text(text, style="yellow"))

    def update(self, roles: Sequence[RoleState]) -> None:
        self._roles = roles
        if self._now() >= self._next:
            self._next = self._now() + self._every_s
            self._draw()

    def close(self) -> None:
        self._draw(over=True)
        self._live.stop()

    def _draw(self, *, over: bool = False) -> None:
        if not self._started:
            self._live.start()
            self._started = True
        self._view.history.refresh()
        self._live.update(self._view.panel(self._roles, min(MAX_WIDTH, self._console.width), over=over), refresh=True)


class PlainLines:
    """A line every few seconds, and whenever a role ends."""

    def __init__(
        self, console: Console, view: RunView, *, every_s: float = 5.0, now: Callable[[], float] = time.monotonic
    ) -> None:
        self._console = console
        self._view = view
        self._every_s = every_s
        self._now = now
        self._next = now() + every_s
        self._ended: set[str] = set()
        self._last = ""

    def note(self, text: str) -> None:
        self._print(text)

    def update(self, roles: Sequence[RoleState]) -> None:
        for role in roles:
            if role.exit_code is None:
                self._ended.discard(role.name)
            elif not role.waiting and role.name not in self._ended:
                self._ended.add(role.name)
                self._print(f"{role.name}: {role.label}")
        if self._now() >= self._next:
            self._next = self._now() + self._every_s
            self._show()

    def close(self) -> None:
        self._show()

    def _show(self) -> None:
        self._view.history.refresh()
        line = self._view.line()
        if line != self._last:
            self._last = line
            self._print(line)

    def _print(self, text: str) -> None:
        self._console.print(text, markup=False, highlight=False, soft_wrap=True)
