"""async-rl-coordinator: admits tasks and drives weight pushes. One per run; a second one does no harm."""

from __future__ import annotations

import asyncio

from async_rl.coordinator.loop import CoordinatorLoop, CoordinatorSettings
from async_rl.coordinator.prompts import PromptSource
from async_rl.environments.load import load_environment
from async_rl.registry.redis_registry import RedisRegistry
from workers.arguments import RoleArguments, role_main
from workers.connect import connect, run_until_stopped


def main() -> None:
    role_main("coordinator", run)


def run(arguments: RoleArguments) -> None:
    """Open the data, then coordinate until the run has ended or SIGTERM comes."""
    config = arguments.config
    source = PromptSource.from_config(config, arguments.run_id, load_environment(config.environment))
    asyncio.run(_coordinate(arguments, source))


async def _coordinate(arguments: RoleArguments, source: PromptSource) -> None:
    streams = connect(arguments)
    await streams.open()
    registry = RedisRegistry(streams.client, arguments.run_id)
    settings = CoordinatorSettings.from_config(arguments.config, arguments.worker_id)
    loop = CoordinatorLoop(streams, registry, source, settings)
    try:
        await run_until_stopped(loop.run(), loop.stop)
    finally:
        await registry.close()
        await streams.close()


if __name__ == "__main__":
    main()
