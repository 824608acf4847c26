"""A real trainer over a recorded stream, ended at the worst moments and begun again: nobody may see it in its weights."""

from __future__ import annotations

import asyncio
import inspect
import logging
import os
import threading
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Mapping
from contextlib import AbstractContextManager, asynccontextmanager, contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

from async_rl import logs
from async_rl.checks.audit import audit_index
from async_rl.config import RunConfig, load_config
from async_rl.errors import CheckpointError
from async_rl.registry.memory_registry import MemoryRegistry
from async_rl.run_dir.files import read_json_lines
from async_rl.run_dir.intake_log import IntakeLog, read_log
from async_rl.testing.full_disk import files_no_larger_than
from async_rl.testing.recorded_stream import GROUP_SIZE, GROUPS_PER_STEP, Feeder, RecordedStream
from async_rl.testing.roles import until
from async_rl.testing.tiny_models import TinyModel, save_tiny_model
from async_rl.trainer import checkpoint_writer, step
from async_rl.trainer.assemble import make_learner
from async_rl.trainer.checkpoint import COMPLETE
from async_rl.trainer.checkpoint_writer import CheckpointWriter
from async_rl.trainer.distributed import joined_ranks
from async_rl.trainer.intake import Intake
from async_rl.trainer.learner import Learner
from async_rl.trainer.loop import TrainerLoop, TrainerResult
from protocol.memory_streams import MemoryStreams

STREAM = RecordedStream()


class Crash(BaseException):
    """The end of a process, as far as the code that runs in it can tell: nothing handles it."""


class Queue(MemoryStreams):
    """Remembers the newest epoch, for the registry."""

    epoch = 0

    async def raise_epoch(self, at_least: int) -> int:
        self.epoch = await super().raise_epoch(at_least)
        return self.epoch


class Run:
    """One run: its directory, queue and registry outlive its trainers."""

    def __init__(self, directory: Path, model: Path, **settings: Any) -> None:
        chosen = {
            "run_dir": directory,
            "model.path": model,
            "trainer.groups_per_step": GROUPS_PER_STEP,
            "trainer.learning_rate": 1e-3,
            "trainer.max_tokens_per_micro_batch": 64,
            "checkpoint.every_steps": 2,
            "weights.deadline_s": 0.05,
            "validation.tokens_per_step": 0,  # no model sampled the recorded stream
            **{name.replace("__", "."): value for name, value in settings.items()},
        }
        self.config: RunConfig = load_config(None, [f"--{key}={value}" for key, value in chosen.items()], {}).config
        (directory / "checkpoints").mkdir(parents=True)
        self.queue = Queue()
        self.registry = MemoryRegistry(lambda: self.queue.epoch)
        self.feeder = Feeder(self.queue, STREAM, self.version)
        self.clock: Callable[[], float] = time.monotonic
        self.weights: Mapping[str, Tensor] = {}

    def lines(self) -> list[dict[str, Any]]:
        return list(read_json_lines(self.config.run_dir / "metrics.jsonl"))

    def version(self) -> int:
        return max((line["policy_version"] for line in self.lines()), default=0)

    def events(self, name: str) -> list[dict[str, Any]]:
        return [line for line in read_json_lines(self.config.run_dir / "events.jsonl") if line["event"] == name]

    def checkpoints(self) -> list[str]:
        """The complete ones."""
        return sorted(path.name for path in (self.config.run_dir / "checkpoints").glob("step_????????"))

    @asynccontextmanager
    async def feeding(self, batches: int, *, ends: bool = True) -> AsyncIterator[None]:
        self.feeder.limit, self.feeder.ends = batches, ends
        task = asyncio.create_task(self.feeder.run())
        try:
            yield
        finally:
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)

    async def trainer(self, beside: Callable[[TrainerLoop], Awaitable[None]] | None = None) -> TrainerResult:
        """One incarnation, to its end or to that of `beside`, if this raises."""
        with joined_ranks() as ranks:
            learner = make_learner(self.config, ranks)
            name = f"trainer-{self.queue.epoch + 1}"
            loop = TrainerLoop(
                self.config, streams=self.queue, registry=self.registry, learner=learner, worker_id=name, now=self.clock
            )
            try:
                async with asyncio.timeout(60), asyncio.TaskGroup() as tasks:
                    running = tasks.create_task(loop.run())
                    if beside is not None:
                        tasks.create_task(_awaited(beside(loop)))
            finally:  # a process would be gone; a thread has to come to its end
                for thread in threading.enumerate():
                    if thread.name == "checkpoint":
                        await asyncio.to_thread(thread.join)
            self.weights = learner.full_weights()
        return running.result()

    async def to_the_end(self, batches: int) -> TrainerResult:
        async with self.feeding(batches):
            return await self.trainer()

    async def dies(self, batches: int, beside: Callable[[TrainerLoop], Awaitable[None]] | None = None) -> None:
        """A trainer that comes to a Crash: one that was laid for it, or that `beside` ends with."""
        async with self.feeding(batches, ends=False):
            with pytest.raises(BaseExceptionGroup) as ended:
                await self.trainer(beside)
        assert ended.group_contains(Crash)


