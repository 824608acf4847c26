"""Give freed memory back to the system, now and then.

Roles keep freed blocks, because fresh pages cost every step more than they save (launch.processes.ALLOCATOR). What is kept is
the highest that steps, checkpoints and compactions ever needed together, and such records go on being broken for hours.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from functools import cache


def give_back() -> bool:
    """Return free pages of the heap, also those between blocks in use. False where the C library cannot (it is not glibc).

    Milliseconds for some hundred MiB; the next step takes fresh pages. Source: malloc_trim(3).
    """
    trim = _malloc_trim()
    return trim is not None and bool(trim(0))


@cache
def _malloc_trim() -> Callable[[int], int] | None:
    try:
        trim = ctypes.CDLL(None).malloc_trim
    except (OSError, AttributeError):
        return None
    trim.argtypes, trim.restype = [ctypes.c_size_t], ctypes.c_int
    return trim
