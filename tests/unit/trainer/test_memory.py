from __future__ import annotations

import os
import subprocess
import sys

import pytest

from async_rl.launch.processes import ALLOCATOR

PROGRAM = """
import ctypes
from pathlib import Path
from async_rl.trainer.memory import give_back
libc = ctypes.CDLL(None)
libc.malloc.restype, libc.free.argtypes = ctypes.c_void_p, [ctypes.c_void_p]
def held_mib():
    return int(Path("/proc/self/statm").read_text().split()[1]) * 4096 / 2**20
blocks = [libc.malloc(2**20) for _ in range(65)]
for block in blocks:
    ctypes.memset(block, 1, 2**20)
for block in blocks[:-1]:  # the last one keeps the end of the heap in use
    libc.free(block)
before = held_mib()
print(give_back(), before - held_mib())
"""


@pytest.mark.skipif(not hasattr(os, "confstr") or "glibc" not in (os.confstr("CS_GNU_LIBC_VERSION") or ""), reason="glibc's")
def test_what_an_allocator_of_a_role_keeps_is_given_back_also_from_the_middle_of_the_heap() -> None:
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM], env={**os.environ, **ALLOCATOR}, capture_output=True, text=True, timeout=60, check=True
    )
    worked, given_mib = done.stdout.split()
    assert worked == "True"
    assert float(given_mib) > 55
