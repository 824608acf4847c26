"""The KV of all running rows, right-aligned: every row writes its next token in the same column.

A row's tokens occupy columns [start, cur) of the buffers; the live window of the batch is [lo, cur), lo the smallest start.
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
    """Per layer K [rows, heads, columns, key_dim] and V [rows, heads, columns, value_dim], grown when needed.

    `num_rows`, `lo` and `cur` describe the live part; `cur` is the column that the next step writes.
    """

    def __init__(self, layers: Sequence[LayerShape], dtype: torch.dtype, device: torch.device) -> None:
        self._layers = tuple(layers)
        self._dtype, self._device = dtype, device
        self.row_capacity = self.column_capacity = 0
        self.num_rows = self.lo = self.cur = 0
        self._buffers: list[KeyValue] = []
        self.live: list[KeyValue] = []
        """Views of the first `num_rows` rows."""

    def set_rows(self, num_rows: int) -> None:
        """Make the first `num_rows` rows the live ones."""
        self.num_rows = num_rows
        self.live = [(k[:num_rows], v[:num_rows]) for k, v in self._buffers]

    def write(self, layer: int, keys: torch.Tensor, values: torch.Tensor) -> KeyValue:
        """Write column `cur` of the live rows ([n, heads, 1, dim] each); return the window [lo, cur] with it."""
        all_keys, all_values = self.live[layer]
        all_keys.narrow(2, self.cur, 1).copy_(keys)
        all_values.narrow(2, self.cur, 1).copy_(values)
        width = self.cur + 1 - self.lo
        return all_keys.narrow(2, self.lo, width), all_values.narrow(2, self.lo, width)

    def fill(self, rows: slice | torch.Tensor, end: int, layers: Sequence[KeyValue], source: torch.Tensor | None) -> None:
        """Write whole prompts: `layers` hold [g, heads, T, dim], placed in columns [end − T, end) of `rows`.

        source [rows]: which of the g prompts each row takes; None: in order.
        """
        for (k, v), (new_k, new_v) in zip(self._buffers, layers, strict=True):
            columns = slice(end - new_k.shape[2], end)
            k[rows, :, columns] = new_k if source is None else new_k.index_select(0, source)
            v[rows, :, columns] = new_v if source is None else new_v.index_select(0, source)

    def copy_rows(self, sources: Sequence[int], targets: Sequence[int]) -> None:
        """Copy the live window of rows `sources` over that of rows `targets`."""
        src, dst = torch.tensor(sources, device=self._device), torch.tensor(targets, device=self._device)
        window = slice(self.lo, self.cur)
        for pair in self._buffers:
            for buffer in pair:
                buffer[dst, :, window] = buffer[src, :, window]

    def move(self, new_lo: int, rows: int, columns: int) -> None:
        """Move the live window to start at `new_lo`, in buffers of at least `rows` × `columns`."""
        width = self.cur - self.lo
        old = self._buffers
        if rows > self.row_capacity or columns > self.column_capacity:
            self.row_capacity, self.column_capacity = max(rows, self.row_capacity), max(columns, self.column_capacity)
            self._buffers = [self._allocate(layer) for layer in self._layers]
        if width and self.num_rows:
            for old_pair, new_pair in zip(old, self._buffers, strict=True):
                for source, target in zip(old_pair, new_pair, strict=True):
                    window = source[: self.num_rows, :, self.lo : self.cur]
                    if source is target:  # the two ranges may overlap
                        window = window.clone()
                    target[: self.num_rows, :, new_lo : new_lo + width] = window
        self.lo, self.cur = new_lo, new_lo + width
        self.set_rows(self.num_rows)

    def _allocate(self, layer: LayerShape) -> KeyValue:
        def empty(dim: int) -> torch.Tensor:
            # Zeros, not empty: masked columns are multiplied by probability 0, and 0 × NaN is NaN.
            shape = (self.row_capacity, layer.heads, self.column_capacity, dim)
            return torch.zeros(shape, dtype=self._dtype, device=self._device)

        return empty(layer.key_dim), empty(layer.value_dim)
