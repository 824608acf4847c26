"""The version registry on Redis or Valkey: one hash, changed by Lua scripts only, and a stream that wakes whoever waits."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, replace
from functools import partial
from hashlib import sha1
from typing import Any, cast

from redis.asyncio import Redis
from redis.exceptions import ClusterDownError, NoScriptError, OutOfMemoryError, ReadOnlyError, RedisError, TryAgainError
from redis.exceptions import ConnectionError as RedisConnectionError
from redis.exceptions import TimeoutError as RedisTimeoutError

from async_rl.errors import EpochFenced, QueueFull, QueueRefused, QueueUnavailable, WeightPushError
from async_rl.registry import scripts
from async_rl.registry.versions import (
    Announcement,
    EngineRecord,
    EngineStatus,
    FinishedPush,
    ProofReport,
    PushPlan,
    PushStatus,
    RegistryState,
)
from protocol.keys import Keys

_RETRIES = 12  # time-outs that a call is tried for, by default
_FIRST_WAIT_S, _LONGEST_WAIT_S = 0.02, 1.0
_POLL_S = 0.25  # a server that lost its data forgets who waits: look at the revision itself this often


_NAMES = ("ANNOUNCE", "JOIN", "LEAVE", "FREEZE", "READY", "INTERRUPT", "CONFIRM", "FAIL", "EVICT", "COMPLETE", "STATE")
_SCRIPTS: Mapping[str, tuple[str, str]] = {
    name: (sha1(getattr(scripts, name).encode(), usedforsecurity=False).hexdigest(), getattr(scripts, name)) for name in _NAMES
}
"""Name → (SHA-1, source)."""


class RedisRegistry:
    """VersionRegistry on the client of the run's streams (`RedisStreams.client`; closing it is the caller's).

    timeout_s bounds one answer; retry_s bounds how long a call is tried again while the server is away. Every call may be
    repeated: at worst `freeze` answers False to who froze the plan already.
    """

    def __init__(self, client: Redis, run_id: str, *, timeout_s: float = 5.0, retry_s: float | None = None) -> None:
        keys = Keys(run_id)
        self._client = client
        self._raw: Any = client  # execute_command is untyped
        self._timeout_s = timeout_s
        self._retry_s = _RETRIES * timeout_s if retry_s is None else retry_s
        self._keys = [keys.registry, keys.registry_trained, keys.registry_manifest, keys.registry_changes, keys.state]
        # A blocking read must end before the client's own time-out calls the connection dead.
        socket_timeout = client.connection_pool.connection_kwargs.get("socket_timeout")
        self._poll_s = _POLL_S if socket_timeout is None else min(_POLL_S, socket_timeout / 2)

    async def close(self) -> None:
        """Nothing is held between calls."""

    async def announce(self, announcement: Announcement) -> None:
        a = announcement
        pushes = a.push is not None
        answer = await self._run(
            "ANNOUNCE", a.epoch, a.version, a.trained_through, a.discarded, int(pushes), a.push or b"", a.store_address
        )
        if answer == b"fenced":
            raise EpochFenced(
                f"announcement of version {a.version} by epoch {a.epoch}: a newer trainer has started; stop this one"
            )
        if answer == b"backwards":
            raise WeightPushError(
                f"version {a.version} is below the one that epoch {a.epoch} pushed before; versions only grow"
            )

    async def manifest(self, epoch: int, version: int) -> bytes | None:
        field = f"{epoch}:{version}"
        return cast("bytes | None", await self._ask(partial(self._client.hget, self._keys[2], field)))

    async def join(self, engine_id: str, worker_id: str) -> None:
        await self._run("JOIN", engine_id, worker_id)

    async def leave(self, engine_id: str) -> None:
        await self._run("LEAVE", engine_id)

    async def freeze(self, plan: PushPlan) -> bool:
        body = json.dumps(asdict(plan))
        return bool(await self._run("FREEZE", plan.epoch, plan.version, plan.generation, body, *plan.participants))

    async def ready(self, engine_id: str, plan: PushPlan) -> bool:
        return bool(await self._run("READY", engine_id, plan.epoch, plan.version, plan.generation))

    async def interrupt(self, plan: PushPlan, reason: str) -> None:
        await self._run("INTERRUPT", plan.epoch, plan.version, plan.generation, reason)

    async def confirm(self, engine_id: str, epoch: int, version: int, proof: ProofReport) -> bool:
        return bool(await self._run("CONFIRM", engine_id, epoch, version, json.dumps(asdict(proof))))

    async def fail(self, engine_id: str, epoch: int, version: int, reason: str) -> None:
        await self._run("FAIL", engine_id, epoch, version, reason)

    async def evict(self, engine_ids: Sequence[str], reason: str) -> None:
        await self._run("EVICT", reason, *engine_ids)

    async def complete(self, plan: PushPlan, status: PushStatus) -> None:
        await self._run("COMPLETE", plan.epoch, plan.version, plan.generation, status.value)

    async def state(self) -> RegistryState:
        fields, trained, epoch = await self._run("STATE")
        return _decode_state(dict(_pairs(fields)), dict(_pairs(trained)), epoch)

    async def wait_change(self, revision: int, *, timeout_s: float) -> None:
        loop = asyncio.get_running_loop()
        end = loop.time() + timeout_s
        stream = self._keys[3]
        while (left := end - loop.time()) > 0:
            block_ms = max(1, int(1000 * min(left, self._poll_s)))
            if await self._ask(partial(self._client.xread, {stream: f"{revision}-0"}, count=1, block=block_ms)):
                return
            current = await self._ask(partial(self._client.hget, self._keys[0], "revision"))
            if int(current or 0) != revision:
                return

    async def _run(self, name: str, *args: str | bytes | int) -> Any:
        digest, source = _SCRIPTS[name]

        async def call() -> Any:
            try:
                return await self._raw.execute_command("EVALSHA", digest, len(self._keys), *self._keys, *args)
            except NoScriptError:  # a new server, or its first call
                return await self._raw.execute_command("EVAL", source, len(self._keys), *self._keys, *args)

        return await self._ask(call)

    async def _ask(self, call: Callable[[], Awaitable[Any]]) -> Any:
        loop = asyncio.get_running_loop()
        end, wait_s = loop.time() + self._retry_s, _FIRST_WAIT_S
        while True:
            try:
                async with asyncio.timeout(self._timeout_s):
                    return await call()
            except (RedisError, OSError, TimeoutError) as error:
                translated = self._translate(error)
                again = isinstance(translated, QueueUnavailable) and not isinstance(translated, QueueFull)
                if not again or loop.time() + wait_s > end:
                    raise translated from error
            await asyncio.sleep(wait_s)
            wait_s = min(2 * wait_s, _LONGEST_WAIT_S)

    def _translate(self, error: Exception) -> Exception:
        text = str(error)
        if isinstance(error, OutOfMemoryError) or "OOM command not allowed" in text:
            return QueueFull("the registry's server is at maxmemory; raise maxmemory or let it drain")
        if isinstance(error, TimeoutError | RedisTimeoutError):
            return QueueUnavailable(f"the registry's server did not answer within {self._timeout_s} s")
        if isinstance(error, RedisConnectionError | OSError):
            return QueueUnavailable(f"the registry's server cannot be reached: {text}")
        if isinstance(error, ReadOnlyError | ClusterDownError | TryAgainError) or text.startswith(
            ("MISCONF", "BUSY", "UNBLOCKED")
        ):
            return QueueUnavailable(f"the registry's server cannot answer now: {text}")
        return QueueRefused(f"the registry's server refuses: {text}")


def _pairs(flat: Sequence[bytes]) -> Iterator[tuple[str, str]]:
    for i in range(0, len(flat), 2):
        yield flat[i].decode(), flat[i + 1].decode()


def _decode_state(fields: Mapping[str, str], trained: Mapping[str, str], epoch: bytes | None) -> RegistryState:
    def number(name: str) -> int | None:
        return int(fields[name]) if name in fields else None

    current = max(int(epoch or 0), number("announced_epoch") or 0)
    pushable = number("push_epoch") == current
    return RegistryState(
        revision=number("revision") or 0,
        epoch=current,
        announced_version=number("announced_version"),
        pushable_version=number("pushable_version") if pushable else None,
        store_address=fields.get("store_address", "") if pushable else "",
        trained_through={int(version): int(groups) for version, groups in trained.items()},
        discarded=number("discarded") or 0,
        engines=_decode_engines(fields),
        plan=_decode_plan(fields["plan"], fields["plan_status"]) if "plan" in fields else None,
        confirmed={name[2:]: _decode_proof(value) for name, value in fields.items() if name.startswith("c:")},
        failed={name[2:]: value for name, value in fields.items() if name.startswith("f:")},
        ready=frozenset(name[2:] for name in fields if name.startswith("r:")),
        finished=_decode_finished(fields["finished"]) if "finished" in fields else None,
    )


def _decode_engines(fields: Mapping[str, str]) -> dict[str, EngineRecord]:
    engines = {}
    for name, worker_id in fields.items():
        if not name.startswith("worker:"):
            continue
        engine_id = name.removeprefix("worker:")
        serving = fields.get(f"serving:{engine_id}")
        engines[engine_id] = EngineRecord(
            engine_id=engine_id,
            worker_id=worker_id,
            status=EngineStatus(fields[f"status:{engine_id}"]),
            serving_version=None if serving is None else int(serving),
            serving_epoch=int(fields.get(f"serving_epoch:{engine_id}", 0)),
            reason=fields.get(f"reason:{engine_id}", ""),
        )
    return engines


def _decode_plan(text: str, status: str) -> PushPlan:
    body = json.loads(text)
    body["participants"] = tuple(body["participants"])
    return replace(PushPlan(**body), status=PushStatus(status))


def _decode_proof(text: str) -> ProofReport:
    return ProofReport(**json.loads(text))


def _decode_finished(text: str) -> FinishedPush:
    body = json.loads(text)
    return FinishedPush(
        plan=_decode_plan(body["plan"], body["status"]),
        confirmed={engine_id: _decode_proof(proof) for engine_id, proof in body["confirmed"].items()},
        failed=body["failed"],
    )
