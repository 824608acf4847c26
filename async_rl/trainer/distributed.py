"""Process group and device mesh of the trainer's ranks: one process alone, or N under torchrun."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import HashStore
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from async_rl.errors import ConfigError


@dataclass(frozen=True, slots=True)
class Ranks:
    """Which rank this process is, of how many, and the mesh that FSDP shards over."""

    rank: int
    world_size: int
    mesh: DeviceMesh

    @property
    def is_first(self) -> bool:
        return self.rank == 0


@contextmanager
def joined_ranks(world_size: int = 1, *, device: str = "cpu", timeout_s: float = 600.0) -> Iterator[Ranks]:
    """Join the trainer's process group and leave it at the end.

    Several ranks are started by torchrun (RANK, WORLD_SIZE, MASTER_ADDR, MASTER_PORT); a single one needs no network.
    Raises: ConfigError if torchrun's world size is not `world_size`, or the device does not exist.
    """
    started = int(os.environ.get("WORLD_SIZE", "1"))
    if started != world_size:
        raise ConfigError(
            f"trainer.world_size={world_size}, but {started} rank(s) were started; use torchrun --nproc-per-node={world_size}"
        )
    if device not in ("cpu", "cuda") or (device == "cuda" and not torch.cuda.is_available()):
        raise ConfigError(
            f"trainer.device={device!r} is not available here; use 'cpu'" + (" or 'cuda'" if device != "cuda" else "")
        )
    if device == "cuda":
        torch.cuda.set_device(int(os.environ.get("LOCAL_RANK", "0")))
    backend = "cpu:gloo,cuda:nccl" if device == "cuda" else "gloo"
    timeout = timedelta(seconds=timeout_s)
    if world_size == 1:
        dist.init_process_group(backend, store=HashStore(), rank=0, world_size=1, timeout=timeout)
    else:
        dist.init_process_group(backend, timeout=timeout)
    try:
        yield Ranks(dist.get_rank(), world_size, init_device_mesh(device, (world_size,)))
    finally:
        dist.destroy_process_group()
