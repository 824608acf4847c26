"""`async-rl replay`: train again from the intake log, in memory, and compare with what the run's trainer wrote.

No rollouts, no server: the log says which groups each step trained, in which order and with which verdicts. On one build, one
thread count and one number of ranks the weights come out bit for bit.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import torch
import xxhash
from torch import Tensor

from async_rl.config.run import RunConfig
from async_rl.errors import CheckpointError, IntakeLogError
from async_rl.run_dir.intake_log import LogIndex, read_group, read_log
from async_rl.run_dir.layout import RunIdentity, RunLayout, open_run
from async_rl.trainer.assemble import make_learner
from async_rl.trainer.checkpoint import (
    CRITIC,
    MODEL,
    Checkpoint,
    checkpoint_of_step,
    completed,
    find_latest,
    model_state,
    open_checkpoint,
)
from async_rl.trainer.distributed import joined_ranks
from async_rl.trainer.intake import BatchSettings, planned_steps, recorded_step
from async_rl.trainer.learner import Learner
from async_rl.trainer.progress import Progress
from protocol.codec import decode_group
from protocol.messages import TrajectoryGroup


@dataclass(frozen=True, slots=True)
class ReplayResult:
    """From and to which policy version was trained, the digest of the weights, and how far they are from the checkpoint's."""

    first_version: int
    version: int
    steps: int
    digest: str
    checkpoint: Path
    is_identical: bool
    max_difference: float


def replay(
    config: RunConfig, *, start: int | None = None, on_step: Callable[[int, int], object] = lambda done, total: None
) -> ReplayResult:
    """Train the run in config.run_dir again up to its newest complete checkpoint, on one rank.

    start: policy version of the checkpoint to begin from; None: from what the run began with. on_step is called with
    the steps done and their number. Raises: CheckpointError, IntakeLogError; the latter names the earliest start if the log
    was compacted.
    """
    layout, identity = open_run(config.run_dir)
    target = newest_checkpoint(layout.checkpoints_dir)
    index = read_log(layout.intake_dir)
    origin = _origin(layout, identity, index, start)
    alone = config.model_copy(update={"trainer": config.trainer.model_copy(update={"world_size": 1})})
    with joined_ranks(1, device=config.trainer.device) as ranks:
        learner = make_learner(alone, ranks)
        progress = Progress() if origin is None else learner.load(origin)
        first_version = progress.version
        end = Progress.from_checkpoint(target).records_applied
        total = end - progress.records_applied
        for done in train_again(learner, layout, index, progress, end=end, settings=BatchSettings.from_config(config)):
            on_step(done, total)
        weights = learner.full_weights()
    expected = model_state(target.path)
    expected |= {f"{CRITIC}{name}": tensor for name, tensor in model_state(target.path, CRITIC + MODEL).items()}
    return ReplayResult(
        first_version=first_version,
        version=progress.version,
        steps=total,
        digest=weights_digest(weights),
        checkpoint=target.path,
        is_identical=progress.version == target.step and _identical(weights, expected),
        max_difference=_max_difference(weights, expected),
    )


def train_again(
    learner: Learner, layout: RunLayout, index: LogIndex, progress: Progress, *, end: int, settings: BatchSettings
) -> Iterator[int]:
    """Apply the step records from progress.records_applied up to `end`; yields how many are done after each."""
    read = partial(_group, layout.intake_dir, index)
    records = [record for record in index.steps_from(progress.records_applied) if record.step < end]
    for done, record in enumerate(records, start=1):
        progress.records_applied = record.step + 1
        if record.trains:
            step = recorded_step(record, read)
            if record.batch == record.step:
                learner.begin_batch([step, *planned_steps(record, read, settings)])
            progress.version += learner.train(step).skip_reason is None
        yield done


def newest_checkpoint(directory: Path) -> Checkpoint:
    """Raises: CheckpointError if there is no complete one, with why each candidate is none."""
    found = find_latest(directory)
    if found.latest is None:
        why = "; ".join(skipped.reason for skipped in found.skipped) or "none was written yet"
        raise CheckpointError(f"{directory} has no complete checkpoint: {why}")
    return found.latest


def weights_digest(weights: Mapping[str, Tensor]) -> str:
    """xxh3-128 over names and bytes, in order of the names."""
    digest = xxhash.xxh3_128()
    for name in sorted(weights):
        digest.update(name.encode())
        digest.update(weights[name].detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes())
    return str(digest.hexdigest())


def _origin(layout: RunLayout, identity: RunIdentity, index: LogIndex, start: int | None) -> Checkpoint | None:
    """The checkpoint to begin from; None: the model of the config. Raises: CheckpointError, IntakeLogError."""
    if start is not None:
        origin = checkpoint_of_step(layout.checkpoints_dir, start)
        if origin.meta["records_applied"] >= index.base_step:
            return origin
    elif index.base_step == 0 and identity.forked_from is None:
        return None
    elif index.base_step == 0:
        return checkpoint_of_step(layout.checkpoints_dir, identity.first_version)
    begin = "the beginning" if start is None else f"step {start}"
    earliest = _earliest(layout.checkpoints_dir, index)
    hint = "no checkpoint above it is left" if earliest is None else f"the earliest start is --from {earliest}"
    raise IntakeLogError(f"{layout.intake_dir} cannot be replayed from {begin}: it was compacted since; {hint}")


def _earliest(directory: Path, index: LogIndex) -> int | None:
    """Step of the oldest usable checkpoint that the log reaches back to."""
    for path in reversed(completed(directory)):
        try:
            checkpoint = open_checkpoint(path)
        except CheckpointError:
            continue  # damaged: another one may do
        if checkpoint.meta["records_applied"] >= index.base_step:
            return checkpoint.step
    return None


def _group(directory: Path, index: LogIndex, task_id: str) -> TrajectoryGroup:
    return decode_group(read_group(directory, task_id, index.groups[task_id]))


def _identical(weights: Mapping[str, Tensor], expected: Mapping[str, Tensor]) -> bool:
    return weights.keys() == expected.keys() and all(torch.equal(weights[name].cpu(), expected[name]) for name in weights)


def _max_difference(weights: Mapping[str, Tensor], expected: Mapping[str, Tensor]) -> float:
    common = weights.keys() & expected.keys()
    return max((float((weights[name].cpu() - expected[name]).abs().max()) for name in common), default=float("nan"))
