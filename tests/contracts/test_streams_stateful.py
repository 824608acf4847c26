"""The delivery protocol as a state machine, over both queues: every order of crashes that Hypothesis can think of.

Beside the queue stands what a run has in other places: a coordinator that admits (its cursor is the queue's, its source a
pure function), workers that hold deliveries, incarnations of the trainer, and the intake log, which is the truth. After
every step and at the end of every history:

- the log has a task once, however often its group arrived;
- no task is lost: with everything alive again, all that was issued ends up in the log, and the queue is empty;
- never more tasks are out than admission allows.
"""

from __future__ import annotations

import asyncio
import copy
import itertools
import os
import tempfile
from collections.abc import Coroutine, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    rule,
    run_state_machine_as_test,
)
from redis.asyncio import Redis

from async_rl.coordinator.admission import may_issue
from async_rl.launch.embedded_redis import EmbeddedRedis
from protocol.errors import EpochFenced
from protocol.keys import trainer_consumer
from protocol.memory_streams import MemoryStreams
from protocol.redis_streams import RedisStreams
from protocol.streams import Delivery, Finished, IssuedTask, Publication, Stream, Streams

T = TypeVar("T")

WORKERS = ("w0", "w1")
MAX_LAG, GROUPS_PER_STEP = 1, 2
ROOM = (MAX_LAG + 1) * GROUPS_PER_STEP  # tasks that may be out: issued, and not yet in the log
MAX_DELIVERIES = 3
LEASE_S = 3600.0  # leases end when a rule says so
_run_numbers = itertools.count()


WORKER = st.sampled_from(WORKERS)
ACTIONS: dict[str, dict[str, st.SearchStrategy[Any]]] = {
    "issue_tasks": {"wanted": st.integers(1, 3), "copies": st.integers(1, 2)},
    "work": {
        "worker": WORKER,
        "source": st.sampled_from(["read", "read", "claim", "own"]),
        "count": st.integers(1, 3),
        "then": st.sampled_from(["publish", "publish", "hold", "reply lost", "crash", "bury"]),
    },
    "train": {
        "source": st.sampled_from(["read", "read", "take over", "own"]),
        "count": st.integers(1, 4),
        "then": st.sampled_from(["finish", "finish", "finish", "hold", "reply lost", "crash", "crash after the log"]),
    },
    "publish_again": {"which": st.integers(1, 6)},
    "lose_the_lease": {"worker": WORKER, "lives": st.booleans()},
    "mind_the_dead": {"does": st.sampled_from(["look", "record", "both"])},
    "requeue": {"which": st.integers(0, 3)},
    "reissue": {},
    "lose_an_entry": {"stream": st.sampled_from([Stream.TASKS, Stream.GROUPS]), "which": st.integers(0, 3)},
    "an_old_trainer_wakes": {"which": st.integers(0, 3)},
}
OFTEN = ["issue_tasks", "work", "work", "work", "train", "train"]
"""Drawn beside all others: a history in which nothing gets done shows nothing."""


class Trainer:
    """One incarnation: its epoch, and what it read and has not taken in yet."""

    def __init__(self, epoch: int) -> None:
        self.epoch = epoch
        self.held: list[Delivery] = []
        self.deaths: dict[str, str] = {}


