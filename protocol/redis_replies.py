"""What a Redis server answers, as the values of `protocol.streams`."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import Any

from protocol.errors import CodecError, QueueRefused
from protocol.packing import unpack
from protocol.streams import DeadEntry, Delivery, Stream, WorkerLease

_STREAMS: Mapping[str, Stream] = {stream.value: stream for stream in Stream}
_OLDEST_SERVER = (6, 2)


def check_server(info: Mapping[str, str], url: str) -> None:
    version = tuple(int(part) for part in info["redis_version"].split(".")[:2])
    if version < _OLDEST_SERVER:
        raise QueueRefused(f"redis at {url} is version {info['redis_version']}; needs Redis 6.2 or newer, or Valkey")
    policy = info.get("maxmemory_policy", "noeviction")
    if policy != "noeviction":
        raise QueueRefused(
            f"redis at {url} has maxmemory-policy={policy}, which drops entries silently when memory is full; "
            f"set it to noeviction (CONFIG SET maxmemory-policy noeviction, and in its config file)"
        )


def info(reply: bytes) -> dict[str, str]:
    lines = (line.partition(":") for line in reply.decode(errors="replace").splitlines())
    return {name: value for name, colon, value in lines if colon}


def fields(flat: Sequence[bytes]) -> dict[bytes, bytes]:
    return dict(zip(flat[::2], flat[1::2], strict=True))


def delivery(stream: Stream, entry_id: bytes, count: int, flat: Sequence[bytes]) -> Delivery:
    if len(flat) >= 4 and flat[0] == b"t" and flat[2] == b"d":
        return Delivery(stream, entry_id.decode(), flat[3], count, flat[1].decode() or None)
    # Not written by us: delivered all the same, so that its reader refuses it and it ends in `dead`.
    return Delivery(stream, entry_id.decode(), fields(flat).get(b"d", b""), count)


def dead_entry(entry_id: bytes, fields: Mapping[bytes, bytes], unrecorded: Collection[bytes], now_s: float) -> DeadEntry:
    task_id, source = fields.get(b"t", b""), fields.get(b"source", b"").decode()
    return DeadEntry(
        entry_id.decode(),
        task_id.decode() or None,
        fields.get(b"d", b""),
        fields.get(b"reason", b"").decode(errors="replace"),
        int(fields.get(b"deliveries", b"1")),
        _STREAMS.get(source),
        age_s(entry_id.decode(), now_s) or 0.0,
        task_id not in unrecorded,
    )


def deliveries(stream: Stream, entries: Iterable[Any]) -> list[Delivery]:
    return [delivery(stream, entry_id, int(count), flat) for entry_id, count, flat in entries]


def read_deliveries(stream: Stream, reply: Any) -> list[Delivery]:
    return [delivery(stream, entry_id, 1, flat) for entry_id, flat in reply[0][1]] if reply else []


def worker_lease(worker_id: str, value: bytes, ttl_ms: int) -> WorkerLease:
    try:
        lease = unpack(value)
        return WorkerLease(worker_id, lease["role"], ttl_ms / 1000, lease["info"])
    except (CodecError, KeyError, TypeError) as error:
        raise QueueRefused(f"the lease of worker {worker_id!r} was not written by this release: {error}") from error


def age_s(oldest_id: str, now_s: float) -> float | None:
    return max(0.0, now_s - int(oldest_id.partition("-")[0]) / 1000) if oldest_id else None


def texts(values: Iterable[bytes]) -> list[str]:
    return [value.decode() for value in values]
