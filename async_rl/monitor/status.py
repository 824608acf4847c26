"""`async-rl status`: a snapshot as text for people."""

from __future__ import annotations

import socket
import time
from collections.abc import Collection, Iterable, Iterator, Sequence

from rich.console import Console
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

from async_rl.monitor.metrics_file import StepMetrics
from async_rl.monitor.snapshot import LiveSnapshot, RunSnapshot
from async_rl.monitor.text import count, number, program, seconds, share
from async_rl.run_dir.evaluations import Estimate, Evaluation
from protocol.streams import WorkerLease

NAME_WIDTH = len("checkpoints")
INDENT = (0, 0, 0, 2)

STATE_STYLES = {
    "running": "bold green",
    "completed": "green",
    "interrupted": "yellow",
    "failed": "bold red",
    "died": "bold red",
}


def print_status(snapshot: RunSnapshot, console: Console) -> None:
    """Print state, steps, last metrics and checkpoint; and, of a living run, what its server knows."""
    console.print(_facts(_rows(snapshot)))
    if snapshot.live is not None:
        console.print(Text())
        console.print(_facts(_live_rows(snapshot.live)))
        console.print(Text())
        console.print(Padding(_queue_table(snapshot.live), INDENT))
        console.print(Text())
        console.print(Padding(_worker_table(snapshot.live), INDENT))
        console.print(Text())
    elif snapshot.live_error:
        console.print(Text(f"the server does not answer: {snapshot.live_error}", style="yellow"))
    console.print(Text(f"next: {next_step(snapshot)}", style="dim"))


def _facts(rows: Iterable[tuple[str, Text]]) -> Table:
    table = Table.grid(padding=(0, 2))
    table.add_column(style="dim", no_wrap=True, min_width=NAME_WIDTH)
    table.add_column(overflow="fold")
    for name, value in rows:
        table.add_row(name, value)
    return table


def _live_rows(live: LiveSnapshot) -> Iterator[tuple[str, Text]]:
    counters = live.counters
    tasks = f"{counters.issued:,} tasks issued, {counters.outstanding:,} outstanding, {counters.discarded:,} discarded"
    yield "queue", Text(f"{counters.state}, epoch {counters.epoch}: {tasks}")
    announced = "none" if live.announced_version is None else str(live.announced_version)
    yield "policy", Text(f"newest version {announced}")


def next_step(snapshot: RunSnapshot) -> str:
    """The command that makes sense now."""
    root = snapshot.layout.root
    if snapshot.state == "created":
        return f"{program()} run CONFIG --run_dir={root} --overwrite"
    if snapshot.state == "running":
        return f"tail -f {snapshot.layout.events_jsonl}"
    if snapshot.state == "completed":
        return f"{program()} export {root} --to DIR"
    if snapshot.layout.evaluation_start_json.exists():
        return f"{program()} demo --run_dir={root} --resume"
    return f"{program()} run {snapshot.layout.config_toml} --resume"


def _rows(snapshot: RunSnapshot) -> Iterator[tuple[str, Text]]:
    yield "run", Text(f"{snapshot.identity.run_id}  ({snapshot.layout.root})")
    state = Text(snapshot.state, style=STATE_STYLES.get(snapshot.state, ""))
    if snapshot.supervisor_pid is not None:
        state.append(f"  supervised by process {snapshot.supervisor_pid}", style="dim")
    if snapshot.reason:
        state.append(f"  {snapshot.reason}", style="default")
    yield "state", state
    yield "steps", Text(f"{snapshot.steps} of {count(snapshot.max_steps)} in {seconds(snapshot.train_seconds)}")
    if snapshot.last is not None:
        yield from _last_step(snapshot.last)
    if snapshot.evaluations:
        yield "held out", Text(held_out_line(snapshot.evaluations))
    for name, health in snapshot.health.items():
        times = "once" if health.failures == 1 else f"{health.failures} times"
        when = time.strftime("%H:%M:%S", time.localtime(health.failed_at_s))
        then = "given up" if health.given_up else "started again"
        yield name, Text(f"failed {times}, last at {when} ({health.reason}); {then}", style="yellow")
    if snapshot.checkpoints:
        kept = ", ".join(map(str, snapshot.checkpoints))
        yield "checkpoints", Text(f"of steps {kept} in {snapshot.layout.checkpoints_dir}")
    else:
        yield "checkpoints", Text("none yet")


