"""Per-row facts of a decoding batch, aligned with the columns of its KV: tokens, logprobs, versions, limits, masks."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt
import torch

from async_rl.rollout.sampling import uniforms
from protocol.messages import SamplingParams

NO_STOP = -1
_UNIFORM_BLOCK = 16
"""Columns whose uniforms are computed at a time."""
_BY_COLUMN = ("ids", "logprobs", "versions", "kv_versions")
_BY_ROW = ("start", "first_sampled", "last_allowed", "kv_of_row", "seeds", "temperatures", "stops")


class TokenTable:
    """Arrays over [rows, columns] and over [rows]; only the first rows and the live window mean anything.

    ids int64, logprobs float32 (nats), versions and kv_versions int64: [rows, columns].
    start, first_sampled, last_allowed: column of a row's first token, of its first sampled one, of the last it may sample.
    """

    def __init__(self, dtype: torch.dtype, device: torch.device) -> None:
        self.dtype, self.device = dtype, device
        self._uniforms: npt.NDArray[np.float64] | None = None
        self._uniforms_from = 0
        self._allocate(0, 0, num_stops=1)
        self.changed(0)

    def _allocate(self, rows: int, columns: int, num_stops: int) -> None:
        self.ids = np.zeros((rows, columns), dtype=np.int64)
        self.logprobs = np.zeros((rows, columns), dtype=np.float32)
        self.versions = np.zeros((rows, columns), dtype=np.int64)
        self.kv_versions = np.zeros((rows, columns), dtype=np.int64)
        self.start = np.zeros(rows, dtype=np.int64)
        self.first_sampled = np.zeros(rows, dtype=np.int64)
        self.last_allowed = np.zeros(rows, dtype=np.int64)
        self.kv_of_row = np.zeros(rows, dtype=np.int64)
        self.seeds = np.zeros(rows, dtype=np.uint64)
        self.temperatures = np.ones(rows, dtype=np.float32)
        self.stops = np.full((rows, num_stops), NO_STOP, dtype=np.int64)
        self._bias = torch.zeros((rows, 1, 1, columns), dtype=self.dtype, device=self.device)
        self._ids_torch = torch.from_numpy(self.ids)  # the same memory
        self._start_torch = torch.from_numpy(self.start)

    # -- what a step needs -------------------------------------------------------------------------------------------

    def inputs(self, column: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Tokens at `column` and their positions, [n] each."""
        n = self._num_rows
        ids, positions = self._ids_torch[:n, column], column - self._start_torch[:n]
        return ids.to(self.device), positions.to(self.device)

    def bias(self, lo: int, end: int) -> torch.Tensor | None:
        """Additive mask [n, 1, 1, end − lo] that hides what lies before each row's start; None if nothing does."""
        return None if self._same_start else self._bias[: self._num_rows, :, :, lo:end]

    def temperature(self, rows: slice | None = None) -> torch.Tensor | float:
        """One number if all live rows share it, else [n, 1]."""
        if self._shared_temperature is not None:
            return self._shared_temperature
        return self._temperature_column if rows is None else self._temperature_column[rows]

    def uniforms(self, column: int) -> npt.NDArray[np.float64]:
        """The number that draws each live row's token at `column`, [n]."""
        n, offset = self._num_rows, column - self._uniforms_from
        if self._uniforms is None or not 0 <= offset < _UNIFORM_BLOCK:
            ahead = np.arange(_UNIFORM_BLOCK).reshape(-1, 1)
            self._uniforms = uniforms(self.seeds[:n], column - self.first_sampled[:n] + ahead)
            self._uniforms_from, offset = column, 0
        drawn: npt.NDArray[np.float64] = self._uniforms[offset]
        return drawn

    def record(
        self, rows: slice, column: int, tokens: torch.Tensor, logprobs: torch.Tensor, version: int
    ) -> npt.NDArray[np.intp]:
        """Write a sampled token per row at `column`; return the rows that are finished with it."""
        drawn = tokens.cpu().numpy()
        self.ids[rows, column] = drawn
        self.logprobs[rows, column] = logprobs.cpu().numpy()
        self.versions[rows, column] = version
        self.kv_versions[rows, column] = self.kv_of_row[rows]
        finished = (self.stops[rows] == drawn[:, None]).any(1)
        if column >= self._next_limit:
            finished |= self.last_allowed[rows] <= column
        return np.flatnonzero(finished) + (rows.start or 0)

    def is_stop(self, row: int, column: int) -> bool:
        return bool((self.stops[row] == self.ids[row, column]).any())

    def first_start(self) -> int:
        """The live window's first column."""
        return int(self.start[: self._num_rows].min())

    # -- what changes the rows ---------------------------------------------------------------------------------------

    def add(
        self,
        first: int,
        column: int,
        rows: Sequence[tuple[npt.NDArray[np.int64], SamplingParams]],
        *,
        max_context: int,
        version: int,
    ) -> None:
        """Add rows from `first` on, their prompts ending before `column`, where their first token will be sampled."""
        self._widen_stops(max(len(params.stop_token_ids) for _, params in rows))
        for row, (prompt, params) in enumerate(rows, start=first):
            self.ids[row, column - prompt.size : column] = prompt
            self.start[row] = column - prompt.size
            self.last_allowed[row] = column - 1 + min(params.max_new_tokens, max_context - prompt.size)
            self.seeds[row] = params.seed
            self.temperatures[row] = params.temperature
            self.stops[row] = NO_STOP
            self.stops[row, : len(params.stop_token_ids)] = params.stop_token_ids
        added = slice(first, first + len(rows))
        self.first_sampled[added] = column
        self.kv_of_row[added] = version
        self._write_bias(added)
        self.changed(first + len(rows))

    def copy_rows(self, sources: Sequence[int], targets: Sequence[int]) -> None:
        for name in (*_BY_COLUMN, *_BY_ROW):
            array = getattr(self, name)
            array[targets] = array[sources]
        self._bias[targets] = self._bias[sources]

    def changed(self, num_rows: int) -> None:
        """The first `num_rows` rows are the live ones now; forget what was derived from the others."""
        self._num_rows = num_rows
        self._uniforms = None
        start, temperatures = self.start[:num_rows], self.temperatures[:num_rows]
        self._same_start = num_rows == 0 or bool((start == start[0]).all())
        shared = num_rows == 0 or bool((temperatures == temperatures[0]).all())
        self._shared_temperature = float(temperatures[0]) if shared and num_rows else (1.0 if shared else None)
        self._temperature_column = torch.from_numpy(temperatures.copy()).unsqueeze(1).to(self.device)
        self._next_limit = int(self.last_allowed[:num_rows].min()) if num_rows else 0

    def move(self, lo: int, new_lo: int, width: int, rows: int, columns: int) -> None:
        """Move columns [lo, lo + width) of the live rows to `new_lo`, in tables of `rows` × `columns`."""
        n = self._num_rows
        old = {name: getattr(self, name) for name in (*_BY_COLUMN, *_BY_ROW)}
        if (rows, columns) != self.ids.shape:
            self._allocate(rows, columns, num_stops=self.stops.shape[1])
        for name in _BY_COLUMN if n else ():  # numpy copies overlapping slices as if through a buffer
            getattr(self, name)[:n, new_lo : new_lo + width] = old[name][:n, lo : lo + width]
        for name in _BY_ROW:
            getattr(self, name)[:n] = old[name][:n]
        for array in (self.start, self.first_sampled, self.last_allowed):
            array[:n] += new_lo - lo
        self._write_bias(slice(0, n))
        self.changed(n)

    def _write_bias(self, rows: slice) -> None:
        hidden = torch.arange(self.ids.shape[1]) < self._start_torch[rows].unsqueeze(1)
        bias = torch.zeros(hidden.shape, dtype=self.dtype).masked_fill_(hidden, float("-inf"))
        self._bias[rows, 0, 0] = bias.to(self.device)

    def _widen_stops(self, num_stops: int) -> None:
        if num_stops > self.stops.shape[1]:
            wider = np.full((self.stops.shape[0], num_stops), NO_STOP, dtype=np.int64)
            wider[:, : self.stops.shape[1]] = self.stops
            self.stops = wider
