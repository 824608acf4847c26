"""What a trainer rank does once its command line is read."""

from __future__ import annotations

import signal

from async_rl.registry.redis_registry import RedisRegistry
from async_rl.trainer.assemble import make_learner
from async_rl.trainer.distributed import Ranks, joined_ranks
from async_rl.trainer.learner import Learner
from async_rl.trainer.loop import TrainerLoop, TrainerResult
from protocol import event_loop
from workers.arguments import RoleArguments
from workers.connect import STOP_SIGNALS, STOPPED, connect, run_until_stopped


def train(arguments: RoleArguments) -> None:
    """Join the ranks, load the policy, train (rank 0) or follow."""
    config = arguments.config.trainer
    dump_after_s = arguments.config.redis.progress_timeout_s
    with joined_ranks(
        config.world_size,
        device=config.device,
        timeout_s=config.idle_timeout_s,
        dump_after_s=dump_after_s,
        shard_size=config.shard_size,
        watchdog_s=config.watchdog_s,
    ) as ranks:
        learner = make_learner(arguments.config, ranks)
        if not ranks.is_first:
            for number in STOP_SIGNALS:  # rank 0 decides when all stop: it finishes its step, with this rank in it
                signal.signal(number, signal.SIG_IGN)
            learner.follow()
            return
        result = event_loop.run(_lead(arguments, learner, ranks))
    if not result.finished:
        raise SystemExit(STOPPED)


async def _lead(arguments: RoleArguments, learner: Learner, ranks: Ranks) -> TrainerResult:
    streams = connect(arguments)
    await streams.open()
    registry = RedisRegistry(streams.client, arguments.run_id)
    loop = TrainerLoop(arguments.config, streams=streams, registry=registry, learner=learner, worker_id=arguments.worker_id)
    try:
        return await run_until_stopped(loop.run(), loop.stop)
    finally:
        learner.stop()
        await registry.close()
        await streams.close()
