"""The watchdog: who waits for whom, in which collective."""

from __future__ import annotations

import faulthandler
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta
from types import FrameType

import pytest
import torch
import torch.distributed as dist
from torch._C._distributed_c10d import HashStore, ProcessGroupGloo, TCPStore

from async_rl.trainer.watchdog import WAITING_FOR_COMMAND, RankState, Watchdog, describe, explain, is_of_collective


def state(
    rank: int, command: str = "train", *, since: float = 0.0, collective: str = "", written: float = 100.0, done: int = 7
) -> RankState:
    return RankState(rank, command, since, collective, "step.py:88 train_step", written, done)


def test_the_rank_that_is_outside_the_collective_is_the_one_that_is_waited_for() -> None:
    mine = state(0, since=30.0, collective="all_reduce")
    report = explain(mine, {0: mine, 1: state(1, since=40.0), 2: state(2, since=31.0, collective="all_reduce")}, 100.0)
    first, *lines = report.splitlines()
    assert first == "rank 0 waits since 70 s in all_reduce (train) for rank 1"
    assert lines[1] == "  rank 1: train for 60 s, in no collective, at step.py:88 train_step"
    assert len(lines) == 3


def test_a_rank_that_is_behind_silent_or_never_wrote_is_waited_for() -> None:
    mine = state(0, collective="broadcast")
    others = {
        1: state(1, "save", collective="all_reduce", done=6),
        2: state(2, collective="broadcast", written=90.0),
        3: None,
        4: state(4, collective="broadcast"),
    }
    report = explain(mine, {0: mine, **others}, 100.0)
    assert report.splitlines()[0].endswith("for rank 1, 2, 3")
    assert "rank 2: train for 100 s, in broadcast, at step.py:88 train_step, silent for 10 s: stopped or dead" in report
    assert "rank 3: has never written" in report


def test_when_all_are_in_it_nobody_is_accused() -> None:
    mine = state(0, collective="all_reduce")
    report = explain(mine, {0: mine, 1: state(1, collective="all_reduce")}, 100.0)
    assert "no rank in particular" in report


class Pair:
    """Two watchdogs on one store; the training thread of rank 0 is where a test puts it."""

    def __init__(self) -> None:
        self.now = 1000.0
        store = HashStore()
        self.frame: FrameType | None = None
        self.other_frame: FrameType | None = None
        self.zero = Watchdog(store, 0, 2, limit_s=60.0, clock=lambda: self.now, frames=lambda _: self.frame)
        self.one = Watchdog(store, 1, 2, limit_s=60.0, clock=lambda: self.now, frames=lambda _: self.other_frame)


def test_a_long_wait_is_reported_once_per_limit_and_names_the_other_ranks_command() -> None:
    pair = Pair()
    with in_collective() as frame, pair.zero.doing("train"), pair.one.doing("save"):
        pair.frame = frame
        pair.now += 59
        assert pair.zero.look() is None
        assert pair.one.look() is None  # it is in no collective: it works
        pair.now += 1
        report = pair.zero.look()
        assert report is not None
        assert report.startswith("rank 0 waits since 60 s in all_reduce (train) for rank 1")
        assert "rank 1: save for 60 s, in no collective" in report
        pair.now += 59
        assert pair.zero.look() is None
        pair.now += 1
        assert pair.zero.look() is not None
    assert pair.zero.state().command == "between commands, after train"
    assert pair.zero.state().marks == 2


def test_ranks_that_wait_for_commands_count_like_the_one_that_gives_them() -> None:
    pair = Pair()
    for _ in range(3):
        with pair.one.doing(WAITING_FOR_COMMAND):
            pass
        with pair.zero.doing("train"), pair.one.doing("train"):
            pass
    assert pair.zero.state().marks == pair.one.state().marks == 6


def test_a_rank_that_is_a_micro_batch_behind_in_the_same_collective_is_the_one() -> None:
    pair = Pair()
    with in_collective() as frame, pair.zero.doing("train"), pair.one.doing("train"):
        pair.frame = pair.other_frame = frame
        pair.zero.mark("train, after micro-batch 1")
        pair.one.look()
        assert pair.zero.report().startswith("rank 0 waits since 0 s in all_reduce (train, after micro-batch 1) for rank 1\n")
        pair.one.mark("train, after micro-batch 1")
        pair.one.look()
        assert "for no rank in particular" in pair.zero.report()


