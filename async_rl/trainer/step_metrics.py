"""One line of metrics.jsonl per optimizer step. Units in the names; shares are of what the name says, in [0, 1]."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from async_rl.algorithms.staleness import Verdict
from async_rl.trainer.critic import CriticStats
from async_rl.trainer.intake import ComposedStep
from async_rl.trainer.step import StepStats
from async_rl.trainer.value_credit import ValueTargets


def group_metrics(step: ComposedStep) -> dict[str, Any]:
    """What the groups of a step say: rewards, lag, what was dropped, masked or invalid, lengths, latencies."""
    verdicts = [verdict for group in step.verdicts for verdict in group.trajectories]
    trajectories = [trajectory for group in step.groups for trajectory in group.trajectories]
    counts = Counter(verdict.verdict for verdict in verdicts)
    lags = [verdict.lag for verdict in verdicts if verdict.trains and verdict.lag is not None]
    in_flight_lags = [v.lag_in_flight for v in verdicts if v.trains and v.lag_in_flight is not None]
    queue_lags = [verdict.lag_in_queue for verdict in verdicts if verdict.trains and verdict.lag_in_queue is not None]
    tokens = sum(verdict.num_tokens for verdict in verdicts)
    masked = sum(verdict.num_masked for verdict in verdicts)
    rewards = [t.reward.value for t in trajectories if t.reward is not None and t.reward.value is not None]
    errors = Counter(t.reward.error_type for t in trajectories if t.reward is not None and t.reward.error_type is not None)
    return {
        "groups": len(step.groups),
        "trajectories": len(trajectories),
        "reward_mean": _mean(rewards),
        "reward_std": float(np.std(rewards)) if rewards else None,
        "rewards_invalid": dict(errors),
        "groups_without_signal": sum(_equal_rewards(group.trajectories) for group in step.groups),
        "lag_mean": _mean(lags),
        "lag_max": max(lags, default=None),
        "lag_histogram": {str(lag): count for lag, count in sorted(Counter(lags).items())},
        "lag_in_flight_mean": _mean(in_flight_lags),
        "lag_in_flight_max": max(in_flight_lags, default=None),
        "lag_in_queue_mean": _mean(queue_lags),
        "trajectories_dropped": counts[Verdict.DROP],
        "trajectories_masked": counts[Verdict.MASK],
        "trajectories_invalid": counts[Verdict.INVALID],
        "tokens_masked": masked,
        "tokens_masked_share": masked / tokens if tokens else 0.0,
        "length_mean_trained": _mean([v.num_tokens for v in verdicts if v.trains]),
        "length_mean_masked": _mean([v.num_tokens for v in verdicts if v.verdict is Verdict.MASK]),
        "length_mean_discarded": _mean([v.num_tokens for v in verdicts if not v.trains]),
        "generate_s_mean": _mean([t.timings.generate_s for t in trajectories]),
        "queued_s_mean": _mean([t.timings.queued_s for t in trajectories]),
    }


def step_stats_metrics(stats: StepStats) -> dict[str, Any]:
    """The trainer's own figures of a step, for its metrics line."""
    sums, report = stats.loss_sums, stats.off_policy
    tokens = max(stats.num_trained_tokens, 1)
    squared = sums["weight_squared_sum"]
    return {
        "loss": stats.loss,
        "grad_norm": stats.grad_norm,
        "learning_rate": stats.learning_rate,
        "tokens": stats.num_trained_tokens,
        "sequences": stats.num_trained_sequences,
        "tokens_forward": stats.num_tokens,
        "micro_batches": stats.num_micro_batches,
        "entropy": stats.entropy,
        "kl_reference": stats.kl,
        "loss_ratio_mean": sums["ratio_sum"] / tokens,
        "importance_weight_mean": sums["weight_sum"] / tokens,
        "effective_sample_share": sums["weight_sum"] ** 2 / (tokens * squared) if squared else None,
        "clipped_share": sums["num_clipped"] / tokens,
        "truncated_share": sums["num_truncated"] / tokens,
        "importance_masked_share": sums["num_masked"] / tokens,
        "clamped_tokens": sums["num_clamped"],
        "behavior_gap_max": report.log_ratio_max_abs,
        "behavior_gap_mean": -report.k1,
        "ess_token": report.ess_token,
        "ess_sequence": report.ess_sequence,
        "kl_behavior_k1": report.k1,
        "kl_behavior_k3": report.k3,
        "ratio_mean": report.ratio_mean,
        "ratio_min": report.ratio_min,
        "ratio_p01": report.ratio_p01,
        "ratio_p50": report.ratio_p50,
        "ratio_p99": report.ratio_p99,
        "ratio_max": report.ratio_max,
        "lag_token_mean": report.lag_token_mean,
        "lag_token_max": report.lag_token_max,
        "same_version_tokens": report.same_version_tokens,
        "same_version_gap_max": report.same_version_gap_max,
        "same_version_gap_mean": report.same_version_gap_mean,
    }


def critic_metrics(targets: ValueTargets, stats: CriticStats | None) -> dict[str, Any]:
    """The critic's figures of a step; stats is None where the policy's step was skipped, and with it the critic's."""
    return {
        "explained_variance": targets.explained_variance,
        "value_mean": targets.value_mean,
        "return_mean": targets.return_mean,
        "value_loss": None if stats is None else stats.loss,
        "value_clipped_share": None if stats is None else stats.clipped_share,
        "critic_grad_norm": None if stats is None else stats.grad_norm,
        "critic_learning_rate": None if stats is None else stats.learning_rate,
        "critic_updates": 0 if stats is None else stats.num_updates,
        "critic_skip_reason": None if stats is None or stats.skip_reason is None else stats.skip_reason.value,
    }


def logprob_mismatch(line: Mapping[str, Any], *, tolerance: float) -> float | None:
    """The largest |policy − behavior| logprob (nats) over the step's tokens that the version it starts from sampled, if it is
    above `tolerance`: there, both are one number, and engine and trainer disagree on tokens, positions or temperature. None
    without such tokens: newer weights move the logprobs.
    """
    gap = line.get("same_version_gap_max")
    return None if line.get("skip_reason") is not None or gap is None or gap <= tolerance else float(gap)


def _mean(values: Sequence[float]) -> float | None:
    return float(np.mean(values)) if values else None


def _equal_rewards(trajectories: Sequence[Any]) -> bool:
    values = {t.reward.value for t in trajectories if t.reward is not None and t.reward.value is not None}
    return len(values) < 2