def held_out_line(evaluations: Sequence[Evaluation]) -> str:
    """The last evaluation, beside the first: pass@k with intervals, and by source if there are several."""
    last = evaluations[-1]
    parts = [f"pass@{k} {_estimate(estimate)}" for k, estimate in last.total.pass_at.items()]
    line = f"step {last.step}: {', '.join(parts) or 'nothing could be scored'} on {last.total.prompts} prompts"
    first = evaluations[0].total.pass_at
    if len(evaluations) > 1 and first:
        k, before = next(iter(first.items()))
        line += f"; pass@{k} was {before.value:.3f} at step {evaluations[0].step}"
    if len(last.by_source) > 1:
        k = next(iter(last.total.pass_at), 0)
        named = [f"{name} {figures.pass_at[k].value:.3f}" for name, figures in last.by_source.items() if k in figures.pass_at]
        line += f"; by source: {', '.join(named)}" if named else ""
    return f"{line}; {last.total.num_invalid} invalid" if last.total.num_invalid else line


def _estimate(estimate: Estimate) -> str:
    return f"{estimate.value:.3f} [{estimate.low:.3f}, {estimate.high:.3f}]"


def _last_step(last: StepMetrics) -> Iterator[tuple[str, Text]]:
    lag = f"lag {number(last.get('lag_mean'), 1)} (max {count(last.get('lag_max'))})"
    loss = f"loss {number(last.get('loss'))}, gradient norm {number(last.get('grad_norm'))}"
    yield "last step", Text(f"reward {number(last.get('reward_mean'))}, {lag}, {loss}")
    push = f"push {seconds(last.pushes[-1].seconds if last.pushes else None)}"
    idle = f"trainer idle {share(last.get('trainer_idle_share'))}"
    yield "speed", Text(f"{count(last.get('tokens_per_s'))} trained tokens/s, {push}, {idle}")


def _queue_table(live: LiveSnapshot) -> Table:
    table = _plain_table("stream", "entries", "held by a worker", "oldest", right=("entries", "held by a worker", "oldest"))
    for stream, depth in live.depths.items():
        table.add_row(str(stream), count(depth.length), count(depth.pending), seconds(depth.oldest_age_s))
    return table


def _worker_table(live: LiveSnapshot) -> Table:
    table = _plain_table("worker", "lease", "engine", "serves", "", right=("lease",))
    engines = {engine.worker_id: engine for engine in live.engines.values()}
    for worker in live.workers:
        engine = engines.pop(worker.worker_id, None)
        served = "–" if engine is None or engine.serving_version is None else f"version {engine.serving_version}"
        state = "–" if engine is None else f"{engine.status} {engine.reason}".rstrip()
        table.add_row(worker.worker_id, seconds(worker.expires_in_s), state, served, _told(worker))
    for engine in engines.values():
        table.add_row(engine.worker_id, Text("lost", style="red"), str(engine.status), "–", engine.reason)
    return table


def _told(worker: WorkerLease) -> str:
    """What a worker says of itself beside the other columns: its role where the name hides it, its load, its place."""
    info = dict(worker.info)
    info.pop("serving_version", None)
    host, pid = info.pop("host", ""), info.pop("pid", "")
    in_flight = info.pop("in_flight", None)
    parts = [] if worker.worker_id.startswith(worker.role) else [worker.role]
    parts += [] if in_flight is None else [f"{in_flight} in flight"]
    parts += [f"{name} {value}" for name, value in info.items() if value]
    place = "" if host in ("", socket.gethostname()) else f" on {host}"
    return ", ".join([*parts, *([f"pid {pid}{place}"] if pid else [])])


def _plain_table(*names: str, right: Collection[str]) -> Table:
    table = Table(box=None, padding=(0, 2, 0, 0), header_style="dim")
    for name in names:
        table.add_column(name, justify="right" if name in right else "left", overflow="fold")
    return table
