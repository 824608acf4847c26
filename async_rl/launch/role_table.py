"""Which role processes a run needs on this host, and how each is started."""

from __future__ import annotations

import os
import secrets
import socket
import sys
from collections.abc import Mapping

from async_rl.config.run import RunConfig
from async_rl.config.text import environment_variable
from async_rl.launch.devices import evaluation_device, split_devices
from async_rl.launch.processes import ALLOCATOR, RoleSpec
from async_rl.run_dir.layout import RunLayout

REDIS_URL_VARIABLE = environment_variable("redis.url")
EXPENDABLE = ("rollout", "reward", "evaluation")
"""Kinds of workers of which a run can lose some and go on."""


def role_table(config: RunConfig, layout: RunLayout, *, redis_url: str, master_port: int) -> tuple[RoleSpec, ...]:
    """Coordinator, trainer ranks, rollout workers, and, if the config asks for them, reward workers and an evaluation. GPUs:
    see `devices`.

    Made anew for every start of a role: each start is another worker to the queue, and needs a rendezvous port of its own.
    redis_url goes by environment, password and all: neither config.toml nor the process list shows it.
    Raises: ConfigError if roles would share a GPU.
    """
    env = {REDIS_URL_VARIABLE: redis_url}
    trainer_devices, worker_devices = split_devices(config, os.environ)
    specs = [_role(layout, "coordinator", 0, 1, _threads(1) | env)]
    world_size = config.trainer.world_size
    for rank in range(world_size):
        variables = _threads(config.trainer.num_threads) | _rank(rank, world_size, master_port) | dict(trainer_devices) | env
        specs.append(_role(layout, "trainer", rank, world_size, variables, leads=True, unit="trainer"))
    for index in range(config.rollout.workers):
        variables = _threads(config.rollout.num_threads) | dict(worker_devices[index]) | env
        specs.append(_role(layout, "rollout", index, None, variables))
    if config.reward.placement == "workers":
        specs.extend(_role(layout, "reward", index, None, _threads(1) | env) for index in range(config.reward.workers))
    if config.evaluation.every_steps is not None:
        variables = _threads(config.evaluation.num_threads) | dict(evaluation_device(config, os.environ)) | env
        specs.append(_role(layout, "evaluation", 0, 1, variables))
    return tuple(specs)


def free_port(host: str = "127.0.0.1") -> int:
    """A TCP port that nobody listens on now; who uses it must be ready for a clash."""
    with socket.socket() as probe:
        probe.bind((host, 0))
        port: int = probe.getsockname()[1]
        return port


def _role(
    layout: RunLayout,
    role: str,
    index: int,
    total: int | None,
    env: Mapping[str, str],
    *,
    leads: bool = False,
    unit: str = "",
) -> RoleSpec:
    """A role that exists once has no number in its name. Of a trainer's ranks, the first holds the lease."""
    name = role if total == 1 else f"{role}-{index}"
    worker_id = f"{role}-{index}-{secrets.token_hex(3)}"
    own = ("--index", str(index), "--worker-id", worker_id)
    command = (sys.executable, "-m", f"workers.{role}", str(layout.config_toml), *own)
    kind = role if role in EXPENDABLE else ""
    has_lease = role != "trainer" or index == 0
    return RoleSpec(name, command, env, leads=leads, unit=unit or name, kind=kind, worker_id=worker_id if has_lease else "")


def _threads(count: int) -> dict[str, str]:
    """Threads that wait must sleep: spinning ones starve the other roles of a small machine."""
    return {"OMP_NUM_THREADS": str(count), "MKL_NUM_THREADS": str(count), "OMP_WAIT_POLICY": "PASSIVE", **ALLOCATOR}


def _rank(rank: int, world_size: int, master_port: int) -> dict[str, str]:
    """What torch.distributed's env:// rendezvous reads, as torchrun would set it on one host."""
    return {
        "RANK": str(rank),
        "LOCAL_RANK": str(rank),
        "WORLD_SIZE": str(world_size),
        "LOCAL_WORLD_SIZE": str(world_size),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(master_port),
    }
