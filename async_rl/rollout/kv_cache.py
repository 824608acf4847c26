"""The KV of all running rows, right-aligned: every row writes its next token in the same column.

A row's tokens occupy columns [start, cur) of the buffer; the live window of the batch is [lo, cur), lo the smallest start.
So one decoding step writes one column and reads one slice, for any mixture of lengths; no index per row is needed.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

KeyValue = tuple[torch.Tensor, torch.Tensor]


@dataclass(frozen=True, slots=True)
class LayerShape:
    """KV of one layer: heads, and features per head of keys and values."""

    heads: int
    key_dim: int
    value_dim: int


class ColumnCache:
    """One buffer [layers, 2, rows, heads, columns, dim] for keys (0) and values (1), grown when needed.

    Where layers or keys and values differ in heads or dim, the buffer has the largest, and views leave the rest out.
    `num_rows`, `lo` and `cur` describe the live part; `cur` is the column that the next step writes.
    """

    def __init__(self, layers: Sequence[LayerShape], dtype: torch.dtype, device: torch.device) -> None:
        self._shapes = [(layer.heads, dim) for layer in layers for dim in (layer.key_dim, layer.value_dim)]
        self._heads = max(heads for heads, _ in self._shapes)
        self._dim = max(dim for _, dim in self._shapes)
        self._is_uniform = len(set(self._shapes)) == 1
        self.row_capacity = self.column_capacity = 0
        self.num_rows = self.lo = self.cur = 0
        self._buffer = self._allocate(0, 0, dtype, device)

    def step_views(self) -> tuple[Sequence[torch.Tensor], Sequence[torch.Tensor]]:
        """Views for one decoding step, each with keys and values of layer 0, then of layer 1, and so on.

        Targets [n, heads, dim]: column `cur` of the live rows, to be written. Windows [n, heads, cur + 1 − lo, dim]: what the
        step attends to, the target included.
        """
        live = self._buffer.narrow(2, 0, self.num_rows).flatten(0, 1)
        targets = live.select(3, self.cur).unbind(0)
        windows = live.narrow(3, self.lo, self.cur + 1 - self.lo).unbind(0)
        if not self._is_uniform:
            targets = tuple(t[:, :heads, :dim] for t, (heads, dim) in zip(targets, self._shapes, strict=True))
            windows = tuple(w[:, :heads, :, :dim] for w, (heads, dim) in zip(windows, self._shapes, strict=True))
        return targets, windows

    def fill(self, rows: slice | torch.Tensor, end: int, layers: Sequence[KeyValue], source: torch.Tensor | None) -> None:
        """Write whole prompts: `layers` hold [g, heads, T, dim], placed in columns [end − T, end) of `rows`.

        source [rows]: which of the g prompts each row takes; None: in order.
        """
        for layer, pair in enumerate(layers):
            for kind, tensor in enumerate(pair):
                heads, dim = tensor.shape[1], tensor.shape[3]
                target = self._buffer[layer, kind, :, :heads, end - tensor.shape[2] : end, :dim]
                target[rows] = tensor if source is None else tensor.index_select(0, source)

    def copy_rows(self, sources: Sequence[int], targets: Sequence[int]) -> None:
        """Copy the live window of rows `sources` over that of rows `targets`."""
        device = self._buffer.device
        src, dst = torch.tensor(sources, device=device), torch.tensor(targets, device=device)
        window = self._buffer[:, :, :, :, self.lo : self.cur]
        window[:, :, dst] = window[:, :, src]

    def move(self, new_lo: int, rows: int, columns: int) -> None:
        """Move the live window to start at `new_lo`, in a buffer of at least `rows` × `columns`."""
        width = self.cur - self.lo
        window = self._buffer[:, :, : self.num_rows, :, self.lo : self.cur]
        if rows > self.row_capacity or columns > self.column_capacity:
            self.row_capacity, self.column_capacity = max(rows, self.row_capacity), max(columns, self.column_capacity)
            old = self._buffer
            self._buffer = self._allocate(self.row_capacity, self.column_capacity, old.dtype, old.device)
        else:
            window = window.clone()  # the two ranges may overlap
        self._buffer[:, :, : self.num_rows, :, new_lo : new_lo + width] = window
        self.lo, self.cur = new_lo, new_lo + width

    def _allocate(self, rows: int, columns: int, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        # Zeros, not empty: masked columns are multiplied by probability 0, and 0 × NaN is NaN.
        shape = (len(self._shapes) // 2, 2, rows, self._heads, columns, self._dim)
        return torch.zeros(shape, dtype=dtype, device=device)
