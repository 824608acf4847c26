"""Evaluate a model directory with the built-in engine, standing alone: no trainer, no queue."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import cast

from async_rl.config import RunConfig
from async_rl.environments.load import close_environment, load_environment
from async_rl.evaluation.held_out import EvaluationPlan, EvaluationResult, evaluate
from async_rl.model.tokenizer import load_tokenizer, stop_token_ids
from async_rl.reward.score import score_episode
from async_rl.rollout.chat import Tokenizer
from async_rl.rollout.group import GroupRollout, RolloutLimits
from async_rl.rollout.torch_engine import TorchEngine


def evaluate_model(
    config: RunConfig,
    model_dir: Path,
    plan: EvaluationPlan,
    *,
    on_progress: Callable[[int, int], None] = lambda done, total: None,
) -> EvaluationResult:
    """Sample held-out prompts of the config's environment with the model at `model_dir`, exactly as a rollout worker would.

    Raises: ConfigError if the environment has no held-out prompts; DataError if the model cannot be read; EngineError.
    """
    return asyncio.run(_evaluate(config, model_dir, plan, on_progress))


async def _evaluate(
    config: RunConfig, model_dir: Path, plan: EvaluationPlan, on_progress: Callable[[int, int], None]
) -> EvaluationResult:
    environment = load_environment(config.environment)
    tokenizer = load_tokenizer(model_dir)
    engine = TorchEngine(model_dir, config.rollout, "evaluation")
    await engine.start()
    try:
        await engine.serve(0)
        rollout = GroupRollout(
            engine,
            cast(Tokenizer, tokenizer),
            environment,
            RolloutLimits(config.rollout.max_turns, engine.max_context, plan.max_new_tokens),
            worker_id="evaluation",
            stop_token_ids=stop_token_ids(model_dir, tokenizer),
            score=partial(score_episode, environment, timeout_s=config.reward.timeout_s),
            score_session=partial(score_episode, timeout_s=config.reward.timeout_s),
        )

        def decode(ids: Sequence[int]) -> str:
            return str(tokenizer.decode(list(ids), skip_special_tokens=True))

        return await evaluate(rollout.run, environment, decode, plan, on_progress=on_progress)
    finally:
        await close_environment(environment)
        await engine.close()
