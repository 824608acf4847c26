"""`async-rl validate`: what a run trained, looked at again from its log and its checkpoints."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from async_rl.algorithms.parity import Floats, Guess, ParityLimit, comparable, compare
from async_rl.algorithms.records import explain, record_fault
from async_rl.algorithms.staleness import InvalidReason
from async_rl.checks.validate import Check, ValidationReport
from async_rl.config.run import RunConfig
from async_rl.errors import CheckpointError
from async_rl.launch.look import config_of_run
from async_rl.run_dir.intake_log import LogIndex, read_group, read_log
from async_rl.run_dir.layout import RunLayout, open_run
from async_rl.trainer.assemble import rounds
from async_rl.trainer.checkpoint import completed, model_state, open_checkpoint
from async_rl.trainer.credit import Credit
from async_rl.trainer.intake import recorded_step
from async_rl.trainer.policy import PolicyModel, PolicyOptions, load_head, load_policy
from async_rl.trainer.quarantine import Quarantine
from protocol.codec import decode_group
from protocol.messages import Trajectory, TrajectoryGroup


def validate_run(run_dir: Path, *, tokens: int) -> ValidationReport:
    """Look at every group in the log, and recompute up to `tokens` logprobs of each version whose weights are at hand.

    Raises: RunDirError, IntakeLogError; ConfigError if the model cannot be loaded.
    """
    config = config_of_run(run_dir)
    layout, _ = open_run(run_dir)
    index = read_log(layout.intake_dir)
    quarantine = Quarantine(config.model_copy(update={"run_dir": run_dir}))
    records = [_records(layout, index, quarantine), _versions(layout, index), _rewards(layout, index)]
    return ValidationReport([*records, _credit(config, layout, index), _Parity(config, layout, index, quarantine).run(tokens)])


def _groups(layout: RunLayout, index: LogIndex) -> Iterator[TrajectoryGroup]:
    for task_id in index.groups:
        yield _group(layout, index, task_id)


def _group(layout: RunLayout, index: LogIndex, task_id: str) -> TrajectoryGroup:
    return decode_group(read_group(layout.intake_dir, task_id, index.groups[task_id]))


def _records(layout: RunLayout, index: LogIndex, quarantine: Quarantine) -> Check:
    check = Check("masks, stop tokens, lengths, finiteness", "trajectories")
    for group in _groups(layout, index):
        for member, trajectory in enumerate(group.trajectories):
            check.count()
            fault = record_fault(trajectory)
            if fault is not None:
                words = explain(trajectory, fault)
                check.fail(f"{group.task_id}[{member}]: {words}")
                quarantine.add(group, member, InvalidReason(fault.value), words)
    return check


def _versions(layout: RunLayout, index: LogIndex) -> Check:
    """No token is newer than the step that trains it, and its KV no newer than itself."""
    check = Check("versions", "trajectories")
    trained_at = {use.task_id: record.version for record in index.steps if record.trains for use in record.groups}
    for group in _groups(layout, index):
        at = trained_at.get(group.task_id)
        for member, trajectory in enumerate(group.trajectories):
            check.count()
            newest = max((span.version for span in trajectory.versions), default=0)
            if at is not None and newest > at:
                check.fail(f"{group.task_id}[{member}]: sampled by version {newest}, trained by the step from version {at}")
            if any(span.kv_version > span.version for span in trajectory.versions):
                check.fail(f"{group.task_id}[{member}]: a KV cache newer than the version that sampled with it")
    return check


def _rewards(layout: RunLayout, index: LogIndex) -> Check:
    check = Check("rewards", "trajectories")
    for group in _groups(layout, index):
        for member, trajectory in enumerate(group.trajectories):
            check.count()
            value = None if trajectory.reward is None else trajectory.reward.value
            if value is not None and not np.isfinite(value):
                check.fail(f"{group.task_id}[{member}]: its reward is {value}")
    return check


def _credit(config: RunConfig, layout: RunLayout, index: LogIndex) -> Check:
    """Advantages, computed again, are finite and lie on trained tokens only."""
    check = Check("advantages", "samples")
    credit = Credit.from_config(config.algorithm)
    for record in index.steps:
        if record.trains and all(use.task_id in index.groups for use in record.groups):
            for sample in credit.samples(recorded_step(record, partial(_group, layout, index))):
                check.count()
                if not np.isfinite(sample.advantages).all() or sample.advantages[~sample.loss_mask].any():
                    check.fail(f"{sample.task_id}[{sample.member}]: advantages that are not finite, or off the loss mask")
    return check


class _Parity:
    """Recorded logprobs against those of the weights that sampled them."""

    def __init__(self, config: RunConfig, layout: RunLayout, index: LogIndex, quarantine: Quarantine) -> None:
        self._config = config
        self._layout = layout
        self._index = index
        self._quarantine = quarantine
        self._check = Check("logprobs, recomputed at equal versions", "tokens")

    def run(self, tokens: int) -> Check:
        options = PolicyOptions(measure_rounding=rounds(self._config))
        policy = load_policy(self._config.model.path, options=options)
        noise = policy.rounding_noise
        limit = ParityLimit(self._config.validation.tolerance) if noise is None else ParityLimit(10 * noise, "mean")
        seen = []
        for version, state in self._weights(policy):
            policy.hf.load_state_dict(state, strict=False)
            if self._compare(policy, version, limit, tokens):
                seen.append(version)
        self._check.note = f"versions {', '.join(map(str, seen))}" if seen else "no weights of a version that sampled"
        return self._check

    def _weights(self, policy: PolicyModel) -> Iterator[tuple[int, Mapping[str, Any]]]:
        """What the run began with, then its checkpoints; damaged ones are left out."""
        yield 0, {name: tensor.clone() for name, tensor in policy.hf.state_dict().items()}
        for path in reversed(completed(self._layout.checkpoints_dir)):
            try:
                checkpoint = open_checkpoint(path)
            except CheckpointError:
                continue
            yield checkpoint.meta["version"], model_state(checkpoint.path)

    def _compare(self, policy: PolicyModel, version: int, limit: ParityLimit, tokens: int) -> int:
        """Compare up to `tokens` tokens that `version` sampled; returns how many it did."""
        room = tokens
        for group in _groups(self._layout, self._index):
            for member, trajectory in enumerate(group.trajectories):
                where = comparable(trajectory, version) if record_fault(trajectory) is None else None
                if where is None or not where.any() or len(trajectory.token_ids) > room:
                    continue
                room -= len(trajectory.token_ids)
                own = _score(policy, trajectory, trajectory.sampling.temperature)
                report = compare(trajectory, own, where, limit, self._guesses(policy, trajectory, version))
                self._check.count(report.num_tokens)
                if not report.holds:
                    self._check.fail(f"{group.task_id}[{member}], version {version}: {report.reason}")
                    self._quarantine.add(group, member, InvalidReason.LOGPROBS_DIFFER, report.reason, own)
        return tokens - room

    def _guesses(self, policy: PolicyModel, trajectory: Trajectory, version: int) -> list[Guess]:
        temperature = trajectory.sampling.temperature
        guesses = []
        if temperature != 1.0:
            reason = f"behavior logprobs are those at temperature 1, but the tokens were sampled at {temperature:g}"
            guesses.append(Guess(reason, lambda: _score(policy, trajectory, 1.0)))
        if version > 0:
            reason = f"engine {trajectory.engine_id} computes with the output head of version 0: pushes do not reach it"
            guesses.append(Guess(reason, lambda: _score(policy, trajectory, temperature, head=self._config.model.path)))
        return guesses


def _score(policy: PolicyModel, trajectory: Trajectory, temperature: float, *, head: Path | None = None) -> Floats:
    weight = None if head is None else load_head(head, policy)
    (scores,) = policy.score([trajectory.token_ids.tolist()], temperature=temperature, head_weight=weight)
    return np.concatenate(([0.0], scores.astype(np.float64)))
