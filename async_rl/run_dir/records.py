"""Records of the intake log and their bodies. Group payloads are kept as they came off the wire."""

from __future__ import annotations

import struct
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, TypeAlias

import msgpack

from async_rl.errors import IntakeLogError
from protocol.messages import EndReason

_ID_LENGTH = struct.Struct("<H")


@dataclass(frozen=True, slots=True)
class HeaderRecord:
    """First record of a segment: who writes it, and how long each older segment was when it was sealed."""

    epoch: int
    sequence: int
    sealed: Mapping[str, int]


@dataclass(frozen=True, slots=True)
class GroupRecord:
    """A group was taken in. Facts only: the wire payload, no verdict."""

    task_id: str
    payload: bytes | memoryview


@dataclass(frozen=True, slots=True)
class GroupUse:
    """What a step does with one group."""

    task_id: str
    end: EndReason  # TRAINED, DROPPED or INVALID
    verdict: Mapping[str, Any]  # GroupVerdict.to_record()


@dataclass(frozen=True, slots=True)
class StepRecord:
    """What one step trains, written before it runs. With `trains` False it only ends groups that cannot be trained."""

    step: int  # index among step records, from 0
    version: int  # policy version that the step starts from
    batch: int  # drawn batch that it belongs to (proximal logprobs are fixed per batch)
    trains: bool
    groups: tuple[GroupUse, ...]
    seed: int
    last_of_batch: bool = True
    planned: tuple[tuple[str, ...], ...] = ()  # in a batch's first record: the tasks of each later step, as they were drawn

    def ends(self, *, skipped: bool) -> dict[str, str]:
        """task id → end. The groups of a skipped step were not trained: they end as dropped."""
        if not skipped:
            return {use.task_id: use.end.value for use in self.groups}
        return {use.task_id: (EndReason.DROPPED if use.end is EndReason.TRAINED else use.end).value for use in self.groups}

    def tally(self, *, skipped: bool) -> Counter[tuple[str, int, bool]]:
        """Trajectories per (verdict, lag or -1, trained). Those of a skipped step were dropped, whatever their verdict."""
        counts: Counter[tuple[str, int, bool]] = Counter()
        for use in self.groups:
            for verdict, lag, _, _, num_trained, *_ in use.verdict.get("trajectories", ()):
                trained = num_trained > 0 and self.trains and not skipped
                counts[verdict if trained or not num_trained else "drop", -1 if lag is None else lag, trained] += 1
        return counts


@dataclass(frozen=True, slots=True)
class SkipRecord:
    """The gradient of a train step was not finite: nothing was applied, and the version did not move."""

    step: int
    reason: str


@dataclass(frozen=True, slots=True)
class DeadRecord:
    """A task that can never be trained (dead-lettered); it counts as ended."""

    task_id: str
    reason: str


@dataclass(frozen=True, slots=True)
class EndRecord:
    """The run ended; `unused` were issued and not used. `issued`: tasks ever issued, for the audit."""

    unused: tuple[str, ...]
    issued: int


Record: TypeAlias = HeaderRecord | GroupRecord | StepRecord | SkipRecord | DeadRecord | EndRecord

_HEADER, _GROUP, _STEP, _SKIP, _DEAD, _END = 1, 2, 3, 4, 5, 6
KINDS = frozenset({_HEADER, _GROUP, _STEP, _SKIP, _DEAD, _END})


def encode_record(record: Record) -> tuple[int, bytes]:
    """(kind, body)."""
    match record:
        case GroupRecord(task_id, payload):
            encoded = task_id.encode()
            return _GROUP, _ID_LENGTH.pack(len(encoded)) + encoded + bytes(payload)
        case HeaderRecord(epoch, sequence, sealed):
            return _HEADER, _pack([epoch, sequence, dict(sealed)])
        case StepRecord():
            groups = [[use.task_id, use.end.value, dict(use.verdict)] for use in record.groups]
            head = [record.step, record.version, record.batch, record.trains]
            planned = [list(tasks) for tasks in record.planned]
            return _STEP, _pack([*head, groups, record.seed, record.last_of_batch, planned])
        case SkipRecord(step, reason):
            return _SKIP, _pack([step, reason])
        case DeadRecord(task_id, reason):
            return _DEAD, _pack([task_id, reason])
        case EndRecord(unused, issued):
            return _END, _pack([list(unused), issued])


def decode_record(kind: int, body: bytes | memoryview, *, keep_payload: bool = True) -> Record:
    """Inverse of encode_record; with keep_payload=False a group's payload is left out. Raises: IntakeLogError."""
    if kind == _GROUP:
        (length,) = _ID_LENGTH.unpack_from(body)
        task_id = bytes(body[2 : 2 + length]).decode()
        return GroupRecord(task_id, body[2 + length :] if keep_payload else b"")
    fields = msgpack.unpackb(body, strict_map_key=True)
    match kind:
        case 1:
            return HeaderRecord(epoch=fields[0], sequence=fields[1], sealed=fields[2])
        case 3:
            step, version, batch, trains, groups, seed, last, planned = fields
            uses = tuple(GroupUse(task_id, EndReason(end), verdict) for task_id, end, verdict in groups)
            return StepRecord(step, version, batch, trains, uses, seed, last, tuple(map(tuple, planned)))
        case 4:
            return SkipRecord(*fields)
        case 5:
            return DeadRecord(*fields)
        case 6:
            unused, issued = fields
            return EndRecord(tuple(unused), issued)
    raise IntakeLogError(f"intake log record of unknown kind {kind}: written by a newer version; read it with that one")


def _pack(value: list[Any]) -> bytes:
    packed: bytes = msgpack.packb(value)
    return packed
