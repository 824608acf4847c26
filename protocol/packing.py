"""msgpack with 1-D numpy arrays of allow-listed dtypes, strict in both directions. Nothing that is read is ever executed.

An array is a msgpack ext type: the code names the dtype, the body is its little-endian raw bytes. Decoding makes a
read-only view of those bytes (`np.frombuffer`), no copy.
"""

from __future__ import annotations

import difflib
import threading
from collections.abc import Callable, Collection, Mapping
from typing import Any, NoReturn

import msgpack
import numpy as np

from protocol.errors import CodecError

ARRAY_DTYPES: Mapping[int, np.dtype[Any]] = {
    1: np.dtype("<i4"),
    2: np.dtype("<f4"),
    3: np.dtype("u1"),
    4: np.dtype("<i8"),
    5: np.dtype("<f8"),
}
"""Ext code → dtype. The only executable-looking thing on the wire is a number in this table."""

_CODE_OF: Mapping[np.dtype[Any], int] = {dtype: code for code, dtype in ARRAY_DTYPES.items()}
_ALLOWED = ", ".join(dtype.name for dtype in ARRAY_DTYPES.values())


def nearest(name: object, known: Collection[str]) -> str:
    """`"; nearest known: 'x'"` if something is near, else the whole list. For messages about unknown names."""
    close = difflib.get_close_matches(str(name), known, n=1)
    return f"; nearest known: {close[0]!r}" if close else f"; known: {', '.join(sorted(known))}"


def pack_array(array: object, dtype: np.dtype[Any] | None = None) -> msgpack.ExtType:
    """One 1-D array as an ext value. Raises: CodecError if the dtype is not allowed (or not `dtype`) or it is not 1-D."""
    if not isinstance(array, np.ndarray):
        raise CodecError(f"expected a numpy array, got {type(array).__name__}")
    code = _CODE_OF.get(array.dtype)
    if code is None or (dtype is not None and array.dtype != dtype):
        wanted = dtype.name if dtype is not None else f"one of {_ALLOWED}"
        raise CodecError(f"dtype {array.dtype} (byte order {array.dtype.byteorder!r}) is not {wanted}; convert with astype")
    if array.ndim != 1:
        raise CodecError(f"array of shape {array.shape} is not 1-D; send it raveled, with its shape beside it")
    return msgpack.ExtType(code, array.tobytes())


def pack(obj: object) -> bytes:
    """Pack None, bool, int, float, str, bytes, list, tuple (read back as list), dict with str keys, and 1-D arrays.

    Raises: CodecError naming what and where.
    """
    _check_packable(obj, "")
    return pack_unchecked(obj)


class _Packers(threading.local):
    """One packer per thread, kept: a new one faults in a buffer of a megabyte, at seven times the cost of packing."""

    def __init__(self) -> None:
        self.packer = msgpack.Packer(default=_pack_other, use_bin_type=True)


def _pack_other(obj: object) -> msgpack.ExtType:
    """What msgpack itself cannot pack: our arrays; and integers too large for it, which it hands over too."""
    if isinstance(obj, int):
        raise CodecError(f"cannot pack the int {obj}: it is out of range (64 bits)")
    return pack_array(obj)


_packers = _Packers()


def pack_unchecked(obj: object) -> bytes:
    """`pack` for values whose types and keys are checked already."""
    try:
        packed: bytes = _packers.packer.pack(obj)
    except CodecError:
        raise
    except (TypeError, ValueError, OverflowError, RecursionError) as error:
        raise CodecError(f"cannot pack: {error}") from error
    return packed


def unpack(data: bytes | memoryview) -> Any:
    """Read what `pack` wrote. Raises: CodecError (truncated, trailing bytes, unknown ext codes, keys that are no strings)."""
    return _check_unpacked(_unpack(data, _read_map), "")


def unpack_unchecked(data: bytes | memoryview) -> Any:
    """`unpack` for a reader that itself checks the names and types of everything in the message."""
    return _unpack(data, None)


def _unpack(data: bytes | memoryview, read_map: Callable[[list[tuple[Any, Any]]], dict[str, Any]] | None) -> Any:
    try:
        return msgpack.unpackb(data, ext_hook=read_array, object_pairs_hook=read_map, raw=False, strict_map_key=True)
    except CodecError:
        raise
    except msgpack.ExtraData as error:
        raise CodecError(
            f"{len(error.extra)} trailing bytes after the message ({len(data)} bytes in all){_hint(data)}"
        ) from error
    except msgpack.StackError as error:
        raise CodecError("message is nested too deeply") from error
    except (ValueError, TypeError, OverflowError, msgpack.UnpackException) as error:
        raise CodecError(f"not a whole msgpack message ({len(data)} bytes): {error}{_hint(data)}") from error


