"""Weight pushes by broadcasts, over Gloo or NCCL: one code path, only the transport differs.

Collective time-outs are a quarter of the push's deadline, so that a second try fits in.
"""

from __future__ import annotations

import time
from collections.abc import Mapping

import torch

from async_rl.registry.versions import PushPlan
from async_rl.weights.group import PushGroup, Store, address_towards, connect_store, host_store
from async_rl.weights.manifest import Manifest, bucket_views
from async_rl.weights.send_buffer import SendBuffer
from async_rl.weights.transports import GLOO, Transport


class CollectiveSender:
    """Rank 0 of every group, and host of the store where they meet."""

    def __init__(self, *, host: str, timeout_s: float, transport: Transport = GLOO) -> None:
        self._transport = transport
        self._host = host
        self._timeout_s = timeout_s
        self._store = host_store(host)
        self._group: PushGroup | None = None

    @property
    def address(self) -> str:
        return f"{self._host}:{self._store.port}"

    def prepare(self, manifest: Manifest, buffer: SendBuffer) -> Manifest:
        return manifest

    def send(self, plan: PushPlan, buffer: SendBuffer) -> None:
        deadline = time.monotonic() + plan.deadline_s
        if self._group is None or self._group.generation != (plan.epoch, plan.store_address, plan.generation):
            self.reset()
            self._group = PushGroup(self._transport, self._store, plan, rank=0, host=self._host, timeout_s=self._timeout_s)
        self._group.broadcast(buffer.buckets, deadline=deadline)

    def forget(self, kept: frozenset[int]) -> None:
        """Nothing is kept here."""

    def reset(self) -> None:
        if self._group is not None:
            self._group.abandon()
        self._group = None

    def close(self) -> None:
        self.reset()


class CollectiveReceiver:
    """One engine's rank, with a staging buffer that is kept from push to push."""

    def __init__(self, *, timeout_s: float, transport: Transport = GLOO) -> None:
        self._transport = transport
        self._timeout_s = timeout_s
        self._group: PushGroup | None = None
        self._store: tuple[str, Store] | None = None
        self._staging: tuple[torch.Tensor, ...] = ()

    def receive(self, plan: PushPlan, engine_id: str, manifest: Manifest) -> Mapping[str, torch.Tensor]:
        deadline = time.monotonic() + plan.deadline_s
        if self._group is None or self._group.generation != (plan.epoch, plan.store_address, plan.generation):
            self._leave()
            self._group = PushGroup(
                self._transport,
                self._connect(plan.store_address),
                plan,
                rank=plan.participants.index(engine_id) + 1,
                host=address_towards(plan.store_address),
                timeout_s=self._timeout_s,
            )
        if tuple(len(bucket) for bucket in self._staging) != manifest.bucket_bytes:
            device = self._transport.device
            self._staging = tuple(torch.zeros(size, dtype=torch.uint8, device=device) for size in manifest.bucket_bytes)
        self._group.broadcast(self._staging, deadline=deadline)
        return bucket_views(manifest, self._staging)

    def reset(self) -> None:
        self._leave()
        self._store = None

    def close(self) -> None:
        self.reset()

    def _leave(self) -> None:
        if self._group is not None:
            self._group.abandon()
        self._group = None

    def _connect(self, address: str) -> Store:
        if self._store is None or self._store[0] != address:
            self._store = None
            self._store = (address, connect_store(address, self._timeout_s))
        return self._store[1]
