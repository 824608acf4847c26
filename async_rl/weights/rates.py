"""The limit that a push on one host is measured against: how fast this machine copies memory."""

from __future__ import annotations

import time

import torch

COPY_BYTES = 64 * 2**20
TRIES = 5


def memcpy_bytes_per_s(num_bytes: int = COPY_BYTES) -> float:
    """Bytes copied per second by one thread, of a block too large for the caches: the best of a few tries."""
    source, target = torch.zeros(num_bytes, dtype=torch.uint8), torch.ones(num_bytes, dtype=torch.uint8)
    best = float("inf")
    for _ in range(TRIES):
        started = time.perf_counter()
        target.copy_(source)
        best = min(best, time.perf_counter() - started)
    return num_bytes / best
