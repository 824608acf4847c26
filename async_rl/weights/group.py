"""The process group of a push: rank 0 publishes, the plan's participants are ranks 1, 2, …

A group lives from push to push, as long as the plan's generation stays. It is made by all its members at the first plan that
needs it, through the publisher's store, under a prefix that no other group ever had.
"""

from __future__ import annotations

import socket
import time
from datetime import timedelta

import torch
from torch._C._distributed_c10d import PrefixStore, Store, TCPStore

from async_rl.errors import WeightPushError
from async_rl.registry.versions import PushPlan
from async_rl.weights.transports import Transport

__all__ = ["PushGroup", "Store", "address_towards", "connect_store", "host_store"]


def host_store(host: str) -> TCPStore:
    """Serve a rendezvous store on `host` alone (not on every interface), at a free port."""
    listener = socket.create_server((host, 0))
    port = listener.getsockname()[1]
    return TCPStore(
        host, port, is_master=True, wait_for_workers=False, timeout=timedelta(seconds=30), master_listen_fd=listener.detach()
    )


def connect_store(address: str, timeout_s: float) -> TCPStore:
    """Connect to the store that a plan names as host:port. Raises: WeightPushError."""
    host, _, port = address.rpartition(":")
    try:
        return TCPStore(host, int(port), is_master=False, timeout=timedelta(seconds=timeout_s))
    except (RuntimeError, ValueError) as error:
        raise WeightPushError(
            f"the publisher's store at {address!r} does not answer within {timeout_s:.1f} s: {_reason(error)}"
        ) from error


def address_towards(store_address: str) -> str:
    """This host's address on the interface that leads to the store (no packet is sent)."""
    host, _, port = store_address.rpartition(":")
    family, *_, target = socket.getaddrinfo(host, int(port), type=socket.SOCK_DGRAM)[0]
    with socket.socket(family, socket.SOCK_DGRAM) as probe:
        probe.connect(target)
        name: str = probe.getsockname()[0]
    return name


class PushGroup:
    """One group, seen from one member. Its methods block: call them in a thread."""

    def __init__(self, transport: Transport, store: Store, plan: PushPlan, *, rank: int, host: str, timeout_s: float) -> None:
        """Meet the others. Raises: WeightPushError if not all come within `timeout_s`."""
        self.generation = (plan.epoch, plan.store_address, plan.generation)
        self._transport = transport
        self._timeout_s = timeout_s
        prefix = PrefixStore(f"{plan.epoch}:{plan.generation}:{plan.version}:{plan.planned_at_s!r}", store)
        size = len(plan.participants) + 1
        try:
            self._group = transport.join(prefix, rank, size, host=host, timeout_s=timeout_s)
        except RuntimeError as error:
            raise WeightPushError(
                f"group {plan.generation} of {', '.join(plan.participants)} did not meet in {timeout_s:.1f} s: {_reason(error)}"
            ) from error

    def broadcast(self, buckets: tuple[torch.Tensor, ...], *, deadline: float) -> None:
        """From rank 0 to all, bucket by bucket. `deadline` is of time.monotonic; each bucket has the group's time-out too.

        Raises: WeightPushError if a member died, hung or the deadline passed. The group must not be used afterwards.
        """
        for index, bucket in enumerate(buckets):
            left_s = min(self._timeout_s, deadline - time.monotonic())
            if left_s <= 0:
                raise WeightPushError(f"the deadline passed after {index} of {len(buckets)} buckets")
            try:
                self._transport.broadcast(self._group, bucket, timeout_s=left_s)
            except RuntimeError as error:
                raise WeightPushError(
                    f"bucket {index + 1} of {len(buckets)} ({len(bucket)} bytes): {_reason(error)}"
                ) from error

    def abandon(self) -> None:
        """Leave it, whatever still runs in it."""
        self._transport.abandon(self._group)


def _reason(error: Exception) -> str:
    """What went wrong without torch's C++ stack, which follows on lines of its own."""
    return next(iter(str(error).splitlines()), type(error).__name__)
