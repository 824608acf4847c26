"""Real vLLM hosts that tests share: one takes long to start, so it is given back with the weights of its directory in it.

They live on an event loop of their own, which outlives the loops of single tests.
"""

from __future__ import annotations

import asyncio
import hashlib
import threading
from collections.abc import Callable, Coroutine, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

from async_rl.config.rollout import RolloutConfig
from async_rl.model.load import load_causal_lm
from async_rl.rollout.vllm_host import Sampled, VllmHost
from async_rl.rollout.vllm_staging import StagingFile
from async_rl.testing.pushes import push_of
from protocol.messages import SamplingParams

T = TypeVar("T")

HostFactory = Callable[[Path, RolloutConfig, int], VllmHost]


@dataclass(slots=True, eq=False)
class _Slot:
    key: str
    host: VllmHost
    in_use: bool = True
    last_used: int = field(default=0)


class SharedHosts:
    """Starts hosts on demand and keeps at most `keep` of them that nobody uses."""

    def __init__(self, *, keep: int = 3) -> None:
        self._keep = keep
        self._slots: list[_Slot] = []
        self._uses = 0
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="shared-vllm-hosts", daemon=True)
        self._thread.start()

    async def run(self, work: Coroutine[Any, Any, T]) -> T:
        """On the hosts' loop."""
        return await asyncio.wrap_future(asyncio.run_coroutine_threadsafe(work, self._loop))

    async def acquire(self, make: HostFactory, path: Path, config: RolloutConfig, max_context: int) -> VllmHost:
        key = _key(make, path, config, max_context)
        slot = next((slot for slot in self._slots if slot.key == key and not slot.in_use), None)
        if slot is None:
            await self._make_room()
            slot = _Slot(key, make(path, config, max_context))
            self._slots.append(slot)
            await self.run(slot.host.start())
        else:
            slot.in_use = True
            await self.run(_reset(slot.host, path))
        self._uses += 1
        slot.last_used = self._uses
        return slot.host

    async def release(self, host: VllmHost) -> None:
        for slot in self._slots:
            if slot.host is host:
                slot.in_use = False

    async def discard(self, host: VllmHost) -> None:
        """It is of no use any more."""
        self._slots = [slot for slot in self._slots if slot.host is not host]
        await self.run(host.close())

    def close(self) -> None:
        for slot in self._slots:
            asyncio.run_coroutine_threadsafe(slot.host.close(), self._loop).result(60)
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(60)
        self._loop.close()

    async def _make_room(self) -> None:
        idle = sorted((slot for slot in self._slots if not slot.in_use), key=lambda slot: slot.last_used)
        for slot in idle[: max(0, len(idle) - self._keep + 1)]:
            await self.discard(slot.host)


class SharedHost:
    """A VllmHost that borrows a real one from `start` to `close`."""

    def __init__(self, hosts: SharedHosts, make: HostFactory, path: Path, config: RolloutConfig, max_context: int) -> None:
        self._hosts, self._how = hosts, (make, path, config, max_context)
        self._host: VllmHost | None = None

    async def start(self) -> None:
        self._host = await self._hosts.acquire(*self._how)

    async def close(self) -> None:
        host, self._host = self._host, None
        if host is not None:
            await self._hosts.release(host)

    async def sample(
        self,
        prompt_ids: Sequence[int],
        sampling: SamplingParams,
        *,
        salt: str,
        on_output: Callable[[], object] = lambda: None,
    ) -> Sampled:
        return await self._hosts.run(self._real().sample(prompt_ids, sampling, salt=salt, on_output=on_output))

    async def prompt_logprobs(self, token_ids: Sequence[int], *, salt: str) -> Sequence[float]:
        return await self._hosts.run(self._real().prompt_logprobs(token_ids, salt=salt))

    async def next_logprob(self, prefix_ids: Sequence[int], token_id: int, temperature: float, *, salt: str) -> float:
        return await self._hosts.run(self._real().next_logprob(prefix_ids, token_id, temperature, salt=salt))

    async def pause(self, *, clear_cache: bool) -> None:
        await self._hosts.run(self._real().pause(clear_cache=clear_cache))

    async def load(self, update: Mapping[str, Any], label: str) -> Mapping[str, str]:
        return await self._hosts.run(self._real().load(update, label))

    async def relabel(self, label: str) -> None:
        await self._hosts.run(self._real().relabel(label))

    async def resume(self) -> None:
        await self._hosts.run(self._real().resume())

    def _real(self) -> VllmHost:
        assert self._host is not None, "not started"
        return self._host


async def _reset(host: VllmHost, path: Path) -> None:
    """As if started anew: the directory's weights, an empty cache."""
    staging = StagingFile()
    manifest, tensors = push_of(load_causal_lm(path), 0)
    await host.pause(clear_cache=True)
    await host.load(staging.write(manifest, tensors, {}), "reset")
    await host.resume()
    staging.close()


def _key(make: HostFactory, path: Path, config: RolloutConfig, max_context: int) -> str:
    model = hashlib.blake2b((path / "config.json").read_bytes(), digest_size=8).hexdigest()
    return f"{make} {model} {max_context} {config.dtype} {config.vllm}"
