"""What a broadcast of a push runs on: Gloo between CPU tensors, NCCL between CUDA tensors.

NCCL's collectives run on a stream and outlive a `wait`: a broadcast is polled until its deadline, and a group that missed it is
aborted, which frees the stream that hangs in it. Sources: torch.distributed's ProcessGroupGloo and ProcessGroupNCCL
(torch/csrc/distributed/c10d/init.cpp).
"""

from __future__ import annotations

import time
from datetime import timedelta
from typing import Any, Protocol

import torch
import torch._C._distributed_c10d as c10d
from torch._C._distributed_c10d import BroadcastOptions, Store

from async_rl.errors import ConfigError

POLL_S = 0.001


class Transport(Protocol):
    """Methods block, and raise RuntimeError where torch does."""

    @property
    def name(self) -> str: ...

    @property
    def device(self) -> torch.device:
        """Where the tensors of a broadcast must lie."""
        ...

    def join(self, store: Store, rank: int, size: int, *, host: str, timeout_s: float) -> Any:
        """A process group of `size` members."""
        ...

    def broadcast(self, group: Any, tensor: torch.Tensor, *, timeout_s: float) -> None:
        """From rank 0 to all, complete when this returns."""
        ...

    def abandon(self, group: Any) -> None:
        """Nobody waits for this group any more."""
        ...


class GlooTransport:
    """Over TCP, from CPU memory."""

    name = "gloo"
    device = torch.device("cpu")

    def join(self, store: Store, rank: int, size: int, *, host: str, timeout_s: float) -> Any:
        gloo: Any = c10d.ProcessGroupGloo  # torch's stubs lack its options and its collectives
        options = gloo._Options()
        options._devices = [gloo.create_device(hostname=host)]
        options._timeout = timedelta(seconds=timeout_s)
        return gloo(store, rank, size, options)

    def broadcast(self, group: Any, tensor: torch.Tensor, *, timeout_s: float) -> None:
        group.broadcast([tensor], _from_first(timeout_s)).wait()

    def abandon(self, group: Any) -> None:
        """Its connections close with its last reference."""


class NcclTransport:
    """Between GPUs: device memory to device memory."""

    name = "nccl"

    @property
    def device(self) -> torch.device:
        return torch.device("cuda", torch.cuda.current_device())

    def join(self, store: Store, rank: int, size: int, *, host: str, timeout_s: float) -> Any:
        """The interface is NCCL's to choose (NCCL_SOCKET_IFNAME); `host` is where the store is."""
        nccl: Any = getattr(c10d, "ProcessGroupNCCL", None)
        if nccl is None or not torch.cuda.is_available():
            raise ConfigError("weights.backend='nccl' needs a CUDA build of torch and a GPU here; use weights.backend='gloo'")
        options = nccl.Options()
        options._timeout = timedelta(seconds=timeout_s)
        return nccl(store, rank, size, options)

    def broadcast(self, group: Any, tensor: torch.Tensor, *, timeout_s: float) -> None:
        staged = tensor.to(self.device, non_blocking=True)  # of a receiver, the tensor itself
        work = group.broadcast([staged], _from_first(timeout_s))
        end = time.monotonic() + timeout_s
        while not work.is_completed():
            if time.monotonic() >= end:
                group.abort()
                raise RuntimeError(f"the broadcast did not complete within {timeout_s:.1f} s; its group is aborted")
            time.sleep(POLL_S)
        work.wait()  # raises what went wrong
        torch.cuda.synchronize(self.device)

    def abandon(self, group: Any) -> None:
        group.abort()


GLOO = GlooTransport()
NCCL = NcclTransport()


def _from_first(timeout_s: float) -> BroadcastOptions:
    options = BroadcastOptions()
    options.rootRank = 0
    options.rootTensor = 0
    options.timeout = timedelta(seconds=timeout_s)
    return options