def _hint(data: bytes | memoryview) -> str:
    return "; this looks like a pickle, which is never read here" if bytes(data[:2]) in _PICKLE_HEADS else ""


_PICKLE_HEADS = (b"\x80\x02", b"\x80\x03", b"\x80\x04", b"\x80\x05")


def array_code(array: np.ndarray[Any, np.dtype[Any]]) -> int:
    """The ext code of the array's dtype. Raises: CodecError if it is not allowed."""
    code = _CODE_OF.get(array.dtype)
    if code is None:
        raise CodecError(f"dtype {array.dtype} is not one of {_ALLOWED}")
    return code


def read_array(code: int, body: bytes | memoryview) -> np.ndarray[Any, np.dtype[Any]]:
    """A read-only view of an ext value's body. Raises: CodecError for unknown codes and torn values."""
    dtype = ARRAY_DTYPES.get(code)
    if dtype is None:
        raise CodecError(f"unknown ext code {code}; known: {', '.join(f'{c} ({d.name})' for c, d in ARRAY_DTYPES.items())}")
    if len(body) % dtype.itemsize:
        raise CodecError(f"array of {dtype.name} has {len(body)} bytes, not a multiple of {dtype.itemsize}")
    return np.frombuffer(body, dtype)


def _read_map(pairs: list[tuple[Any, Any]]) -> dict[str, Any]:
    read = dict(pairs)
    if len(read) != len(pairs):
        names = [name for name, _ in pairs]
        raise CodecError(f"map names {next(n for n in names if names.count(n) > 1)!r} twice")
    for key in read:
        if key.__class__ is not str:
            raise CodecError(f"map key {key!r} is a {type(key).__name__}, not a string")
    return read


def _check_packable(obj: object, where: str) -> None:
    if obj is None or isinstance(obj, bool | int | float | str | bytes):
        return
    if isinstance(obj, dict):
        for key, value in obj.items():
            if not isinstance(key, str):
                raise CodecError(f"{where or 'message'}: map key {key!r} is a {type(key).__name__}, not a string")
            _check_packable(value, f"{where}.{key}" if where else key)
    elif isinstance(obj, list | tuple):
        for index, value in enumerate(obj):
            _check_packable(value, f"{where}[{index}]")
    elif isinstance(obj, np.ndarray):
        if obj.dtype not in _CODE_OF or obj.ndim != 1:
            _refuse_array(obj, where)
    else:
        raise CodecError(f"{where or 'message'}: cannot pack a {type(obj).__module__}.{type(obj).__qualname__}")


def _refuse_array(array: np.ndarray[Any, np.dtype[Any]], where: str) -> NoReturn:
    try:
        pack_array(array)
    except CodecError as error:
        raise CodecError(f"{where or 'message'}: {error}") from None
    raise AssertionError("unreachable: the array was fine")


def _check_unpacked(obj: Any, where: str) -> Any:
    if isinstance(obj, dict):
        for key, value in obj.items():
            _check_unpacked(value, f"{where}.{key}" if where else key)
    elif isinstance(obj, list):
        for index, value in enumerate(obj):
            _check_unpacked(value, f"{where}[{index}]")
    elif isinstance(obj, msgpack.Timestamp):
        raise CodecError(f"{where or 'message'}: unknown ext code -1 (timestamp)")
    return obj


def check_json(value: object, where: str) -> None:
    """Raise CodecError unless `value` is JSON: None, bool, int, float, str, list, dict with str keys; nothing else."""
    kind = value.__class__
    if kind is str or kind is int or kind is float or kind is bool or value is None:
        return
    if isinstance(value, dict):
        for key, item in value.items():
            if key.__class__ is not str:
                raise CodecError(f"{where}: map key {key!r} is a {type(key).__name__}, not a string")
            check_json(item, f"{where}.{key}")
    elif isinstance(value, list):
        for index, item in enumerate(value):
            check_json(item, f"{where}[{index}]")
    else:
        raise CodecError(f"{where}: a {kind.__name__} is not JSON (use None, bool, int, float, str, list or dict)")
