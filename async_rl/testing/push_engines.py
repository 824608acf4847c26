"""Engine processes for tests of weight pushes: a TinyEngine, its receiver, and the fault that a test asks for."""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from async_rl.config.trainer import WeightsConfig
from async_rl.registry.redis_registry import RedisRegistry
from async_rl.registry.versions import PushPlan
from async_rl.testing.push_targets import FaultyEngine, TinyPolicy
from async_rl.weights import backends
from async_rl.weights.collective_backend import CollectiveReceiver
from async_rl.weights.manifest import Manifest
from async_rl.weights.receiver import Receiver
from async_rl.weights.transports import GlooTransport
from protocol.redis_client import RedisClient


@dataclass(frozen=True)
class EngineArguments:
    """What an engine process is told. `fault`: one of FaultyEngine's, or the signal that it sends itself at a phase of the push
    of at_version (see PHASES)."""

    url: str
    run_id: str
    engine_id: str
    directory: Path
    weights: WeightsConfig
    tied: bool = True
    fault: str = ""
    at_version: int = -1
    at_phase: str = "receive"


PHASES = ("check", "receive", "swap", "digest", "score", "serve")
"""Of a push, as an engine sees it: before it is ready, after the first bucket (or before the only read), with half of the
tensors copied, before each part of the proof, and confirmed but not serving yet."""


class RecordingEngine(FaultyEngine):
    """Writes what it holds to a file when it serves, and why it does not when it is withdrawn."""

    def __init__(self, arguments: EngineArguments) -> None:
        model = TinyPolicy(99, tied=arguments.tied)
        super().__init__(model, fault=arguments.fault, at_version=arguments.at_version)
        self._path = arguments.directory / arguments.engine_id

    async def serve(self, version: int) -> None:
        await super().serve(version)
        partial = self._path.with_name(f"{self._path.name}-partial")
        torch.save(self.model.state_dict(), partial)
        partial.rename(served_path(self._path.parent, self._path.name, version))

    async def withdraw(self, reason: str) -> None:
        await super().withdraw(reason)
        withdrawn_path(self._path.parent, self._path.name).write_text(reason)


class DoomedEngine(RecordingEngine):
    """Its process dies, or stops, at one phase of the fatal version's push."""

    def __init__(self, arguments: EngineArguments) -> None:
        super().__init__(replace(arguments, fault=""))
        self._arguments = arguments
        self._swapping = -1  # the version that came last

    def _reach(self, phase: str, version: int) -> None:
        if (phase, version) == (self._arguments.at_phase, self._arguments.at_version):
            os.kill(os.getpid(), signal.Signals[self._arguments.fault])

    def check(self, manifest: Manifest) -> None:
        self._reach("check", manifest.version)
        super().check(manifest)

    async def swap(self, manifest: Manifest, tensors: Mapping[str, torch.Tensor]) -> None:
        self._swapping = manifest.version
        half = dict(list(tensors.items())[: len(tensors) // 2])
        for name, tensor in half.items():
            self.model.state_dict()[name].copy_(tensor)
        self._reach("swap", manifest.version)
        await super().swap(manifest, tensors)

    def digests(self, manifest: Manifest) -> Mapping[str, str]:
        self._reach("digest", manifest.version)
        return super().digests(manifest)

    async def score(self, sequences: Sequence[Sequence[int]], *, temperature: float) -> Sequence[npt.NDArray[np.float32]]:
        self._reach("score", self._swapping)
        return await super().score(sequences, temperature=temperature)

    async def serve(self, version: int) -> None:
        self._reach("serve", version)
        await super().serve(version)


class DoomedGloo(GlooTransport):
    """Its process dies, or stops, after the first bucket of a push, once it is `armed`."""

    def __init__(self, fault: str) -> None:
        self._fault = fault
        self.armed = False

    def broadcast(self, group: Any, tensor: torch.Tensor, *, timeout_s: float) -> None:
        super().broadcast(group, tensor, timeout_s=timeout_s)
        if self.armed:
            self.armed = False
            os.kill(os.getpid(), signal.Signals[self._fault])


class DoomedReceiver:
    """Gets one bucket of the fatal version, if the transport has buckets; then its process dies, or stops."""

    def __init__(self, arguments: EngineArguments) -> None:
        weights = arguments.weights
        self._arguments = arguments
        self._transport = DoomedGloo(arguments.fault)
        self._inner: backends.Receiver = backends.make_receiver(weights)
        if weights.backend == "gloo":
            self._inner = CollectiveReceiver(timeout_s=weights.deadline_s / 4, transport=self._transport)

    def receive(self, plan: PushPlan, engine_id: str, manifest: Manifest) -> Mapping[str, torch.Tensor]:
        if plan.version == self._arguments.at_version and self._arguments.at_phase == "receive":
            self._transport.armed = True
            if self._arguments.weights.backend != "gloo":
                os.kill(os.getpid(), signal.Signals[self._arguments.fault])
        return self._inner.receive(plan, engine_id, manifest)

    def reset(self) -> None:
        self._inner.reset()

    def close(self) -> None:
        self._inner.close()


def served_path(directory: Path, engine_id: str, version: int) -> Path:
    """Where an engine writes what it serves as `version`."""
    return directory / f"{engine_id}-{version}.pt"


def withdrawn_path(directory: Path, engine_id: str) -> Path:
    """Where an engine writes why it was withdrawn last."""
    return directory / f"{engine_id}-withdrawn"


def run_engine(arguments: EngineArguments) -> None:
    """The process: until it is killed."""
    torch.set_num_threads(1)
    asyncio.run(_run(arguments))


async def _run(arguments: EngineArguments) -> None:
    client = RedisClient(arguments.url, timeout_s=5, retry_s=5)
    is_doomed = arguments.fault.startswith("SIG")
    receiver = Receiver(
        DoomedEngine(arguments) if is_doomed else RecordingEngine(arguments),
        RedisRegistry(client.redis, arguments.run_id),
        arguments.weights,
        engine_id=arguments.engine_id,
        worker_id=f"w-{arguments.engine_id}",
        backend=DoomedReceiver(arguments) if is_doomed else None,
    )
    await receiver.run()
