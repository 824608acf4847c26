"""What the terminal repeats of the trainer's events."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from async_rl.monitor.notices import SILENCE_S, Notices
from async_rl.run_dir.files import JsonLinesWriter


def event(name: str, at: float, role: str = "trainer", **fields: Any) -> dict[str, Any]:
    return {"event": name, "role": role, "time_s": at, **fields}


def test_what_asks_for_a_person_is_told_and_the_rest_is_not(tmp_path: Path) -> None:
    path = tmp_path / "events.jsonl"
    writer = JsonLinesWriter(path)
    writer.write(event("waiting", 1.0, waiting_for="an earlier start", seconds=10.0))
    notices = Notices(path)
    assert notices.new() == []
    writer.write(event("waiting", 2.0, waiting_for="3 groups waiting of 8 needed", seconds=12.0))
    writer.write(event("waiting", 2.0, role="rollout", waiting_for="a proven version", seconds=1.0))
    writer.write(event("waiting", 2.0, waiting_for="stragglers", version=3, seconds=1.0))
    writer.write(event("group.invalid", 2.0))
    writer.write(event("groups.all_invalid", 3.0, groups=8, reason="KeyError: 'answer'"))
    assert notices.new() == [
        "trainer: waits for a full batch since 12 s: 3 groups waiting of 8 needed",
        "trainer: the last 8 groups ended invalid, and none trained: KeyError: 'answer'",
    ]
    assert notices.new() == []


def test_a_kind_is_told_again_only_after_a_while(tmp_path: Path) -> None:
    path = tmp_path / "events.jsonl"
    writer = JsonLinesWriter(path)
    notices = Notices(path)
    for at in (0.0, SILENCE_S - 1, SILENCE_S, SILENCE_S + 1):
        writer.write(event("waiting", at, waiting_for=f"at {at:g}", seconds=10.0))
    assert [line.rpartition(": ")[2] for line in notices.new()] == ["at 0", f"at {SILENCE_S:g}"]
