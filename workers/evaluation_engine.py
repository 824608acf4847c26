"""What the evaluation process does once its command line is read."""

from __future__ import annotations

import torch

from async_rl.environments.load import close_environment, load_environment
from async_rl.evaluation.beside import EvaluationLoop, EvaluationSettings
from async_rl.launch.evaluator import CheckpointVersions, sampler
from async_rl.launch.held_out_tasks import held_out_tasks_of
from async_rl.run_dir.layout import open_run
from protocol import event_loop
from workers.arguments import RoleArguments
from workers.connect import connect, run_until_stopped


def evaluate(arguments: RoleArguments) -> None:
    """Until the run has ended and its last version is evaluated, or SIGTERM comes."""
    torch.set_num_threads(arguments.config.evaluation.num_threads)
    event_loop.run(_evaluate(arguments))


async def _evaluate(arguments: RoleArguments) -> None:
    config, layout = arguments.config, arguments.layout
    _, identity = open_run(layout.root)
    environment = load_environment(config.environment)
    streams = connect(arguments)
    settings = EvaluationSettings(
        worker_id=arguments.worker_id,
        ks=tuple(config.evaluation.k),
        success=config.evaluation.success,
        max_concurrent=config.evaluation.max_concurrent,
        lease_s=config.redis.lease_s,
        progress_s=config.redis.progress_timeout_s,
        reopen_wait_s=config.redis.retry_s,
        path=layout.evaluations_jsonl,
    )
    try:
        tasks = held_out_tasks_of(config, environment)
        versions = CheckpointVersions(layout, config.evaluation, config.model.path, first_version=identity.first_version)
        loop = EvaluationLoop(streams, versions, sampler(config, environment), tasks, settings)
        await run_until_stopped(loop.run(), loop.stop)
    finally:
        await close_environment(environment)
        await streams.close()
