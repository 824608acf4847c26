"""A weight push between real processes: a publisher and a coordinator here, engines that die, hang, lie or join late there."""

from __future__ import annotations

import asyncio
import multiprocessing
import secrets
from collections.abc import Callable
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

import torch

from async_rl.config.run import ModelConfig, RunConfig
from async_rl.config.trainer import WeightsConfig
from async_rl.coordinator.pushes import PushSupervisor
from async_rl.launch.embedded_redis import EmbeddedRedis
from async_rl.registry.redis_registry import RedisRegistry
from async_rl.registry.versions import EngineStatus, RegistryState
from async_rl.testing.push_engines import EngineArguments, run_engine, served_path
from async_rl.testing.push_targets import TinyPolicy, tiny_probe
from async_rl.weights.publisher import Publisher, PushRequest, PushStats
from async_rl.weights.send_buffer import SendBufferPool, named_weights
from async_rl.weights.shm_segment import SegmentMemory
from protocol.keys import Keys
from protocol.redis_client import RedisClient

FORKS = multiprocessing.get_context("forkserver")
FORKS.set_forkserver_preload(["async_rl.testing.push_engines"])  # torch is imported once for all engines
START_S = 30.0  # an engine process imports torch; other work shares the machine


class PushRun:
    """A server, a coordinator's push supervisor, publishers by epoch, and engine processes."""

    def __init__(self, directory: Path, weights: WeightsConfig) -> None:
        self.directory = directory
        self.weights = weights
        self.stats: list[PushStats] = []
        self.engines: dict[str, BaseProcess] = {}
        self.lease_outlives_process = False
        self.run_id = f"run-{secrets.token_hex(4)}"
        self._tasks: list[asyncio.Task[None]] = []
        self._publishers: list[Publisher] = []

    async def start(self) -> None:
        self.server = EmbeddedRedis(self.directory / "redis", appendfsync="everysec").start()
        self.client = RedisClient(self.server.url, timeout_s=5, retry_s=5)
        self.registry = RedisRegistry(self.client.redis, self.run_id)
        supervisor = PushSupervisor(self.registry, self.alive, deadline_s=self.weights.deadline_s)
        self._tasks.append(asyncio.create_task(supervisor.run()))
        shared = self.weights.backend == "shm"
        memory = SegmentMemory(self.weights.shm_dir, self.run_id) if shared else None
        self.pool = SendBufferPool(self.weights.wire_dtype, self.weights.bucket_bytes, memory)

    async def stop(self) -> None:
        for task in self._tasks:
            task.cancel()
        async with asyncio.timeout(20):
            results = await asyncio.gather(*self._tasks, return_exceptions=True)
        for publisher in self._publishers:
            publisher.close()
        for process in self.engines.values():
            process.kill()
            process.join(10)
            process.close()
        self.pool.close()
        await self.client.close()
        self.server.stop()
        assert [r for r in results if not isinstance(r, asyncio.CancelledError | BaseExceptionGroup)] == []

    async def alive(self) -> frozenset[str]:
        """Leases: a process's ends with it, or not yet."""
        return frozenset(
            f"w-{name}" for name, process in self.engines.items() if self.lease_outlives_process or process.is_alive()
        )

    async def publisher(self, epoch: int) -> Publisher:
        """A trainer incarnation."""
        await self.client.redis.hset(Keys(self.run_id).state, "epoch", str(epoch))
        config = RunConfig(run_dir=self.directory, model=ModelConfig(path=self.directory), weights=self.weights)
        publisher = Publisher(self.registry, config, epoch=epoch, on_complete=self.stats.append)
        self._publishers.append(publisher)
        self._tasks.append(asyncio.create_task(publisher.run()))
        return publisher

    def engine(self, name: str, **more: Any) -> None:
        """Start an engine process."""
        arguments = EngineArguments(self.server.url, self.run_id, name, self.directory, self.weights, **more)
        self.engines[name] = FORKS.Process(target=run_engine, args=(arguments,), daemon=True)
        self.engines[name].start()

    async def submit(self, publisher: Publisher, version: int, model: TinyPolicy) -> None:
        named, ties, buffers = named_weights(model)
        snapshot = self.pool.copy_from(named, ties=ties, buffer_names=buffers)
        wire = TinyPolicy(0)  # what an engine of the wire's precision computes
        wire.load_state_dict({k: v.to(wire_dtype_of(v, self.weights)).to(v.dtype) for k, v in model.state_dict().items()})
        await publisher.submit(PushRequest(version, snapshot, tiny_probe(wire), 16 * version, 0, blocked_s=0.0))

    async def joined(self, *names: str) -> None:
        """Wait until these engines are known."""
        await self.until(lambda state: set(names) <= set(state.engines), START_S)

    async def until(self, holds: Callable[[RegistryState], bool], timeout_s: float) -> RegistryState:
        async with asyncio.timeout(timeout_s):
            while True:
                state = await self.registry.state()
                if holds(state):
                    return state
                await self.registry.wait_change(state.revision, timeout_s=0.5)

    async def serves(self, version: int, *names: str, timeout_s: float = 10.0) -> RegistryState:
        """Wait until these engines serve `version`, by the registry and by what they wrote."""
        files = [served_path(self.directory, name, version) for name in names]
        state = await self.until(lambda s: all(serving(s, name) == version for name in names), timeout_s)
        for _ in range(500):  # the file follows the confirmation
            if all(file.exists() for file in files):
                break
            await asyncio.sleep(0.01)
        return state

    def held(self, name: str, version: int) -> dict[str, torch.Tensor]:
        tensors: dict[str, torch.Tensor] = torch.load(served_path(self.directory, name, version), weights_only=True)
        return tensors


def wire_dtype_of(tensor: torch.Tensor, weights: WeightsConfig) -> torch.dtype:
    return getattr(torch, weights.wire_dtype) if tensor.is_floating_point() else tensor.dtype


def serving(state: RegistryState, name: str) -> int | None:
    record = state.engines.get(name)
    return record.serving_version if record is not None and record.status is EngineStatus.SERVING else None
