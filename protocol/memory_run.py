"""What `memory_streams` keeps of a run: the counterpart of the keys that a Redis server holds."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from protocol.keys import epoch_of_consumer
from protocol.streams import Delivery, RunState, Started, Stream


@dataclass(slots=True)
class Entry:
    entry_id: str
    task_id: str | None
    payload: bytes
    added_s: float
    consumer: str | None = None  # None: not delivered yet
    delivery_count: int = 0


@dataclass(slots=True)
class Lease:
    role: str
    info: Mapping[str, str]
    expires_s: float


@dataclass(slots=True)
class Run:
    state: RunState = RunState.NEW
    epoch: int = 0
    cursor: int = 0
    issued: int = 0
    discarded: int = 0
    lost: tuple[int, int] | None = None
    entries: dict[Stream, dict[str, Entry]] = field(default_factory=lambda: {stream: {} for stream in Stream})
    deaths: dict[str, tuple[str, Stream]] = field(default_factory=dict)  # entry id in `dead` → reason, source
    outstanding: dict[str, tuple[Stream, str]] = field(default_factory=dict)  # task id → where it is
    newly_dead: dict[str, str] = field(default_factory=dict)
    started: dict[str, Started] = field(default_factory=dict)


def delivery(stream: Stream, entry: Entry) -> Delivery:
    return Delivery(stream, entry.entry_id, entry.payload, entry.delivery_count, entry.task_id)


def is_older(consumer: str, epoch: int) -> bool:
    theirs = epoch_of_consumer(consumer)
    return theirs is None or theirs < epoch
