"""What a rollout worker does once its command line is read."""

from __future__ import annotations

from functools import partial
from typing import cast

import torch

from async_rl.environments.base import Environment, GroupScorer
from async_rl.environments.load import close_environment, load_environment
from async_rl.model.tokenizer import load_tokenizer, stop_token_ids
from async_rl.registry.redis_registry import RedisRegistry
from async_rl.reward.score import score_episode, score_group
from async_rl.rollout.chat import Tokenizer
from async_rl.rollout.engine import RolloutEngine
from async_rl.rollout.engines import make_engine
from async_rl.rollout.group import GroupRollout, RolloutLimits
from async_rl.rollout.loop import RolloutLoop, RolloutSettings
from async_rl.weights.receiver import Receiver
from protocol import event_loop
from workers.arguments import RoleArguments
from workers.connect import connect, run_until_stopped


def serve(arguments: RoleArguments) -> None:
    """Start the engine and serve tasks until the run has ended or SIGTERM asks to drain."""
    torch.set_num_threads(arguments.config.rollout.num_threads)
    event_loop.run(_serve(arguments))


async def _serve(arguments: RoleArguments) -> None:
    config = arguments.config
    engine = make_engine(config.model.path, config.rollout, f"engine-{arguments.worker_id}", index=arguments.index)
    try:
        await engine.start()
        await _work(arguments, engine)
    finally:
        await engine.close()


async def _work(arguments: RoleArguments, engine: RolloutEngine) -> None:
    config = arguments.config
    streams = connect(arguments)
    await streams.open()
    registry = RedisRegistry(streams.client, arguments.run_id)
    receiver = Receiver(engine, registry, config.weights, engine_id=engine.engine_id, worker_id=arguments.worker_id)
    settings = RolloutSettings(
        worker_id=arguments.worker_id,
        max_groups_in_flight=config.rollout.max_groups_in_flight,
        lease_s=config.redis.lease_s,
        drain_s=config.launch.drain_s,
        max_deliveries=config.redis.max_deliveries,
        reopen_wait_s=config.redis.retry_s,
        unscored=config.reward.placement == "workers",
        progress_s=config.redis.progress_timeout_s,
        metrics_path=arguments.layout.worker_metrics_jsonl(f"rollout-{arguments.index}"),
    )
    environment = load_environment(config.environment)
    loop = RolloutLoop(streams, registry, engine, _group_rollout(arguments, engine, environment), receiver, settings)
    try:
        await run_until_stopped(loop.run(), loop.stop)
    finally:
        await close_environment(environment)
        await registry.close()
        await streams.close()


def _group_rollout(arguments: RoleArguments, engine: RolloutEngine, environment: Environment) -> GroupRollout:
    config = arguments.config
    tokenizer = load_tokenizer(config.model.path)
    limits = RolloutLimits(
        config.rollout.max_turns,
        engine.max_context,
        config.rollout.max_new_tokens,
        max_sampled=config.rollout.max_sampled,
        max_s=config.rollout.max_trajectory_s,
    )
    inline = config.reward.placement == "inline"
    score = partial(score_episode, environment, timeout_s=config.reward.timeout_s)
    score_together = partial(score_group, environment, timeout_s=config.reward.timeout_s)
    return GroupRollout(
        engine,
        cast(Tokenizer, tokenizer),
        environment,
        limits,
        worker_id=arguments.worker_id,
        stop_token_ids=stop_token_ids(config.model.path, tokenizer),
        score=score if inline else None,
        score_group=score_together if inline and isinstance(environment, GroupScorer) else None,
        score_session=partial(score_episode, timeout_s=config.reward.timeout_s),
        observe_timeout_s=config.reward.timeout_s,
        skip_long_prompts=config.data.on_long_prompt == "skip",
    )
