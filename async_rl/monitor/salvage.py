"""What can still be read of a frame that the codec refuses. For people to look at, never to go on with."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import msgpack

MOST_VALUES = 2000
DEEPEST = 16
_MAPS, _LISTS = frozenset({*range(0x80, 0x90), 0xDE, 0xDF}), frozenset({*range(0x90, 0xA0), 0xDC, 0xDD})


@dataclass(slots=True)
class Salvaged:
    """Values by path, as far as they could be read; `problem` says what stopped it, and at which byte."""

    values: list[tuple[str, Any]] = field(default_factory=list)
    problem: str = ""


def salvage(payload: bytes) -> Salvaged:
    """Read msgpack value by value until something is wrong. Ext values stay bytes; nothing is executed."""
    reader = _Reader(payload)
    try:
        reader.read("", 0)
        left = len(payload) - reader.position
        reader.found.problem = f"{left} bytes follow the message" if left else ""
    except (ValueError, TypeError, msgpack.UnpackException, RecursionError) as error:
        reader.found.problem = f"at byte {reader.position} of {len(payload)}: {error or type(error).__name__}"
    return reader.found


class _Reader:
    def __init__(self, payload: bytes) -> None:
        self._payload = payload
        self._unpacker = msgpack.Unpacker(raw=False, strict_map_key=False, max_buffer_size=max(1, len(payload)))
        self._unpacker.feed(payload)
        self.found = Salvaged()

    @property
    def position(self) -> int:
        return int(self._unpacker.tell())

    def read(self, path: str, depth: int) -> None:
        if len(self.found.values) >= MOST_VALUES or depth > DEEPEST:
            raise ValueError("too much of it")
        kind = self._payload[self.position] if self.position < len(self._payload) else -1
        if kind in _MAPS:
            for _ in range(self._unpacker.read_map_header()):
                key = self._unpacker.unpack()
                self.read(f"{path}.{key}" if path else str(key), depth + 1)
        elif kind in _LISTS:
            for index in range(self._unpacker.read_array_header()):
                self.read(f"{path}[{index}]", depth + 1)
        else:
            self.found.values.append((path, self._unpacker.unpack()))
