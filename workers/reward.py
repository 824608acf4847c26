"""async-rl-reward: one reward worker, scoring in processes of its own."""

from __future__ import annotations

import os
from collections.abc import Sequence

from async_rl.environments.episodes import Decode
from async_rl.reward.loop import RewardLoop, RewardSettings
from async_rl.reward.pool import ScoringPool
from protocol import event_loop
from workers.arguments import RoleArguments, role_main
from workers.connect import connect, run_until_stopped


def main() -> None:
    role_main("reward", run)


def run(arguments: RoleArguments) -> None:
    """Start the scoring processes and score until the run has ended or SIGTERM asks to drain."""
    event_loop.run(_score(arguments))


async def _score(arguments: RoleArguments) -> None:
    config = arguments.config
    pool = ScoringPool(
        config.environment, processes=num_processes(config.reward.max_concurrent), timeout_s=config.reward.timeout_s
    )
    streams = connect(arguments)
    settings = RewardSettings(
        worker_id=arguments.worker_id,
        max_concurrent=config.reward.max_concurrent,
        lease_s=config.redis.lease_s,
        drain_s=config.launch.drain_s,
        max_deliveries=config.redis.max_deliveries,
        reopen_wait_s=config.redis.retry_s,
        metrics_path=arguments.layout.worker_metrics_jsonl(f"reward-{arguments.index}"),
    )
    try:
        await pool.start()
        score_group = pool.score_group if pool.scores_groups else None
        loop = RewardLoop(streams, pool.score, _decoder(arguments), settings, score_group=score_group)
        await run_until_stopped(loop.run(), loop.stop)
    finally:
        await pool.close()
        await streams.close()


def num_processes(max_concurrent: int) -> int:
    """Scoring processes of one worker: one per processor, two at least, and no more than there can be groups."""
    return min(max_concurrent, max(2, os.cpu_count() or 1))


def _decoder(arguments: RoleArguments) -> Decode:
    from async_rl.model.tokenizer import load_tokenizer  # transformers takes seconds, which --help and --dry-run do without

    tokenizer = load_tokenizer(arguments.config.model.path)

    def decode(token_ids: Sequence[int]) -> str:
        return str(tokenizer.decode(list(token_ids), skip_special_tokens=True))

    return decode


if __name__ == "__main__":
    main()
