"""Copies of many tensors into other memory, large ones by several threads: while a trainer stands still its other processors do
nothing, and one of them alone does not fill the memory bus.
"""

from __future__ import annotations

import os
from collections import deque
from concurrent.futures import Future, ThreadPoolExecutor
from types import TracebackType

import torch

THREADS = min(4, os.cpu_count() or 1)
LARGE = 2**20
"""Elements; below it a thread's start costs more than it saves."""
PIECE = 2**21
MAX_PENDING = 16
"""Pieces; what was gathered for them is held until they are copied."""


class Copies:
    """`add` starts a copy, cast to the target's dtype; when the block is left all are done.

    Torch's own threads are used where it has several (their number decides bits elsewhere, so it is not touched here).
    """

    def __init__(self, threads: int = THREADS) -> None:
        self._threads = threads if torch.get_num_threads() == 1 else 1
        self._pool: ThreadPoolExecutor | None = None
        self._pending: deque[Future[torch.Tensor]] = deque()

    def __enter__(self) -> Copies:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        if self._pool is not None:
            self._pool.shutdown()
        while self._pending and error is None:
            self._pending.popleft().result()

    def add(self, target: torch.Tensor, source: torch.Tensor) -> None:
        """Same shape. `source` must not change before the block is left."""
        splits = self._threads > 1 and source.numel() >= LARGE and source.is_contiguous() and target.is_contiguous()
        if not splits or source.device.type != "cpu" or target.device.type != "cpu":
            target.copy_(source)
            return
        if self._pool is None:
            self._pool = ThreadPoolExecutor(self._threads, thread_name_prefix="copy")
        for into, out_of in zip(target.view(-1).split(PIECE), source.view(-1).split(PIECE), strict=True):
            self._pending.append(self._pool.submit(into.copy_, out_of))
        while len(self._pending) > MAX_PENDING:
            self._pending.popleft().result()
