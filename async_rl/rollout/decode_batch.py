"""The synchronous core of the torch engine: admit prompts, decode a token for every row, hand back what finished.

All rows share one write column (see kv_cache). The token tables are aligned with the KV's columns: a row's tokens, prompt
and sampled, are ids[row, start .. cur]. Between steps the token at column `cur` is sampled but its KV is not yet written:

    columns   lo ......... start ............ cur-1   cur
    ids        .             prompt, sampled          newest token of every row
    KV         .             written                  written by the next step
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Sequence
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import torch

from async_rl.rollout.engine import Completion
from async_rl.rollout.forward import Forward
from async_rl.rollout.kv_cache import ColumnCache
from async_rl.rollout.requests import Request
from async_rl.rollout.sampling import sample
from async_rl.rollout.token_table import TokenTable
from protocol.messages import FinishReason

MAX_PREFILL_TOKENS = 4096
"""Padded tokens per prefill call: bounds its memory."""
MIN_COLUMNS = 64


class Member(NamedTuple):
    """A row's owner."""

    request: Request
    member: int
    admitted_s: float


class DecodeBatch:
    """Rows that decode together. Not thread-safe: one thread owns it.

    version: policy version of the weights in use, set by `serve`.
    """

    def __init__(
        self,
        forward: Forward,
        *,
        dtype: torch.dtype,
        device: torch.device,
        max_running: int,
        max_context: int,
        now: Callable[[], float],
    ) -> None:
        self._forward = forward
        self._max_running, self._max_context = max_running, max_context
        self._now = now
        self._cache = ColumnCache(forward.layers, dtype, device)
        self._table = TokenTable(dtype, device)
        self._members: list[Member] = []
        self._waiting: deque[Request] = deque()
        self.version = 0

    @property
    def num_running(self) -> int:
        return len(self._members)

    @property
    def num_waiting(self) -> int:
        """Requests with members that have no row yet."""
        return len(self._waiting)

    @property
    def num_columns(self) -> int:
        """Columns that the KV buffer holds."""
        return self._cache.column_capacity

    @property
    def is_idle(self) -> bool:
        return not self._members and not self._waiting

    def requests(self) -> list[Request]:
        """Every unfinished request once, in no order."""
        found = {id(r): r for r in [*self._waiting, *(member.request for member in self._members)]}
        return list(found.values())

    def submit(self, request: Request) -> None:
        self._waiting.append(request)

    @torch.inference_mode()
    def abort(self, request: Request) -> None:
        """Forget a request: its rows are free afterwards."""
        request.cancelled = True
        if request in self._waiting:
            self._waiting.remove(request)
        self._remove([row for row, member in enumerate(self._members) if member.request is request])

    @torch.inference_mode()
    def serve(self, version: int, *, recompute: bool) -> None:
        """Go on under new weights; recompute: rewrite all KV with them, so that it is `version`'s too."""
        self.version = version
        if recompute and self._members:
            self._recompute()
            self._table.kv_of_row[: self.num_running] = version
        else:
            self._table.kv_of_row = np.minimum(self._table.kv_of_row, version)  # matters only if versions go back

    @torch.inference_mode()
    def advance(self) -> list[Request]:
        """Admit what fits, then decode one token for every row; return the requests that are complete."""
        done = self._admit() if self._waiting and self.num_running < self._max_running else []
        if self._members:
            done += self._step()
        return done

    def _step(self) -> list[Request]:
        cache, table = self._cache, self._table
        self._make_room(self.num_running)
        column = cache.cur
        logits = self._forward.decode(*table.inputs(column), table.bias(cache.lo, column + 1), cache)
        cache.cur = column + 1
        tokens, logprobs = sample(logits, table.temperature(), table.uniforms(cache.cur))
        return self._finish(table.record(slice(0, self.num_running), cache.cur, tokens, logprobs, self.version))

    def _admit(self) -> list[Request]:
        admitted = self._take_waiting()
        done: list[Request] = []
        for chunk in _prefill_chunks(admitted):
            done += self._admit_chunk(chunk)
        return done

    def _take_waiting(self) -> list[tuple[Request, range]]:
        """Give free rows to the longest waiting members; a request may get rows for some of its members only."""
        free = self._max_running - self.num_running
        taken: list[tuple[Request, range]] = []
        while free and self._waiting:
            request = self._waiting[0]
            count = min(free, len(request.sampling) - request.num_admitted)
            taken.append((request, range(request.num_admitted, request.num_admitted + count)))
            request.num_admitted += count
            free -= count
            if request.num_admitted == len(request.sampling):
                self._waiting.popleft()
        return taken

    def _admit_chunk(self, chunk: Sequence[tuple[Request, range]]) -> list[Request]:
        """Prefill each prompt once, give every member a row with its KV, and sample their first tokens."""
        cache, table, now_s = self._cache, self._table, self._now()
        prompts = [request.prompt for request, _ in chunk]
        members = [Member(request, member, now_s) for request, indices in chunk for member in indices]
        first, rows = self.num_running, slice(self.num_running, self.num_running + len(members))
        if first == 0:
            cache.lo = cache.cur = 0
        self._make_room(rows.stop, longest=max(prompt.size for prompt in prompts))

        ids, starts = left_padded(prompts)
        logits, layers = self._forward.prefill(*prefill_inputs(ids, starts, table.dtype, table.device))
        if len(members) > len(chunk):
            counts = [len(indices) for _, indices in chunk]
            source = torch.from_numpy(np.repeat(np.arange(len(chunk)), counts)).to(table.device)
            logits = logits.index_select(0, source)
        else:
            source = None
        cache.fill(rows, cache.cur, layers, source)
        self._members += members
        added = [(owner.request.prompt, owner.request.sampling[owner.member]) for owner in members]
        table.add(first, cache.cur, added, max_context=self._max_context, version=self.version)
        cache.num_rows = rows.stop
        cache.lo = table.first_start()

        tokens, logprobs = sample(logits, table.temperature(rows), table.uniforms(cache.cur)[rows])
        return self._finish(table.record(rows, cache.cur, tokens, logprobs, self.version))

    def _finish(self, rows: npt.NDArray[np.intp]) -> list[Request]:
        """Turn finished rows into completions and free them; return the requests that are complete with them."""
        if not rows.size:
            return []
        now_s = self._now()
        done: list[Request] = []
        for row in rows.tolist():
            request, member, admitted_s = self._members[row]
            request.complete(member, self._completion(row, admitted_s - request.submitted_s, now_s - admitted_s))
            if request.num_left == 0:
                done.append(request)
        self._remove(rows.tolist())
        return done

    def _completion(self, row: int, queued_s: float, generate_s: float) -> Completion:
        table, end = self._table, self._cache.cur + 1
        begin = int(table.first_sampled[row])
        stopped = table.is_stop(row, end - 1)
        return Completion(
            token_ids=table.ids[row, begin:end].astype(np.int32),
            logprobs=table.logprobs[row, begin:end].copy(),
            versions=table.versions[row, begin:end].copy(),
            kv_versions=table.kv_versions[row, begin:end].copy(),
            finish_reason=FinishReason.STOP if stopped else FinishReason.LENGTH,
            queued_s=queued_s,
            generate_s=generate_s,
        )

    def _remove(self, rows: Iterable[int]) -> None:
        """Free rows; the last rows move into the holes, so that the live ones stay in front."""
        gone = set(rows)
        if not gone:
            return
        left = self.num_running - len(gone)
        holes = sorted(row for row in gone if row < left)
        movers = [row for row in range(left, self.num_running) if row not in gone]
        if holes:
            self._cache.copy_rows(movers, holes)
            self._table.copy_rows(movers, holes)
            for source, target in zip(movers, holes, strict=True):
                self._members[target] = self._members[source]
        del self._members[left:]
        self._cache.num_rows = left
        self._table.changed(left)
        if left:
            self._cache.lo = self._table.first_start()

    def _make_room(self, rows: int, *, longest: int = 0) -> None:
        """Room for `rows` rows, for the column after the next, and for a prompt of `longest` tokens before column `cur`.

        Moves the window (in place while it fills less than half of the columns) or grows the buffers; both at most once
        per as many steps as the window is wide.
        """
        cache = self._cache
        if rows <= cache.row_capacity and cache.cur + 2 <= cache.column_capacity and longest <= cache.cur:
            return
        width = cache.cur - cache.lo
        cur = max(width, longest)
        columns = cache.column_capacity
        if 2 * (cur + 2) > columns:
            columns = max(2 * (cur + 2), MIN_COLUMNS)
        if rows > cache.row_capacity:
            rows = max(rows, min(2 * rows, self._max_running))
        rows = max(rows, cache.row_capacity)
        self._table.move(cache.lo, cur - width, width + 1, rows, columns)
        cache.move(cur - width, rows, columns)

    def _recompute(self) -> None:
        """Rewrite the KV of all rows from their tokens, in chunks of rows of similar length."""
        cache, table = self._cache, self._table
        order = np.argsort(table.start[: self.num_running], kind="stable")
        at = 0
        while at < order.size:
            width = cache.cur - int(table.start[order[at]])
            rows = order[at : at + max(1, MAX_PREFILL_TOKENS // width)]
            at += rows.size
            lo = cache.cur - width
            ids = table.ids[rows, lo : cache.cur]
            _, layers = self._forward.prefill(*prefill_inputs(ids, table.start[rows] - lo, table.dtype, table.device))
            cache.fill(torch.from_numpy(rows).to(table.device), cache.cur, layers, None)


def _prefill_chunks(admitted: Sequence[tuple[Request, range]]) -> Iterable[Sequence[tuple[Request, range]]]:
    """Split by length so that a call stays within MAX_PREFILL_TOKENS padded tokens (one long prompt goes alone)."""
    by_length = sorted(admitted, key=lambda item: item[0].prompt.size)
    chunk: list[tuple[Request, range]] = []
    for item in by_length:
        if chunk and (len(chunk) + 1) * item[0].prompt.size > MAX_PREFILL_TOKENS:
            yield chunk
            chunk = []
        chunk.append(item)
    if chunk:
        yield chunk


def left_padded(prompts: Sequence[npt.NDArray[np.int64]]) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.int64]]:
    """Return ids [g, T], padded with 0 on the left, and the index of each one's first token [g]."""
    longest = max(prompt.size for prompt in prompts)
    ids = np.zeros((len(prompts), longest), dtype=np.int64)
    for row, prompt in enumerate(prompts):
        ids[row, longest - prompt.size :] = prompt
    return ids, np.array([longest - prompt.size for prompt in prompts], dtype=np.int64)


def prefill_inputs(
    ids: npt.NDArray[np.int64], starts: npt.NDArray[np.int64], dtype: torch.dtype, device: torch.device
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor | None]:
    """ids [g, T], positions [g, T], bias [g, 1, T, T] (None when nothing is padded)."""
    columns = torch.arange(ids.shape[1])
    start = torch.from_numpy(starts).unsqueeze(1)
    positions = (columns - start).clamp_(min=0)
    bias = None
    if starts.any():
        query, key = columns.view(1, -1, 1), columns.view(1, 1, -1)
        visible = (key <= query) & (key >= start.unsqueeze(2))
        visible |= key == query  # padding sees itself: a row without any column would be NaN, and NaN × 0 spreads
        bias = torch.zeros(visible.shape, dtype=dtype).masked_fill_(~visible, float("-inf")).unsqueeze(1).to(device)
    return torch.from_numpy(ids).to(device), positions.to(device), bias