def test_each_micro_batch_begins_the_wait_anew() -> None:
    pair = Pair()
    with in_collective() as frame, pair.zero.doing("train"):
        pair.frame = frame
        pair.now += 59
        pair.zero.mark("train, after micro-batch 1")
        pair.now += 59
        assert pair.zero.look() is None
        pair.now += 1
        assert pair.zero.look() is not None


def test_a_rank_that_computes_says_that_it_waits_for_nobody() -> None:
    pair = Pair()
    with pair.zero.doing("save"):
        assert pair.zero.report().startswith("rank 0 waits for no other: it is in no collective, for 0 s in save\n")


def test_a_store_that_went_with_rank_0_is_said() -> None:
    store = TCPStore("127.0.0.1", 0, is_master=True, timeout=timedelta(seconds=5), wait_for_workers=False)
    client = TCPStore("127.0.0.1", store.port, is_master=False, timeout=timedelta(seconds=5), wait_for_workers=False)
    other = Watchdog(client, 1, 2, limit_s=60.0)
    other.look()
    assert "rank 0: has never written" in other.report()
    del store
    assert other.report().startswith("what the other ranks do is not known: rank 0 and its store are gone (")


def test_only_a_rank_other_than_0_leaves_its_stacks_and_only_while_it_does_something(monkeypatch: pytest.MonkeyPatch) -> None:
    armed: list[float] = []
    monkeypatch.setattr(faulthandler, "dump_traceback_later", armed.append)
    monkeypatch.setattr(faulthandler, "cancel_dump_traceback_later", armed.clear)
    for rank in (0, 1):
        watchdog = Watchdog(HashStore(), rank, 2, limit_s=60.0, dump_after_s=120.0)
        with watchdog.doing("train"):
            watchdog.mark("train, after micro-batch 1")
            assert armed == [120.0, 120.0] * rank
        assert armed == []
        with watchdog.doing(WAITING_FOR_COMMAND):
            assert armed == []


def test_a_rank_between_commands_is_never_stuck() -> None:
    pair = Pair()
    pair.now += 1000
    assert pair.zero.look() is None


@contextmanager
def in_collective() -> Iterator[FrameType]:
    """A frame of a thread that really waits in torch.distributed's all_reduce, for a rank that does not come."""
    gloo = ProcessGroupGloo
    stores = HashStore()
    frames: list[FrameType] = []
    ready = threading.Event()

    def rank_1() -> None:
        group = gloo(stores, 1, 2, timedelta(seconds=30))
        ready.wait(30)
        group.allreduce([torch.zeros(1)]).wait()

    other = threading.Thread(target=rank_1)
    other.start()
    group = gloo(stores, 0, 2, timedelta(seconds=30))

    def rank_0() -> None:
        all_reduce_of_torch(group)

    waiting = threading.Thread(target=rank_0)
    waiting.start()
    while not frames:
        frame = sys._current_frames().get(waiting.ident or 0)
        if frame is not None and describe(frame)[0]:
            frames.append(frame)
    try:
        yield frames[0]
    finally:
        ready.set()
        waiting.join(30)
        other.join(30)


def all_reduce_of_torch(group: ProcessGroupGloo) -> None:
    dist.distributed_c10d._world.pg_map[group] = ("gloo", None)
    try:
        dist.all_reduce(torch.zeros(1), group=group)
    finally:
        del dist.distributed_c10d._world.pg_map[group]


def test_a_stack_outside_torch_is_in_no_collective_and_ours_is_named() -> None:
    assert describe(None) == ("", "")
    assert describe(sys._getframe())[0] == ""


@pytest.mark.parametrize(
    ("message", "is_one"),
    [
        ("[../third_party/gloo/gloo/transport/tcp/pair.cc:534] Connection closed by peer [127.0.0.1]:1", True),
        ("Timed out waiting 60000ms for recv operation to complete", True),
        ("mat1 and mat2 shapes cannot be multiplied", False),
    ],
)
def test_errors_of_collectives_are_told_from_others(message: str, is_one: bool) -> None:
    assert is_of_collective(RuntimeError(message)) is is_one
