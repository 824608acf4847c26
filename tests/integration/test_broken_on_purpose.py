"""Runs in one process, broken on purpose: each fault is named, with a message of its own, before it can train much."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
import torch
from rich.console import Console

from async_rl.checks.validate import print_report
from async_rl.config import RunConfig, load_config
from async_rl.config.dump import dump_toml
from async_rl.launch.validate import validate_run
from async_rl.run_dir.intake_log import IntakeLog
from async_rl.run_dir.layout import RunLayout, create_run
from async_rl.testing.builders import make_group, make_task, make_trajectory
from async_rl.testing.tiny_models import EOS_ID, save_tiny_model
from async_rl.trainer.distributed import Ranks, joined_ranks
from async_rl.trainer.intake import BatchSettings, Intake
from async_rl.trainer.learner import Learner
from async_rl.trainer.policy import load_policy
from async_rl.trainer.quarantine import Quarantine
from async_rl.trainer.vetting import Vetting
from protocol.codec import encode
from protocol.memory_streams import MemoryStreams
from protocol.messages import Trajectory, TrajectoryGroup
from protocol.streams import IssuedTask, Publication, Stream
from protocol.versions import VersionSpan

TEMPERATURE = 0.6
Break = Callable[["Loop", Trajectory], Trajectory]


@pytest.fixture(scope="module")
def ranks() -> Iterator[Ranks]:
    with joined_ranks() as joined:
        yield joined


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tiny_model(tmp_path_factory.mktemp("model"), sharpness=3.0)


@dataclass
class Loop:
    """Coordinator, engine and trainer of a run in one process: `broken` is what the engine does wrong."""

    config: RunConfig
    learner: Learner
    intake: Intake
    streams: MemoryStreams
    epoch: int
    broken: Break | None
    version: int = 0
    rng: np.random.Generator = field(default_factory=lambda: np.random.default_rng(0))

    def __post_init__(self) -> None:
        self.quarantine = Quarantine(self.config)
        self.vetting = Vetting(self.config, self.learner, self.quarantine)
        self.intake._on_invalid = self.quarantine.add_invalid
        self.counts: dict[str, int] = {}

    def trajectory(self, reward: float) -> Trajectory:
        """Two turns with a tool's answer between, random tokens, logprobs as the policy has them now."""
        ids = self.rng.integers(3, 22, 14).tolist()
        ids[13] = EOS_ID
        scores = self.learner.scores([np.array(ids, dtype=np.int32)], temperature=TEMPERATURE)[0]
        positions = [*range(4, 8), *range(10, 14)]
        made = make_trajectory(
            prompt_length=4,
            turns=((4, 2), (4, 0)),
            versions=self.version,
            token_ids=ids,
            logprobs=[float(scores[position - 1]) for position in positions],
            reward=reward,
            temperature=TEMPERATURE,
        )
        sampling = msgspec.structs.replace(made.sampling, stop_token_ids=(EOS_ID,))
        made = msgspec.structs.replace(made, sampling=sampling)
        return made if self.broken is None else self.broken(self, made)

    def group(self, row: int) -> TrajectoryGroup:
        trajectories = [self.trajectory(reward) for reward in (1.0, 0.0)]
        return make_group(trajectories, task=make_task(row=row, group_size=2, temperature=TEMPERATURE))

    async def deliver(self, groups: list[TrajectoryGroup]) -> None:
        cursor = (await self.streams.counters()).cursor
        tasks = [IssuedTask(one.task_id, encode(one.task)) for one in groups]
        assert await self.streams.issue(cursor, tasks, next_cursor=cursor + len(tasks))
        await self.streams.heartbeat("w", "rollout", ttl_s=100)
        leased = await self.streams.read(Stream.TASKS, "w", count=len(groups), block_s=0)
        await self.streams.publish(
            [
                Publication(Stream.TASKS, lease.entry_id, Stream.GROUPS, encode(one))
                for lease, one in zip(leased, groups, strict=True)
            ]
        )
        await self.intake.take_in(await self.streams.read_groups(self.epoch, count=100, block_s=0))

    async def step(self) -> dict[str, Any]:
        """Sample, look, compose, train: the figures of the metrics line."""
        row = 2 * self.intake.num_steps + self.intake.discarded
        await self.deliver([self.group(row + offset) for offset in range(2)])
        await self.vetting.vet(self.intake, self.version)
        batch = await self.intake.compose_batch(self.version, steps=1, partial=True)
        result: dict[str, Any] = {}
        if batch:
            await asyncio.to_thread(self.learner.begin_batch, batch)
            outcome = await asyncio.to_thread(self.learner.train, batch[0])
            self.version += outcome.skip_reason is None
            result = dict(outcome.metrics)
        for reason, count in self.quarantine.take_counts().items():
            self.counts[reason] = self.counts.get(reason, 0) + count
        return {**result, **self.vetting.take_figures()}

    def files(self) -> list[str]:
        directory = RunLayout(self.config.run_dir).quarantine_dir
        return [path.read_text() for path in sorted(directory.glob("*.txt"))] if directory.exists() else []


