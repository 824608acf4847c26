"""async-rl-coordinator: admits tasks and drives weight pushes. One per run; a second one does no harm."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable

from async_rl.coordinator.data_record import settle
from async_rl.coordinator.loop import CoordinatorLoop, CoordinatorSettings
from async_rl.coordinator.sources import TaskSource
from async_rl.launch.inputs import open_prompts
from async_rl.logs import Event, get_logger
from async_rl.registry.redis_registry import RedisRegistry
from async_rl.run_dir.intake_log import read_log
from async_rl.run_dir.layout import open_run
from async_rl.run_dir.log_index import task_ends
from protocol import event_loop
from protocol.redis_streams import RedisStreams
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
    try:
        await streams.open()
        source = await _settled(arguments, source, (await streams.counters()).cursor)
        registry = RedisRegistry(streams.client, arguments.run_id)
        try:
            loop = _loop(arguments, streams, registry, source)
            return await run_until_stopped(loop.run(), loop.stop)
        finally:
            await registry.close()
    finally:
        await streams.close()


def _loop(arguments: RoleArguments, streams: RedisStreams, registry: RedisRegistry, source: TaskSource) -> CoordinatorLoop:
    _, identity = open_run(arguments.layout.root)
    settings = CoordinatorSettings.from_config(arguments.config, arguments.worker_id, first_version=identity.first_version)
    intake = arguments.layout.intake_dir
    return CoordinatorLoop(streams, registry, source, settings, read_log=lambda: read_log(intake))


async def _settled(arguments: RoleArguments, source: TaskSource, cursor: int) -> TaskSource:
    """The source in the order that this run's cursor stands for. Raises: DataError, ConfigError (see `data_record.settle`)."""
    layout = arguments.layout

    def known_ids() -> Iterable[str]:
        index = read_log(layout.intake_dir)
        return [*index.groups, *task_ends(index)]

    settled, grown = await asyncio.to_thread(settle, source, layout.data_json, cursor=cursor, known_ids=known_ids)
    for line in grown:
        get_logger().info(Event.DATA_GROWN, what=line)
    return settled


if __name__ == "__main__":
    main()