async def _awaited(work: Awaitable[None]) -> None:
    await work


async def until_true(condition: Callable[[], bool]) -> None:
    async def answer() -> bool:
        return condition()

    await until(answer)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("model") / "tiny"
    return save_tiny_model(directory, TinyModel.LLAMA, hidden_size=32, intermediate_size=48, num_hidden_layers=2, head_dim=8)


@pytest.fixture
def make_run(model: Path, tmp_path: Path) -> Iterator[Callable[..., Run]]:
    """Runs; the log goes to the newest of them."""
    number = 0

    def make(**settings: Any) -> Run:
        nonlocal number
        number += 1
        made = Run(tmp_path / f"run-{number}", model, **settings)
        logs.configure(role="trainer", worker_id="t", run_id="r", run_dir=made.config.run_dir, console=False)
        return made

    yield make
    logs.close()
    logging.captureWarnings(False)
    root = logging.getLogger()
    root.handlers = [handler for handler in root.handlers if type(handler).__module__ != "async_rl.logs"]


def crash(patch: pytest.MonkeyPatch, owner: Any, name: str, *, call: int, after: bool = False) -> None:
    """End the trainer at the call-th call of that function: before it has done anything, or when it has done all."""
    function, calls = getattr(owner, name), 0

    def begin() -> bool:
        nonlocal calls
        calls += 1
        if calls == call and not after:
            raise Crash
        return calls == call

    async def crashing_async(*arguments: Any, **named: Any) -> Any:
        is_last = begin()
        result = await function(*arguments, **named)
        if is_last:
            raise Crash
        return result

    def crashing(*arguments: Any, **named: Any) -> Any:
        is_last = begin()
        result = function(*arguments, **named)
        if is_last:
            raise Crash
        return result

    patch.setattr(owner, name, crashing_async if inspect.iscoroutinefunction(function) else crashing)


def assert_identical(one: Mapping[str, Tensor], other: Mapping[str, Tensor]) -> None:
    assert one.keys() == other.keys()
    assert [name for name in one if not torch.equal(one[name], other[name])] == []


def assert_every_step_once(run: Run, steps: int) -> None:
    assert [line["step"] for line in run.lines()] == list(range(1, steps + 1))
    ledger = audit_index("r", read_log(run.config.run_dir / "intake"))
    assert ledger.is_exact
    assert ledger.ends["trained"] == steps * GROUPS_PER_STEP


BATCHES = 7
WORST_MOMENTS = [
    pytest.param(MemoryStreams, "finish", 4, False, id="between the log's fsync and the acknowledgement"),
    pytest.param(IntakeLog, "append", 5, True, id="appended, not fsynced"),
    pytest.param(Intake, "compose_next", 2, False, id="inside a batch, its second step not recorded"),
    pytest.param(Intake, "compose_next", 2, True, id="inside a batch, its second step recorded"),
    pytest.param(step, "_backward", 10, False, id="between two micro-batches of a step"),
    pytest.param(Learner, "train", 4, True, id="trained, not accounted for"),
    pytest.param(CheckpointWriter, "start", 2, True, id="a checkpoint was begun"),
]