async def make_loop(tmp_path: Path, model: Path, ranks: Ranks, broken: Break | None, *, max_lag: int = 1) -> Loop:
    settings = [
        f"--run_dir={tmp_path / 'run'}",
        f"--model.path={model}",
        f"--staleness.max_lag={max_lag}",
        "--trainer.groups_per_step=2",
        "--trainer.learning_rate=3e-3",
        f"--rollout.temperature={TEMPERATURE}",
    ]
    config = load_config(None, settings, {}).config
    layout, _ = create_run(config.run_dir)
    layout.config_toml.write_text(dump_toml(config))
    streams = MemoryStreams()
    await streams.open()
    epoch = await streams.raise_epoch(1)
    intake = Intake(streams, IntakeLog.open(layout.intake_dir, epoch=epoch), BatchSettings.from_config(config))
    learner = Learner(config, load_policy(model), ranks)
    return Loop(config, learner, intake, streams, epoch, broken)


def shifted(loop: Loop, trajectory: Trajectory) -> Trajectory:
    logprobs = trajectory.behavior_logprobs.copy()
    for turn in trajectory.turns:
        logprobs[turn.start : turn.end] = np.roll(logprobs[turn.start : turn.end], 1)
    return msgspec.structs.replace(trajectory, behavior_logprobs=logprobs)


def without_temperature(loop: Loop, trajectory: Trajectory) -> Trajectory:
    raw = loop.learner.scores([trajectory.token_ids], temperature=1.0)[0]
    return _with_scores(trajectory, raw)


def stale_head(loop: Loop, trajectory: Trajectory) -> Trajectory:
    scores = loop.learner.scores([trajectory.token_ids], temperature=TEMPERATURE, head=loop.config.model.path)[0]
    return _with_scores(trajectory, scores)


def tool_tokens_unmasked(loop: Loop, trajectory: Trajectory) -> Trajectory:
    """The tool's answer is recorded as if it belonged to one long turn. (In the mask alone it does not pass the wire.)"""
    mask = trajectory.loss_mask.copy()
    mask[8:10] = 1
    first, last = trajectory.turns
    turn = msgspec.structs.replace(last, start=first.start)
    span = VersionSpan(first.start, last.end, loop.version, loop.version)
    return msgspec.structs.replace(trajectory, loss_mask=mask, turns=(turn,), versions=(span,))


def _with_scores(trajectory: Trajectory, scores: Any) -> Trajectory:
    logprobs = np.where(trajectory.loss_mask != 0, np.concatenate(([0.0], scores)), 0.0).astype(np.float32)
    return msgspec.structs.replace(trajectory, behavior_logprobs=logprobs)


@pytest.mark.parametrize(
    ("broken", "reason", "message"),
    [
        (shifted, "logprobs_differ", "shifted by one position, each is that of the token before"),
        (without_temperature, "logprobs_differ", "those at temperature 1, but the tokens were sampled at 0.6"),
        (tool_tokens_unmasked, "logprobs_differ", "2 trained tokens (positions 8, 9) have a logprob of exactly 0: a tool's"),
        (stale_head, "logprobs_differ", "engine engine-0 computes with the output head of version 0"),
    ],
)
async def test_each_fault_is_named_within_20_steps(
    broken: Break, reason: str, message: str, tmp_path: Path, model: Path, ranks: Ranks
) -> None:
    loop = await make_loop(tmp_path, model, ranks, broken)
    steps = 0
    while not loop.counts and steps < 20:
        await loop.step()
        steps += 1
    assert set(loop.counts) == {reason}
    assert steps <= 3  # a stale head shows once the head has moved
    assert message in loop.files()[0]
    assert loop.files()[0].count("\n") == 14 + 5  # a row per token
    report = validate_run(loop.config.run_dir, tokens=4096)
    if broken is not stale_head:  # of version 1 there are no weights on disk
        assert not report.holds
        assert any(message in words for check in report.checks for words in check.examples)


async def test_a_sound_run_is_found_sound_and_its_lag_0_loop_is_on_policy(tmp_path: Path, model: Path, ranks: Ranks) -> None:
    loop = await make_loop(tmp_path, model, ranks, None)
    lines = [await loop.step() for _ in range(4)]
    assert loop.counts == {}
    assert loop.version == 4
    assert all(line["validated_tokens"] == 4 * 8 and line["validation_failed"] == 0 for line in lines)
    assert all(line["same_version_tokens"] == 4 * 8 and line["same_version_gap_max"] < 1e-4 for line in lines)
    assert all(line["ess_sequence"] == pytest.approx(1.0, abs=1e-4) for line in lines)
    report = validate_run(loop.config.run_dir, tokens=4096)
    assert report.holds
    looked = {check.name: check.looked_at for check in report.checks}
    assert looked["masks, stop tokens, lengths, finiteness"] == 16
    assert looked["advantages"] == 16
    assert looked["logprobs, recomputed at equal versions"] == 4 * 8  # those that version 0 sampled
    print_report(report, Console())


