"""async-rl-coordinator: admits tasks and drives weight pushes. One per run; a second one does no harm."""

from __future__ import annotations

from async_rl.coordinator.loop import CoordinatorLoop, CoordinatorSettings
from async_rl.coordinator.sources import TaskSource
from async_rl.launch.inputs import open_prompts
from async_rl.registry.redis_registry import RedisRegistry
from async_rl.run_dir.intake_log import read_log
from async_rl.run_dir.layout import open_run
from protocol import event_loop
from workers.arguments import RoleArguments, role_main
from workers.connect import STOPPED, connect, run_until_stopped


def main() -> None:
    role_main("coordinator", run, plan=plan)


def plan(arguments: RoleArguments) -> dict[str, str]:
    """What --dry-run says beside the rest. Raises: ConfigError, DataError."""
    source = open_prompts(arguments.config)
    data = arguments.config.data
    names = ", ".join(str(entry["source"]) for entry in data.mix) or data.source
    return {"data": f"{names}, {source.num_rows:,} rows"}


def run(arguments: RoleArguments) -> None:
    """Open the data, then coordinate until the run has ended or SIGTERM comes."""
    if not event_loop.run(_coordinate(arguments, open_prompts(arguments.config, arguments.run_id))):
        raise SystemExit(STOPPED)


async def _coordinate(arguments: RoleArguments, source: TaskSource) -> bool:
    """True: the run has ended. False: stopped before."""
    streams = connect(arguments)
    await streams.open()
    registry = RedisRegistry(streams.client, arguments.run_id)
    _, identity = open_run(arguments.layout.root)
    settings = CoordinatorSettings.from_config(arguments.config, arguments.worker_id, first_version=identity.first_version)
    intake = arguments.layout.intake_dir
    loop = CoordinatorLoop(streams, registry, source, settings, read_log=lambda: read_log(intake))
    try:
        return await run_until_stopped(loop.run(), loop.stop)
    finally:
        await registry.close()
        await streams.close()


if __name__ == "__main__":
    main()
