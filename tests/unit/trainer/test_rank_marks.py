"""Marks of ranks name the one that is missing in a collective."""

from __future__ import annotations

import socket
from datetime import timedelta

import pytest
from torch._C._distributed_c10d import HashStore, TCPStore

from async_rl.trainer.rank_marks import RankMarks


@pytest.fixture
def marks() -> list[RankMarks]:
    store = HashStore()
    return [RankMarks(store, rank, 3, now=lambda rank=rank: 100.0 + rank) for rank in range(3)]


def test_the_rank_that_stopped_counting_is_named_with_its_place(marks: list[RankMarks]) -> None:
    for rank in marks:
        rank.note("train")
        rank.note("train, after micro-batch 1")
    for rank in (marks[0], marks[2]):
        rank.note("train, after micro-batch 2")
    assert marks[0].behind() == "behind the others: rank 1 (train, after micro-batch 1, for -1 s)"


def test_a_rank_that_never_began_is_named_first(marks: list[RankMarks]) -> None:
    marks[0].note("load")
    marks[1].note("load")
    assert marks[0].behind() == "never begun: rank 2"


def test_ranks_at_one_place_are_all_said(marks: list[RankMarks]) -> None:
    for rank in marks:
        rank.note("save")
        rank.note("")
    said = marks[0].behind()
    assert said.startswith("all ranks stand at the same place: rank 0 (waits for a command, for 0 s), rank 1")
    assert "rank 2" in said


def test_ranks_meet_in_the_store_of_their_rendezvous_and_say_when_it_is_gone(monkeypatch: pytest.MonkeyPatch) -> None:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    server = TCPStore("127.0.0.1", port, is_master=True, timeout=timedelta(seconds=5), wait_for_workers=False)
    monkeypatch.setenv("MASTER_ADDR", "127.0.0.1")
    monkeypatch.setenv("MASTER_PORT", str(port))
    first, second = (RankMarks.connect(rank, 2, dump_after_s=0.0) for rank in range(2))
    assert first is not None
    assert second is not None
    first.note("train")
    first.note("train, after micro-batch 1")
    second.note("train")
    assert "rank 1 (train, for" in first.behind()
    del server
    assert "not known" in first.behind()
    assert RankMarks.connect(0, 1, dump_after_s=1.0) is None