async def test_tokens_of_the_version_before_are_recomputed_with_its_weights(tmp_path: Path, model: Path, ranks: Ranks) -> None:
    loop = await make_loop(tmp_path, model, ranks, None)
    await loop.step()
    late = loop.group(100)  # sampled by version 1, arrives when the trainer is at version 2
    await loop.step()
    before = {name: tensor.clone() for name, tensor in loop.learner._policy.named_full_tensors()}
    await loop.deliver([late])
    await loop.vetting.vet(loop.intake, loop.version)
    figures = loop.vetting.take_figures()
    assert (loop.version, loop.learner.kept_version) == (2, 1)
    assert (figures["validated_tokens"], figures["validation_failed"]) == (2 * 8, 0)
    assert all(torch.equal(tensor, before[name]) for name, tensor in loop.learner._policy.named_full_tensors())


async def test_tokens_that_arrive_late_are_recomputed_too(tmp_path: Path, model: Path, ranks: Ranks) -> None:
    """The weights of a version stay until tokens of it were compared, or are too old; then another's take their place."""
    loop = await make_loop(tmp_path, model, ranks, None, max_lag=4)
    late = loop.group(100)
    for _ in range(3):
        await loop.step()
        assert loop.learner.kept_version == 0
    loop.broken = shifted
    broken = loop.group(101)
    loop.broken = None
    await loop.deliver([late])
    await loop.vetting.vet(loop.intake, loop.version)
    assert loop.vetting.take_figures()["validated_tokens"] == 2 * 8
    kept = []
    for _ in range(6):
        await loop.step()
        kept.append(loop.learner.kept_version)
    assert kept == [3, 3, 3, 3, 7, 7]  # at version 8 tokens of version 3 are too old
    await loop.deliver([broken])  # of version 3 as well, whose weights are gone: nothing to compare with
    await loop.vetting.vet(loop.intake, loop.version)
    assert loop.vetting.take_figures()["validated_tokens"] == 0


async def test_a_quarantined_member_is_not_trained_and_its_siblings_are(tmp_path: Path, model: Path, ranks: Ranks) -> None:
    def one_of_two(loop: Loop, trajectory: Trajectory) -> Trajectory:
        reward = trajectory.reward
        return shifted(loop, trajectory) if reward is not None and reward.value == 1.0 else trajectory

    loop = await make_loop(tmp_path, model, ranks, one_of_two)
    line = await loop.step()
    assert loop.counts == {"logprobs_differ": 2}
    assert line["tokens"] == 2 * 8  # of four trajectories, two are left


async def test_bad_numbers_are_quarantined_and_the_batch_goes_on(tmp_path: Path, model: Path, ranks: Ranks) -> None:
    def minus_infinity(loop: Loop, trajectory: Trajectory) -> Trajectory:
        logprobs = trajectory.behavior_logprobs.copy()
        reward = trajectory.reward
        logprobs[5] = -np.inf if reward is not None and reward.value == 1.0 else logprobs[5]
        return msgspec.structs.replace(trajectory, behavior_logprobs=logprobs)

    loop = await make_loop(tmp_path, model, ranks, minus_infinity)
    line = await loop.step()
    assert loop.counts == {"non_finite_logprob": 2}
    assert line["tokens"] == 2 * 8
    assert "not finite" in loop.files()[0]


async def test_the_loop_at_lag_0_is_a_synchronous_loop_step_by_step(tmp_path: Path, model: Path, ranks: Ranks) -> None:
    """Sampling between log, verdicts and packing gives the weights that the plain loop gives: the same samples, one after
    another through the same optimizer, without any of it."""
    from async_rl.trainer.credit import Credit
    from async_rl.trainer.objective import step_settings
    from async_rl.trainer.packing import pack
    from async_rl.trainer.step import make_optimizer, train_step

    loop = await make_loop(tmp_path, model, ranks, None)
    plain = load_policy(model)
    optimizer = make_optimizer(plain, learning_rate=3e-3)
    credit, settings = Credit.from_config(loop.config.algorithm), step_settings(loop.config, on_micro_batch=lambda index: None)
    seen = []
    compose = loop.intake.compose_batch

    async def remember(*args: Any, **kwargs: Any) -> Any:
        batch = await compose(*args, **kwargs)
        seen.extend(batch)
        return batch

    loop.intake.compose_batch = remember  # type: ignore[method-assign]
    for _ in range(3):
        await loop.step()
        samples = credit.samples(seen[-1])
        one_by_one = [m for sample in samples for m in pack([sample], 1000)]
        train_step(plain, optimizer, one_by_one, settings=settings, learning_rate=3e-3)
        for (name, mine), (_, other) in zip(plain.named_full_tensors(), loop.learner._policy.named_full_tensors(), strict=True):
            torch.testing.assert_close(mine, other, rtol=0, atol=3e-5, msg=lambda text, name=name: f"{name}: {text}")
