"""Bad frames by the thousand: random bytes, damaged frames, and frames that are well-formed msgpack but wrong."""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping
from typing import Any

import msgpack
import numpy as np

from async_rl.testing.builders import make_group, make_task, make_trajectory
from protocol.codec import encode
from protocol.messages import Reward

Mutation = Callable[[bytes, random.Random], bytes]
NANS = np.full(4, np.nan, "<f4").tobytes()
PICKLE_THAT_WOULD_RUN = b"\x80\x04\x8c\x05posix\x94\x8c\x06system\x94\x93\x94\x8c\x05false\x94\x85\x94R\x94."
"""os.system("false"), if anybody unpickled it."""


def valid_frame(row: int, random_: random.Random) -> bytes:
    """A frame as a role would send it; `row` makes the id. One in four is a task."""
    if random_.random() < 0.25:
        return encode(make_task(row=row, group_size=random_.randint(1, 8), prompt="x" * random_.randint(0, 40)))
    return encode_group(row, random_)


def encode_group(row: int, random_: random.Random) -> bytes:
    """A valid group of 1 to 3 trajectories: several turns, rewards of every kind, long and short."""
    rewards = [1.0, 0.0, None, Reward.invalid("timed out", "timeout"), Reward(0.5, {"format": 0.5, "exact": 0.0})]
    size = random_.randint(1, 3)
    trajectories = [
        make_trajectory(
            prompt_length=random_.randint(0, 20),
            turns=[(random_.randint(0, 9), random_.randint(0, 3)) for _ in range(random_.randint(1, 3))],
            versions=random_.randint(0, 300),
            reward=random_.choice(rewards),
            seed=random_.getrandbits(62),
        )
        for _ in range(size)
    ]
    return encode(make_group(trajectories, task=make_task(row=row, group_size=size)))


# -- bytes ---------------------------------------------------------------------------------------------------------------
def _random_bytes(frame: bytes, random_: random.Random) -> bytes:
    return random_.randbytes(random_.choice([0, 1, 2, 3, 16, 200, 3000]))


def _flip_bits(frame: bytes, random_: random.Random) -> bytes:
    data = bytearray(frame)
    for _ in range(random_.randint(1, 8)):
        data[random_.randrange(len(data))] ^= 1 << random_.randrange(8)
    return bytes(data)


def _cut(frame: bytes, random_: random.Random) -> bytes:
    return frame[: random_.randrange(len(frame))]


def _extend(frame: bytes, random_: random.Random) -> bytes:
    return frame + random_.choice([b"\0", b"\xc1", frame, random_.randbytes(40)])


def _overwrite(frame: bytes, random_: random.Random) -> bytes:
    """Also lengths: msgpack's 32-bit ones promise up to 4 GiB."""
    start = random_.randrange(len(frame))
    headers = [
        b"\xdd\xff\xff\xff\xff",
        b"\xdf\xff\xff\xff\xff",
        b"\xc6\xff\xff\xff\xff",
        b"\xc9\xff\xff\xff\xff\x01",
        b"\xdb\x7f\xff\xff\xff",
    ]
    new = random_.choice([*headers, b"\xd6\xff\0\0\0\0", b"\xc1", b"\x91" * 2000, b"\x81\xa0" * 2000, random_.randbytes(8)])
    return frame[:start] + new + frame[start + random_.choice([0, len(new)]) :]


def _splice(frame: bytes, random_: random.Random) -> bytes:
    other = valid_frame(random_.randrange(1000), random_)
    return frame[: random_.randrange(len(frame))] + other[random_.randrange(len(other)) :]


def _pickle(frame: bytes, random_: random.Random) -> bytes:
    wrapped: bytes = msgpack.packb({"schema": 1, "kind": "trajectory_group", "body": {"__pickle__": PICKLE_THAT_WOULD_RUN}})
    numpy_way: bytes = msgpack.packb({"nd": True, "type": "O", "kind": "O", "shape": [1], "data": PICKLE_THAT_WOULD_RUN})
    return random_.choice([PICKLE_THAT_WOULD_RUN, wrapped, numpy_way, PICKLE_THAT_WOULD_RUN + frame])


# -- structure -----------------------------------------------------------------------------------------------------------
DEEPEST = 200


def _nodes(tree: Any) -> list[tuple[Any, ...]]:
    """Paths of everything in the tree, the root included, down to DEEPEST: what is nested twice must still be packed."""
    found: list[tuple[Any, ...]] = []
    left: list[tuple[tuple[Any, ...], Any]] = [((), tree)]
    while left:
        path, value = left.pop()
        found.append(path)
        if len(path) < DEEPEST:
            children = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
            left += [((*path, name), child) for name, child in children]
    return found


def _strange(value: Any, random_: random.Random) -> Any:
    """Something else in its place: another type, an extreme, a wrong array."""
    deep: Any = 0
    for _ in range(random_.choice([3, 40, 600])):
        deep = [deep]
    strange = [
        None, True, -1, 2**63, -(2**63), 2**64 - 1, float("nan"), float("inf"), 1e308, "", "x" * 10_000, b"", b"\0" * 7, [], {},
        {"schema": 1}, deep, [value], {"value": value},
        msgpack.ExtType(1, b"\0" * random_.randint(0, 9)), msgpack.ExtType(9, b"abcd"), msgpack.ExtType(2, NANS),
        msgpack.ExtType(3, bytes(range(9))), msgpack.Timestamp(1, 1), msgpack.ExtType(127, PICKLE_THAT_WOULD_RUN),
    ]  # fmt: skip
    return random_.choice(strange)


def _restructure(frame: bytes, random_: random.Random) -> bytes:
    """Read the frame as plain msgpack, change a few places, write it again."""
    tree = msgpack.unpackb(frame, strict_map_key=False)
    for _ in range(random_.randint(1, 3)):
        tree = _change(tree, random_.choice(_nodes(tree)), random_)
    packed: bytes = msgpack.packb(tree)
    return packed


def _change(tree: Any, path: tuple[Any, ...], random_: random.Random) -> Any:
    if not path:
        return _strange(tree, random_)
    parent = tree
    for name in path[:-1]:
        parent = parent[name]
    name = path[-1]
    how = random_.choice(["replace", "replace", "remove", "add", "rename", "repeat"])
    if how == "replace":
        parent[name] = _strange(parent[name], random_)
    elif how == "remove":
        del parent[name]
    elif isinstance(parent, dict):
        new = random_.choice([f"{name}x", 7, "__class__", "schema"])
        parent[new] = parent.pop(name) if how == "rename" else parent[name]
    else:
        parent.insert(name, parent[random_.randrange(len(parent))])
    return tree


def _double_key(frame: bytes, random_: random.Random) -> bytes:
    """A map that names a field twice: most readers take the last one, silently."""
    key = random_.choice([b"\xa4kind\xabprompt_task", b"\xa6schema\x01", b"\xa6schema\x02"])
    return b"\x84" + frame[1:] + key


MUTATIONS: Mapping[str, Mutation] = {
    "random bytes": _random_bytes,
    "flipped bits": _flip_bits,
    "cut short": _cut,
    "extended": _extend,
    "overwritten": _overwrite,
    "spliced": _splice,
    "pickle": _pickle,
    "restructured": _restructure,
    "field named twice": _double_key,
}


def bad_frame(row: int, random_: random.Random) -> tuple[str, bytes]:
    """A mutation's name and what it made of a valid frame. (Some of it may still be a valid frame.)"""
    name = random_.choice([*MUTATIONS, "restructured", "restructured"])
    return name, MUTATIONS[name](valid_frame(row, random_), random_)
