"""From the completions of one version to the figures of its evaluation."""

from __future__ import annotations

import itertools
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from hashlib import blake2b
from pathlib import Path
from typing import Any

from async_rl.errors import EngineError
from async_rl.evaluation.pass_at_k import estimate_pass_at_k
from async_rl.run_dir.evaluations import Evaluation, EvaluationFigures
from async_rl.run_dir.files import read_json_lines
from protocol.messages import FinishReason, PromptTask, TrajectoryGroup


@dataclass(frozen=True, slots=True)
class PromptResult:
    """What one held-out prompt gave: a reward for each completion (None: invalid), its length, and whether it was cut."""

    task_id: str
    group: str
    rewards: tuple[float | None, ...]
    tokens: tuple[int, ...]
    truncated: tuple[bool, ...]


def prompt_result(group: TrajectoryGroup, name: str, *, version: int) -> PromptResult:
    """Raises: EngineError if a token was not sampled by `version`, or under a KV cache of another one."""
    for trajectory in group.trajectories:
        other = [span for span in trajectory.versions if (span.version, span.kv_version) != (version, version)]
        if other:
            raise EngineError(
                f"evaluation of version {version}: task {group.task_id} has tokens of version {other[0].version} "
                f"(KV of {other[0].kv_version}); samples of two versions are no evaluation of either"
            )
    rewards = [None if trajectory.reward is None else trajectory.reward.value for trajectory in group.trajectories]
    return PromptResult(
        task_id=group.task_id,
        group=name,
        rewards=tuple(rewards),
        tokens=tuple(trajectory.num_sampled for trajectory in group.trajectories),
        truncated=tuple(trajectory.finish_reason is FinishReason.LENGTH for trajectory in group.trajectories),
    )


def figures(results: Sequence[PromptResult], ks: Sequence[int], *, success: float) -> EvaluationFigures:
    """Figures of some prompts."""
    valid = [[reward for reward in result.rewards if reward is not None] for result in results]
    counts = [(len(rewards), sum(reward >= success for reward in rewards)) for rewards in valid]
    estimates = {k: estimate_pass_at_k(counts, k) for k in sorted(set(ks))}
    scored = [[reward is not None for reward in result.rewards] for result in results]
    tokens = [n for result, ok in zip(results, scored, strict=True) for n in itertools.compress(result.tokens, ok)]
    truncated = [cut for result, ok in zip(results, scored, strict=True) for cut in itertools.compress(result.truncated, ok)]
    return EvaluationFigures(
        prompts=len(results),
        samples=sum(len(rewards) for rewards in valid),
        num_invalid=sum(reward is None for result in results for reward in result.rewards),
        pass_at={k: estimate for k, estimate in estimates.items() if estimate is not None},
        reward_mean=_mean([sum(rewards) / len(rewards) for rewards in valid if rewards]),
        tokens_mean=_mean(tokens),
        truncated_share=_mean(truncated),
    )


def evaluation(
    results: Sequence[PromptResult],
    ks: Sequence[int],
    *,
    success: float,
    step: int,
    time_s: float,
    seconds: float,
    temperature: float,
) -> Evaluation:
    """Figures of all prompts, and of those of each name if there are several."""
    names = sorted({result.group for result in results})
    by_source = {name: figures([r for r in results if r.group == name], ks, success=success) for name in names}
    total = figures(results, ks, success=success)
    return Evaluation(step, time_s, seconds, temperature, total, by_source)


def _mean(values: Sequence[float]) -> float | None:
    return sum(values) / len(values) if values else None


class PartialResults:
    """What an evaluation has so far, in a file: whoever is started again samples only the rest.

    Equal tasks draw equal seeds, so the rest is what it would have been. Results of other tasks (another temperature, other
    prompts) lie under another name.
    """

    def __init__(self, directory: Path, tasks: Sequence[PromptTask]) -> None:
        self.path = directory / f"results-{_fingerprint(tasks)}.jsonl"

    def read(self) -> dict[str, PromptResult]:
        """Results by task id."""
        return {result.task_id: result for result in map(_result, read_json_lines(self.path))}


def _result(record: Mapping[str, Any]) -> PromptResult:
    return PromptResult(
        task_id=str(record["task_id"]),
        group=str(record["group"]),
        rewards=tuple(record["rewards"]),
        tokens=tuple(record["tokens"]),
        truncated=tuple(record["truncated"]),
    )


def _fingerprint(tasks: Sequence[PromptTask]) -> str:
    what = [
        (task.task_id, task.prompt, task.columns, task.seed, task.group_size, task.temperature, task.max_new_tokens)
        for task in tasks
    ]
    return blake2b(json.dumps(what, sort_keys=True, default=list).encode(), digest_size=8).hexdigest()
