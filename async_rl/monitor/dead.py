"""`async-rl dead`: entries that could not be done, as a table, and one of them as far as it can be read."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from rich.console import Console
from rich.table import Table
from rich.text import Text

from async_rl.errors import CodecError
from async_rl.monitor.salvage import salvage
from async_rl.monitor.text import seconds
from protocol.codec import decode
from protocol.messages import PromptTask, TrajectoryGroup
from protocol.streams import DeadEntry

SHOWN = 120  # characters of a value
HEX_BYTES = 64


def print_dead(entries: Sequence[DeadEntry], console: Console) -> None:
    """A line per entry, oldest first."""
    if not entries:
        console.print("no dead entries")
        return
    table = Table(box=None, padding=(0, 2, 0, 0))
    for name in ("entry", "task", "from", "deliveries", "age", "bytes", "end in the log"):
        table.add_column(name, no_wrap=True)
    table.add_column("reason", overflow="fold")
    for dead in entries:
        table.add_row(
            dead.entry_id,
            Text(dead.task_id or "unknown"),
            dead.source.value if dead.source else "unknown",
            str(dead.delivery_count),
            seconds(dead.age_s),
            f"{len(dead.payload):,}",
            "yes" if dead.is_recorded else "not yet",
            Text(dead.reason),
        )
    console.print(table)


def print_dead_entry(dead: DeadEntry, console: Console) -> None:
    """Everything about one entry; of bytes that cannot be read, what can."""
    table = Table.grid(padding=(0, 2))
    table.add_column(style="dim", no_wrap=True)
    table.add_column(overflow="fold")
    for name, value in _rows(dead):
        table.add_row(Text(name), Text(value))
    console.print(table)


def _rows(dead: DeadEntry) -> Iterator[tuple[str, str]]:
    yield "entry", dead.entry_id
    yield "task", dead.task_id or "unknown"
    yield "reason", dead.reason
    yield "from", f"{dead.source.value if dead.source else 'unknown'}, delivered {dead.delivery_count} times"
    yield "age", seconds(dead.age_s)
    yield "end in the log", "yes: its row can be issued again, as a new task" if dead.is_recorded else "not yet"
    try:
        message = decode(dead.payload)
    except CodecError as error:
        yield "not readable", str(error)
        yield from _salvaged(dead.payload)
        return
    yield from _task(message) if isinstance(message, PromptTask) else _group(message)


def _task(task: PromptTask) -> Iterator[tuple[str, str]]:
    yield "prompt", _shown(task.prompt)
    yield "row", f"{task.source}, data epoch {task.data_epoch}, row {task.row}, repeat {task.repeat}"
    yield "columns", _shown(dict(task.columns))
    yield "sampling", f"{task.group_size} × up to {task.max_new_tokens} tokens at temperature {task.temperature:g}"


def _group(group: TrajectoryGroup) -> Iterator[tuple[str, str]]:
    yield from _task(group.task)
    for index, t in enumerate(group.trajectories):
        if t.reward is None:
            reward = "not scored"
        else:
            reward = f"reward {t.reward.value}" if t.reward.is_valid else f"invalid: {t.reward.invalid_reason}"
        yield (
            f"trajectory {index}",
            f"{len(t.token_ids)} tokens, {t.num_sampled} sampled, version {t.oldest_version}, {t.finish_reason.value}, "
            f"by {t.worker_id}, {reward}",
        )


def _salvaged(payload: bytes) -> Iterator[tuple[str, str]]:
    found = salvage(payload)
    yield "stopped", found.problem or "it is whole msgpack, but no message of ours"
    for path, value in found.values[:100]:
        yield path or "value", _shown(value)
    if not found.values:
        yield "begins with", payload[:HEX_BYTES].hex(" ")


def _shown(value: Any) -> str:
    """A repr, so that nothing in it can steer the terminal."""
    written = repr(value)
    return written if len(written) <= SHOWN else f"{written[:SHOWN]}… ({len(written)} characters)"
