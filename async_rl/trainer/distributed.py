"""Process group and device mesh of the trainer's ranks: one process alone, or N under torchrun."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import HashStore, PrefixStore, TCPStore
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from async_rl.errors import ConfigError
from async_rl.trainer.watchdog import Watchdog

STORE_TIMEOUT_S = 5.0


@dataclass(frozen=True, slots=True)
class Ranks:
    """Which rank this process is, of how many, and the mesh that FSDP shards over."""

    rank: int
    world_size: int
    mesh: DeviceMesh
    watchdog: Watchdog | None = None
    """Says who waits for whom; None for a rank that is alone."""

    @property
    def is_first(self) -> bool:
        return self.rank == 0

    def mark(self, where: str) -> None:
        """This rank made progress, and is at `where` now."""
        if self.watchdog is not None:
            self.watchdog.mark(where)

    def report(self) -> str:
        """What every rank does, in words; empty for a rank that is alone."""
        return "" if self.watchdog is None else self.watchdog.report()


@contextmanager
def joined_ranks(
    world_size: int = 1,
    *,
    device: str = "cpu",
    timeout_s: float = 600.0,
    dump_after_s: float = 0.0,
    shard_size: int | None = None,
    watchdog_s: float = 60.0,
) -> Iterator[Ranks]:
    """Join the trainer's process group and leave it at the end.

    shard_size: ranks per copy of the model; fewer than world_size make a mesh of (copies, shards).
    watchdog_s, dump_after_s: the Watchdog's limit_s and dump_after_s.

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
    watchdog = _watchdog(world_size, limit_s=watchdog_s, dump_after_s=dump_after_s)
    try:
        yield Ranks(dist.get_rank(), world_size, _mesh(device, world_size, shard_size), watchdog)
    finally:
        if watchdog is not None:
            watchdog.stop()
        dist.destroy_process_group()


def _mesh(device: str, world_size: int, shard_size: int | None) -> DeviceMesh:
    if shard_size is None or shard_size == world_size:
        return init_device_mesh(device, (world_size,))
    return init_device_mesh(device, (world_size // shard_size, shard_size), mesh_dim_names=("replicate", "shard"))


def _watchdog(world_size: int, *, limit_s: float, dump_after_s: float) -> Watchdog | None:
    """Beside several ranks: over a connection of its own to the store where they met."""
    if world_size == 1:
        return None
    store = TCPStore(
        os.environ["MASTER_ADDR"],
        int(os.environ["MASTER_PORT"]),
        is_master=False,
        wait_for_workers=False,
        timeout=timedelta(seconds=STORE_TIMEOUT_S),
    )
    prefix = PrefixStore("async_rl/watchdog", store)
    return Watchdog(prefix, dist.get_rank(), world_size, limit_s=limit_s, dump_after_s=dump_after_s).start()
