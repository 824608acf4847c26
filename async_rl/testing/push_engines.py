"""Engine processes for tests of weight pushes: a TinyEngine, its receiver, and the fault that a test asks for."""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path

import torch

from async_rl.config.trainer import WeightsConfig
from async_rl.registry.redis_registry import RedisRegistry
from async_rl.registry.versions import PushPlan
from async_rl.testing.push_targets import FaultyEngine, TinyPolicy
from async_rl.weights.gloo_backend import GlooReceiver
from async_rl.weights.manifest import Manifest
from async_rl.weights.receiver import Receiver
from protocol.redis_client import RedisClient


@dataclass(frozen=True)
class EngineArguments:
    """What an engine process is told. `fault`: one of FaultyEngine's, or the signal that ends it in the middle of a push."""

    url: str
    run_id: str
    engine_id: str
    directory: Path
    weights: WeightsConfig
    tied: bool = True
    fault: str = ""
    at_version: int = -1


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


class DoomedReceiver(GlooReceiver):
    """Gets one bucket of the fatal version; then its process dies, or stops, in the middle of the push."""

    def __init__(self, arguments: EngineArguments) -> None:
        super().__init__(timeout_s=arguments.weights.deadline_s / 4)
        self._at_version = arguments.at_version
        self._signal = signal.Signals[arguments.fault]

    def receive(self, plan: PushPlan, engine_id: str, manifest: Manifest) -> Mapping[str, torch.Tensor]:
        if plan.version == self._at_version:
            first = tuple(entry for entry in manifest.entries if entry.bucket == 0)
            super().receive(plan, engine_id, replace(manifest, entries=first, bucket_bytes=manifest.bucket_bytes[:1]))
            os.kill(os.getpid(), self._signal)
        return super().receive(plan, engine_id, manifest)


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
    receiver = Receiver(
        RecordingEngine(arguments),
        RedisRegistry(client.redis, arguments.run_id),
        arguments.weights,
        engine_id=arguments.engine_id,
        worker_id=f"w-{arguments.engine_id}",
        backend=DoomedReceiver(arguments) if arguments.fault.startswith("SIG") else None,
    )
    await receiver.run()