@pytest.fixture(scope="module")
def uninterrupted(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Mapping[str, Tensor]:
    """Weights of the run of BATCHES steps, two to a batch, that nothing happened to."""
    run = Run(tmp_path_factory.mktemp("straight") / "run", model, trainer__steps_per_batch=2)
    asyncio.run(run.to_the_end(BATCHES))
    assert_every_step_once(run, BATCHES)
    before = load_file(model / "model.safetensors")
    assert all(not torch.equal(run.weights[name], before[name]) for name in before)
    return run.weights


@pytest.mark.parametrize(("owner", "name", "call", "after"), WORST_MOMENTS)
async def test_a_trainer_that_dies_there_trains_everything_once_and_alike(
    make_run: Callable[..., Run],
    uninterrupted: Mapping[str, Tensor],
    monkeypatch: pytest.MonkeyPatch,
    owner: Any,
    name: str,
    call: int,
    after: bool,
) -> None:
    run = make_run(trainer__steps_per_batch=2)
    with monkeypatch.context() as patch:
        crash(patch, owner, name, call=call, after=after)
        await run.dies(BATCHES)
    assert 0 < run.version() < BATCHES
    assert (await run.to_the_end(BATCHES)).finished
    assert run.queue.epoch == 2
    assert_identical(run.weights, uninterrupted)
    assert_every_step_once(run, BATCHES)


async def test_what_was_trained_before_its_acknowledgement_is_not_trained_again(
    make_run: Callable[..., Run], uninterrupted: Mapping[str, Tensor], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The queue takes its time with an acknowledgement; the groups are in the log, so they train; then the trainer dies."""
    run = make_run(trainer__steps_per_batch=2)
    finish, calls = MemoryStreams.finish, 0

    async def slow(queue: MemoryStreams, *arguments: Any) -> None:
        nonlocal calls
        calls += 1
        if calls == 4:
            await until_true(lambda: run.version() == 4)
            raise Crash
        await finish(queue, *arguments)

    with monkeypatch.context() as patch:
        patch.setattr(MemoryStreams, "finish", slow)
        await run.dies(BATCHES)
    assert len(await run.queue.outstanding()) == GROUPS_PER_STEP  # trained, and still in the queue
    await run.to_the_end(BATCHES)
    assert_identical(run.weights, uninterrupted)
    assert_every_step_once(run, BATCHES)


async def test_a_run_stopped_in_its_schedule_goes_on_in_it(make_run: Callable[..., Run]) -> None:
    """Warm-up over 10 of 100 steps, then a decline; stopped at 20: step 21 is the uninterrupted run's step 21."""
    settings = {"trainer__warmup_steps": 10, "trainer__max_steps": 100, "trainer__schedule": "linear"}
    straight, stopped = make_run(**settings), make_run(**settings)
    await straight.to_the_end(21)

    async def stop_at_20(loop: TrainerLoop) -> None:
        await until_true(lambda: stopped.version() == 20)
        loop.stop()

    async with stopped.feeding(20, ends=False):
        assert not (await stopped.trainer(stop_at_20)).finished
    assert stopped.checkpoints()[-1] == "step_00000020"
    await stopped.to_the_end(21)
    rates = [[line["learning_rate"] for line in run.lines()] for run in (straight, stopped)]
    assert rates[0] == rates[1]
    assert rates[1][8:11] == pytest.approx([0.9e-3, 1e-3, 0.99e-3])  # the peak at step 10, a tenth of it at step 100
    assert rates[1][20] == pytest.approx(1e-3 * (1 - 0.9 * 11 / 90))
    assert_identical(stopped.weights, straight.weights)


async def test_below_what_was_sampled_since_no_lag_is_negative(make_run: Callable[..., Run]) -> None:
    """It dies at version 9, with a checkpoint of 7; in the queue waits what version 9 sampled, in the log what 7 and 8 did."""
    run = make_run(checkpoint__every_steps=7)
    run.feeder = Feeder(run.queue, RecordedStream(lag=0), run.version, ahead=0)

    async def die_at_9(_: TrainerLoop) -> None:
        await until_true(lambda: run.version() == 9 and run.checkpoints() == ["step_00000007"])
        raise Crash

    await run.dies(9, die_at_9)
    async with run.feeding(10, ends=False):
        await until_true(lambda: run.feeder.published == 10)
    await run.to_the_end(11)
    (event,) = (event for event in run.events("intake_log.replayed") if event["steps"])
    assert (event["steps"], event["version"]) == (2, 9)
    assert [line["lag_histogram"] for line in run.lines()] == [{"0": GROUP_SIZE * GROUPS_PER_STEP}] * 11
    assert_every_step_once(run, 11)


async def test_engines_that_wait_for_the_resumed_version_get_it_before_there_is_anything_to_read(
    make_run: Callable[..., Run],
) -> None:
    """Nothing is sampled until the resumed version is pushed: it must not wait for groups first."""
    run = make_run(checkpoint__every_steps=7)

    async def stop_at_7(loop: TrainerLoop) -> None:
        await until_true(lambda: run.version() == 7)
        loop.stop()

    async def sample_once_pushed(_: TrainerLoop) -> None:
        async def pushed() -> bool:
            state = await run.registry.state()
            return (state.epoch, state.pushable_version) == (2, 7)

        await until(pushed)
        run.feeder.limit, run.feeder.ends = 8, True

    async with run.feeding(7, ends=False):
        await run.trainer(stop_at_7)
        assert (await run.trainer(sample_once_pushed)).policy_version == 8
    assert_every_step_once(run, 8)


@contextmanager
def writer_that_fails() -> Iterator[None]:
    """An error in the writer's thread that nobody foresaw."""

    def fail(*_: Any, **__: Any) -> Path:
        raise ZeroDivisionError("no such shard")

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(checkpoint_writer, "write_checkpoint", fail)
        yield


@pytest.mark.parametrize(
    ("trouble", "reason"),
    [(lambda: files_no_larger_than(100_000), "cannot be written"), (writer_that_fails, "ZeroDivisionError: no such shard")],
    ids=["disk full", "error in the writer's thread"],
)
async def test_a_checkpoint_that_cannot_be_written_is_said_and_the_earlier_one_serves(
    make_run: Callable[..., Run], trouble: Callable[[], AbstractContextManager[None]], reason: str
) -> None:
    straight, run = make_run(), make_run()
    await straight.to_the_end(7)

    async def make_trouble_and_die(_: TrainerLoop) -> None:
        await until_true(lambda: run.checkpoints() == ["step_00000002"])
        with trouble():
            run.feeder.limit = 5  # one is due at 4
            await until_true(lambda: run.version() == 5 and bool(run.events("checkpoint.failed")))
        raise Crash

    await run.dies(2, make_trouble_and_die)
    (failure,) = run.events("checkpoint.failed")
    assert reason in failure["error"]
    assert run.checkpoints() == ["step_00000002"]
    await run.to_the_end(7)
    assert [event["steps"] for event in run.events("intake_log.replayed")] == [3]
    assert_identical(run.weights, straight.weights)
    assert_every_step_once(run, 7)


async def test_a_last_checkpoint_that_cannot_be_written_ends_the_run_with_its_reason(make_run: Callable[..., Run]) -> None:
    run = make_run(checkpoint__every_steps=1000)
    with files_no_larger_than(100_000), pytest.raises(BaseExceptionGroup) as ended:
        await run.to_the_end(3)
    assert ended.group_contains(CheckpointError, match="cannot be written")
    await run.to_the_end(3)  # there is room again
    assert_every_step_once(run, 3)


async def test_checkpoints_come_by_the_clock_and_stay_by_their_age(make_run: Callable[..., Run]) -> None:
    """A step takes 10 s of a clock by hand: one is due every 25 s, and those of the last hour stay beside the newest."""
    run = make_run(checkpoint__every_steps=1000, checkpoint__every_s=25, checkpoint__keep=1, checkpoint__keep_newer_than_s=3600)
    run.clock = lambda: 10.0 * run.version()

    async def age_the_first(_: TrainerLoop) -> None:
        for last in (3, 6):
            run.feeder.limit = last
            await until_true(lambda last=last: run.checkpoints()[-1:] == [f"step_{last:08d}"])
        assert run.checkpoints() == ["step_00000003", "step_00000006"]
        two_hours_ago = time.time() - 7200
        os.utime(run.config.run_dir / "checkpoints" / "step_00000003" / COMPLETE, (two_hours_ago, two_hours_ago))
        run.feeder.limit, run.feeder.ends = 10, True

    async with run.feeding(0, ends=False):
        await run.trainer(age_the_first)
    assert run.checkpoints() == ["step_00000006", "step_00000009", "step_00000010"]
    assert_every_step_once(run, 10)