class DeliveryMachine(RuleBasedStateMachine):
    """What all queues go through. Subclasses say how to open one, and how a worker's lease ends."""

    streams: Streams
    actions: Mapping[str, dict[str, st.SearchStrategy[Any]]] = ACTIONS

    def __init__(self) -> None:
        super().__init__()
        self.runner = asyncio.Runner()
        self.log: list[str] = []  # task ids whose group is in the intake log
        self.dead: list[str] = []  # task ids whose end as dead is in it
        self.held: dict[str, dict[str, Delivery]] = {worker: {} for worker in WORKERS}
        self.published: list[Publication] = []
        self.trainers: list[Trainer] = []
        self.repeats = 0
        self.issued_by_hand = 0

    # -- to be filled in -----------------------------------------------------------------------------------------------
    def open_queue(self) -> Streams:
        raise NotImplementedError

    def end_lease(self, worker: str) -> None:
        raise NotImplementedError

    def entries(self, stream: Stream) -> list[tuple[str, str]]:
        """(entry id, task id) of everything in a stream."""
        raise NotImplementedError

    def delete(self, stream: Stream, entry_id: str) -> None:
        """The entry alone, as somebody with a trimming command would."""
        raise NotImplementedError

    # -- help ------------------------------------------------------------------------------------------------------------
    def do(self, work: Coroutine[Any, Any, T]) -> T:
        return self.runner.run(work)

    def teardown(self) -> None:
        try:
            if self.trainers:
                self.all_is_done_in_the_end()
        finally:
            self.do(self.streams.close())
            self.runner.close()

    def ended(self) -> set[str]:
        return {*self.log, *self.dead}

    def serve(self, worker: str, deliveries: Sequence[Delivery]) -> None:
        """What a worker does first with what it gets: poison goes to the dead, the rest is held."""
        for delivery in deliveries:
            if delivery.delivery_count > MAX_DELIVERIES:
                self.do(self.streams.bury(delivery, task_id=delivery.task_id, reason="delivered too often"))
            else:
                self.held[worker][delivery.entry_id] = delivery

    def publish(self, worker: str, entry_ids: Sequence[str]) -> None:
        publications = [
            Publication(d.stream, entry_id, Stream.GROUPS, b"group of " + d.payload, d.task_id)
            for entry_id in entry_ids
            if (d := self.held[worker].get(entry_id)) is not None
        ]
        self.do(self.streams.publish(publications))
        self.published += publications
        for entry_id in entry_ids:
            self.held[worker].pop(entry_id, None)

    def append(self, deliveries: Sequence[Delivery]) -> None:
        """To the log, once per id."""
        self.log += [t for t in dict.fromkeys(str(d.task_id) for d in deliveries) if t not in self.ended()]

    def take_in(self, trainer: Trainer, deliveries: Sequence[Delivery]) -> None:
        """Log first, acknowledge afterwards."""
        self.append(deliveries)
        self.do(self.streams.finish(trainer.epoch, [Finished(d.entry_id, str(d.task_id)) for d in deliveries]))

    def record_dead(self, trainer: Trainer, deaths: Sequence[str]) -> None:
        self.dead += [task_id for task_id in deaths if task_id not in self.ended()]
        self.do(self.streams.finish_dead(trainer.epoch, deaths))
        self.do(self.streams.report(trainer.epoch, discarded=len(self.dead)))

    @property
    def trainer(self) -> Trainer:
        return self.trainers[-1]

    @rule(data=st.data())
    def happens(self, data: st.DataObject) -> None:
        """One rule for all: Hypothesis leaves some rules out of each history, and most need the others to mean anything."""
        action = data.draw(st.sampled_from([*OFTEN, *self.actions]), label="action")
        arguments = {name: data.draw(strategy, label=name) for name, strategy in self.actions[action].items()}
        getattr(self, action)(**arguments)

    # -- coordinator -----------------------------------------------------------------------------------------------------
    @initialize()
    def open(self) -> None:
        self.streams = self.open_queue()
        self.do(self.streams.open())
        for worker in WORKERS:
            self.do(self.streams.heartbeat(worker, "rollout", ttl_s=LEASE_S))
        self.new_trainer()
        self.issue_tasks(ROOM)

    def issue_tasks(self, wanted: int, copies: int = 1) -> None:
        """Admit as the coordinator does; `copies` of it at once, from the same counters."""
        counters = self.do(self.streams.counters())
        room = may_issue(counters, len(self.log), MAX_LAG, GROUPS_PER_STEP, groups_needed=None)
        count = min(wanted, room)
        tasks = [IssuedTask(f"t{counters.cursor + i}", b"task %d" % (counters.cursor + i)) for i in range(count)]
        for _ in range(copies):
            self.do(self.streams.issue(counters.cursor, tasks, next_cursor=counters.cursor + count))

    def lose_an_entry(self, stream: Stream, which: int) -> None:
        """A loss that is not the newest writes: `reissue` must find what is missing."""
        entries = self.entries(stream)
        if which < len(entries):
            self.delete(stream, entries[which][0])

    def reissue(self) -> None:
        """The coordinator after a restart of the server: what is outstanding and in no stream."""
        names = sorted(self.do(self.streams.outstanding()))
        self.do(self.streams.reissue([IssuedTask(name, b"task again") for name in names]))

    # -- workers ---------------------------------------------------------------------------------------------------------
    def work(self, worker: str, source: str, count: int, then: str) -> None:
        """Take tasks, and something becomes of them, and of what the worker held before."""
        self.do(self.streams.heartbeat(worker, "rollout", ttl_s=LEASE_S))
        deliveries = self.take(worker, source, count)
        if then == "reply lost":
            return
        self.serve(worker, deliveries)
        if then == "publish":
            self.publish(worker, [*self.held[worker]])
        elif then == "crash":
            self.lose_the_lease(worker, lives=False)
        elif then == "bury" and self.held[worker]:
            _, delivery = self.held[worker].popitem()
            self.do(self.streams.bury(delivery, task_id=delivery.task_id, reason="does not work"))

    def take(self, worker: str, source: str, count: int) -> Sequence[Delivery]:
        if source == "read":
            return self.do(self.streams.read(Stream.TASKS, worker, count=count, block_s=0))
        if source == "claim":
            return self.do(self.streams.claim(Stream.TASKS, worker, count=count))
        return self.do(self.streams.own_pending(Stream.TASKS, worker))

    def publish_again(self, which: int) -> None:
        """A reply was lost, or a worker whose lease was stolen is late."""
        if which <= len(self.published):
            self.do(self.streams.publish([self.published[-which]]))

    def lose_the_lease(self, worker: str, lives: bool) -> None:
        """Others may claim what it holds. If it lives it goes on with it; else it comes back under the same name."""
        self.end_lease(worker)
        if not lives:
            self.held[worker].clear()

    # -- trainer ---------------------------------------------------------------------------------------------------------
    def new_trainer(self) -> None:
        """It crashed, or was stopped and may wake: the old one stays around."""
        newest = max((trainer.epoch for trainer in self.trainers), default=0)
        epoch = self.do(self.streams.raise_epoch(newest + 1))
        assert epoch > newest
        self.trainers.append(Trainer(epoch))

    def train(self, source: str, count: int, then: str) -> None:
        """Take groups, and something becomes of them, and of what the trainer held before."""
        trainer = self.trainer
        groups = self.take_groups(trainer, source, count)
        if then != "reply lost":
            trainer.held = list({d.entry_id: d for d in [*trainer.held, *groups]}.values())
        if then == "finish":
            self.take_in(trainer, trainer.held)
            trainer.held = []
        elif then == "crash after the log":
            self.append(trainer.held)
        if then.startswith("crash"):
            self.new_trainer()

    def take_groups(self, trainer: Trainer, source: str, count: int) -> Sequence[Delivery]:
        if source == "read":
            return self.do(self.streams.read_groups(trainer.epoch, count=count, block_s=0))
        if source == "take over":
            return self.do(self.streams.take_over(trainer.epoch, count=count))
        return self.do(self.streams.own_pending(Stream.GROUPS, trainer_consumer(trainer.epoch)))

    def mind_the_dead(self, does: str) -> None:
        trainer = self.trainer
        if does != "record":
            trainer.deaths = dict(self.do(self.streams.newly_dead(trainer.epoch)))
        if does != "look":
            self.record_dead(trainer, [*trainer.deaths])
            trainer.deaths = {}

    def requeue(self, which: int) -> None:
        entries = self.do(self.streams.dead_entries(count=10))
        if which < len(entries):
            self.repeats += 1
            repeat = IssuedTask(f"r:{self.repeats}", b"another")
            queued = self.do(self.streams.requeue(entries[which].entry_id, repeat=repeat))
            assert queued in {entries[which].task_id, repeat.task_id}
            self.issued_by_hand += queued == repeat.task_id

    def an_old_trainer_wakes(self, which: int) -> None:
        """It reads and acknowledges what it held: all of it is refused, and nothing is missing afterwards."""
        if which + 1 >= len(self.trainers):
            return
        old = self.trainers[which]
        for write in (
            self.streams.read_groups(old.epoch, count=2, block_s=0),
            self.streams.take_over(old.epoch, count=2),
            self.streams.finish(old.epoch, [Finished(d.entry_id, str(d.task_id)) for d in old.held] or [Finished("1-1", "t0")]),
            self.streams.finish_dead(old.epoch, [*old.deaths, "t0"]),
            self.streams.report(old.epoch, discarded=99),
            self.streams.end_run(old.epoch),
        ):
            with pytest.raises(EpochFenced):
                self.do(write)

    # -- what holds ------------------------------------------------------------------------------------------------------
    @invariant()
    def the_log_has_a_task_once(self) -> None:
        ended = [*self.log, *self.dead]
        assert len(ended) == len(set(ended))

    @invariant()
    def a_task_is_in_one_place(self) -> None:
        if self.trainers:
            places = [task_id for stream in (Stream.TASKS, Stream.GROUPS) for _, task_id in self.entries(stream)]
            assert len(places) == len(set(places))

    @invariant()
    def admission_is_never_exceeded(self) -> None:
        if not self.trainers:
            return
        counters = self.do(self.streams.counters())
        out = self.do(self.streams.outstanding()) - self.ended()
        requeued = {name for name in out if name.startswith("r:")}  # a person's doing, and made up for
        assert len(out - requeued) <= ROOM
        assert counters.issued == counters.cursor + self.issued_by_hand

    def all_is_done_in_the_end(self) -> None:
        """Everybody is well from here on. What was issued ends, once, and nothing is left behind."""
        for worker in WORKERS:
            self.held[worker].clear()
        self.new_trainer()
        worker = WORKERS[0]
        for _ in range(30):
            self.reissue()
            self.do(self.streams.heartbeat(worker, "rollout", ttl_s=LEASE_S))
            for other in WORKERS[1:]:
                self.do(self.streams.leave(other))
            self.serve(worker, self.do(self.streams.own_pending(Stream.TASKS, worker)))
            self.serve(worker, self.do(self.streams.read(Stream.TASKS, worker, count=9, block_s=0)))
            self.serve(worker, self.do(self.streams.claim(Stream.TASKS, worker, count=9)))
            self.publish(worker, [*self.held[worker]])
            epoch = self.trainer.epoch
            groups = [*self.do(self.streams.own_pending(Stream.GROUPS, trainer_consumer(epoch)))]
            groups += self.do(self.streams.read_groups(epoch, count=9, block_s=0))
            groups += self.do(self.streams.take_over(epoch, count=9))
            self.take_in(self.trainer, list({d.entry_id: d for d in groups}.values()))
            self.record_dead(self.trainer, [*self.do(self.streams.newly_dead(epoch))])
            depths = self.do(self.streams.depths())
            left = sum(depths[stream].length for stream in (Stream.TASKS, Stream.UNSCORED, Stream.GROUPS))
            if not left and not self.do(self.streams.outstanding()):
                break
        counters = self.do(self.streams.counters())
        assert (counters.outstanding, left, [d.pending for d in depths.values()]) == (0, 0, [0, 0, 0, 0])
        assert {f"t{row}" for row in range(counters.cursor)} <= self.ended()
        self.the_log_has_a_task_once()


