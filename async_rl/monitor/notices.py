"""What roles have to say to whoever watches the terminal: the few events that ask for a person."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from async_rl.logs import Event
from async_rl.monitor.metrics_file import Follower
from async_rl.monitor.text import count, number, seconds

SILENCE_S = 60.0
SPEAKERS = {Event.DATA_GROWN: "coordinator"}
"""Whose word counts, where it is not the trainer's."""


def _waiting(event: Mapping[str, Any]) -> str:
    return f"waits for a full batch since {seconds(event.get('seconds'))}: {event.get('waiting_for')}"


def _all_invalid(event: Mapping[str, Any]) -> str:
    return f"the last {count(event.get('groups'))} groups ended invalid, and none trained: {event.get('reason')}"


def _logprobs_differ(event: Mapping[str, Any]) -> str:
    gap, accepted = number(event.get("gap_nats")), number(event.get("accepted"))
    return f"engine and trainer disagree on a logprob by {gap} nats (accepted: {accepted}) at step {count(event.get('step'))}"


WORDS: Mapping[str, Callable[[Mapping[str, Any]], str]] = {
    Event.WAITING: _waiting,
    Event.ALL_INVALID: _all_invalid,
    Event.LOGPROBS_DIFFER: _logprobs_differ,
    Event.DATA_GROWN: lambda event: str(event.get("what")),
}


class Notices:
    """Reads new events of the roles that speak; of a kind, one in SILENCE_S, so that none fills the screen."""

    def __init__(self, events_jsonl: Path) -> None:
        self._follower = Follower(events_jsonl)
        self._told_at: dict[str, float] = {}
        for _ in self._follower.new_records():  # what earlier starts said
            pass

    def new(self) -> Sequence[str]:
        """A line per notice that came since the last call."""
        return [
            f"{event['role']}: {WORDS[event['event']](event)}" for event in self._follower.new_records() if self._is_due(event)
        ]

    def _is_due(self, event: Mapping[str, Any]) -> bool:
        kind, at = str(event.get("event")), float(event.get("time_s", 0.0))
        if (
            kind not in WORDS or event.get("role") != SPEAKERS.get(Event(kind), "trainer") or "version" in event
        ):  # a wait for stragglers is everyday
            return False
        if at - self._told_at.get(kind, -SILENCE_S) < SILENCE_S:
            return False
        self._told_at[kind] = at
        return True
