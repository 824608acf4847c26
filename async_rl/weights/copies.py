"""Copies of many tensors into other memory by several threads: while a trainer stands still its other processors do nothing,
and one of them alone does not fill the memory bus.
"""

from __future__ import annotations

import os
from collections import deque
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from types import TracebackType

import torch

THREADS = min(4, os.cpu_count() or 1)
PIECE = 2**21
"""Elements that one thread copies at a time, about a millisecond; a model smaller than that is copied at once."""
MAX_PENDING = 8
"""Pieces; what was gathered for them is held until they are copied."""

_Pair = tuple[torch.Tensor, torch.Tensor]


class Copies:
    """`add` starts a copy, cast to the target's dtype; when the block is left all are done.

    Torch's own threads are used where it has several (their number decides bits elsewhere, so it is not touched here).
    """

    def __init__(self, threads: int = THREADS) -> None:
        self._threads = threads if torch.get_num_threads() == 1 else 1
        self._piece: list[_Pair] = []
        self._elements = 0
        self._pool: ThreadPoolExecutor | None = None
        self._pending: deque[Future[None]] = deque()

    def __enter__(self) -> Copies:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        try:
            if error is None:
                _copy(self._piece)
        finally:
            if self._pool is not None:
                self._pool.shutdown()
        while self._pending and error is None:
            self._pending.popleft().result()

    def add(self, target: torch.Tensor, source: torch.Tensor) -> None:
        """Same shape. `source` must not change before the block is left."""
        if self._threads == 1 or source.device.type != "cpu" or target.device.type != "cpu":
            target.copy_(source)
            return
        if source.numel() > PIECE and source.is_contiguous() and target.is_contiguous():
            parts = list(zip(torch.split(target.view(-1), PIECE), torch.split(source.view(-1), PIECE), strict=True))
        else:
            parts = [(target, source)]
        for part in parts:
            self._piece.append(part)
            self._elements += part[0].numel()
            if self._elements >= PIECE:
                self._submit()

    def _submit(self) -> None:
        if self._pool is None:
            self._pool = ThreadPoolExecutor(self._threads, thread_name_prefix="copy")
        self._pending.append(self._pool.submit(_copy, self._piece))
        self._piece, self._elements = [], 0
        while len(self._pending) > MAX_PENDING:
            self._pending.popleft().result()


def _copy(pairs: Sequence[_Pair]) -> None:
    for target, source in pairs:
        target.copy_(source)