class MemoryMachine(DeliveryMachine):
    """The twin; it alone can lose its last writes, as a crashed server without fsync or a failover does."""

    queue: MemoryStreams
    actions = ACTIONS | {"sync": {}, "lose_the_tail": {}}

    def open_queue(self) -> Streams:
        self.queue = MemoryStreams(now=lambda: 1000.0)
        self.sync()
        return self.queue

    def end_lease(self, worker: str) -> None:
        self.queue._leases.pop(worker, None)

    def entries(self, stream: Stream) -> list[tuple[str, str]]:
        return [(entry.entry_id, str(entry.task_id)) for entry in self.queue._run.entries[stream].values()]

    def delete(self, stream: Stream, entry_id: str) -> None:
        del self.queue._run.entries[stream][entry_id]

    def sync(self) -> None:
        """What is there now survives."""
        self.kept, self.kept_by_hand = copy.deepcopy(self.queue._run), self.issued_by_hand

    def lose_the_tail(self) -> None:
        """The server comes back as it was at its last sync; the trainer raises its epoch again, leases are gone."""
        self.queue._run, self.issued_by_hand = copy.deepcopy(self.kept), self.kept_by_hand
        self.queue.restart()
        self.queue._leases.clear()
        self.new_trainer()


class RedisMachine(DeliveryMachine):
    url: str

    def open_queue(self) -> Streams:
        return RedisStreams(self.url, f"stateful-{os.getpid()}-{next(_run_numbers)}", lease_s=0.0)

    @property
    def client(self) -> Redis:
        assert isinstance(self.streams, RedisStreams)
        return self.streams.client

    def key(self, stream: Stream) -> str:
        assert isinstance(self.streams, RedisStreams)
        return self.streams.keys.stream(stream)

    def end_lease(self, worker: str) -> None:
        assert isinstance(self.streams, RedisStreams)
        self.do(self.client.delete(self.streams.keys.lease(worker)))

    def entries(self, stream: Stream) -> list[tuple[str, str]]:
        found = self.do(self.client.xrange(self.key(stream)))
        return [(entry_id.decode(), fields[b"t"].decode()) for entry_id, fields in found]

    def delete(self, stream: Stream, entry_id: str) -> None:
        self.do(self.client.xdel(self.key(stream), entry_id))


@pytest.fixture(scope="module")
def server() -> Iterator[EmbeddedRedis]:
    binary = os.environ.get("ASYNC_RL_TEST_REDIS_SERVER")
    with (
        tempfile.TemporaryDirectory(prefix="arl-") as directory,
        EmbeddedRedis(Path(directory) / "redis", appendfsync="everysec", binary=Path(binary) if binary else None) as redis,
    ):
        yield redis


def _examples(count: int) -> int:
    """More of them for a night: ASYNC_RL_TEST_EXAMPLES=20 makes twenty times as many."""
    return count * int(os.environ.get("ASYNC_RL_TEST_EXAMPLES", "1"))


def test_every_history_in_memory() -> None:
    run_state_machine_as_test(
        MemoryMachine,
        settings=settings(
            max_examples=_examples(100), stateful_step_count=50, deadline=None, suppress_health_check=[*HealthCheck]
        ),
    )


def test_every_history_on_a_real_server(server: EmbeddedRedis) -> None:
    machine = type("RealMachine", (RedisMachine,), {"url": server.url})
    run_state_machine_as_test(
        machine,
        settings=settings(
            max_examples=_examples(20), stateful_step_count=40, deadline=None, suppress_health_check=[*HealthCheck]
        ),
    )
