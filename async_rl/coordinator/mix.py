"""Several prompt sources mixed by weight: whom a cursor asks, and for which of its tasks, is a function of the cursor alone."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from async_rl.coordinator.prompts import PromptSource
from async_rl.errors import ConfigError
from protocol.messages import PromptTask

BLOCK = 1000
"""Tasks after which the pattern of sources repeats: weights are kept to a thousandth."""


class MixedSource:
    """`sources` by `weights`, spread evenly: after every cursor each has given its share, to one task.

    Each source keeps its own order, data epochs and ids, and is resumed to the row. With bounded data epochs the whole ends
    where the first source would have to begin another one. Raises: ConfigError for weights that leave a source without a task.
    """

    def __init__(self, sources: Sequence[PromptSource], weights: Sequence[float]) -> None:
        self._sources, self._weights = tuple(sources), tuple(weights)
        self._counts = _shares(weights)
        self._slots = _spread(self._counts)
        self._num_tasks = self._end()

    @property
    def num_rows(self) -> int:
        """Rows of all sources."""
        return sum(source.num_rows for source in self._sources)

    @property
    def num_tasks(self) -> int | None:
        """Tasks of the whole; None if it never ends."""
        return self._num_tasks

    @property
    def parts(self) -> Sequence[PromptSource]:
        """The sources, in order."""
        return self._sources

    def cursors(self, cursor: int) -> Sequence[int]:
        """How far each source is when the whole is at `cursor`."""
        block, slot = divmod(cursor, BLOCK)
        given = [block * count for count in self._counts]
        for which, _ in self._slots[:slot]:
            given[which] += 1
        return given

    def with_lengths(self, lengths: Mapping[str, Sequence[tuple[int, int]]]) -> MixedSource:
        """The same mix, each source with the lengths that are given for its name."""
        return MixedSource([source.with_lengths(lengths) for source in self._sources], self._weights)

    def is_end(self, cursor: int) -> bool:
        """Whether there is no task at `cursor` or beyond."""
        return self._num_tasks is not None and cursor >= self._num_tasks

    def task_at(self, cursor: int, *, issued_at_s: float = 0.0) -> PromptTask | None:
        """The task at `cursor`, or None at and beyond the end."""
        if cursor < 0:
            raise ValueError(f"cursor={cursor}: must not be negative")
        if self.is_end(cursor):
            return None
        block, slot = divmod(cursor, BLOCK)
        which, before = self._slots[slot]
        return self._sources[which].task_at(block * self._counts[which] + before, issued_at_s=issued_at_s)

    def task_of(self, identity: str, *, issued_at_s: float = 0.0) -> PromptTask | None:
        """The task with id `identity`, made again by the source that it names; None if none does."""
        found = (source.task_of(identity, issued_at_s=issued_at_s) for source in self._sources)
        return next((task for task in found if task is not None), None)

    def _end(self) -> int | None:
        """The first cursor whose source has no task left."""
        ends = []
        for which, source in enumerate(self._sources):
            if source.num_tasks is None:
                continue
            block, before = divmod(source.num_tasks, self._counts[which])
            slot = next(slot for slot, (owner, count) in enumerate(self._slots) if owner == which and count == before)
            ends.append(block * BLOCK + slot)
        return min(ends, default=None)


def _shares(weights: Sequence[float]) -> tuple[int, ...]:
    """Tasks of each source in a block, by largest remainder."""
    total = sum(weights)
    exact = [BLOCK * weight / total for weight in weights]
    counts = [int(share) for share in exact]
    by_remainder = sorted(range(len(exact)), key=lambda index: counts[index] - exact[index])
    for index in by_remainder[: BLOCK - sum(counts)]:
        counts[index] += 1
    if min(counts) == 0:
        raise ConfigError(
            f"data.mix: a weight of {min(weights):g} of {total:g} is less than a task in {BLOCK}; raise or remove it"
        )
    return tuple(counts)


def _spread(counts: Sequence[int]) -> tuple[tuple[int, int], ...]:
    """For each slot of a block (source, tasks that it gave in this block before): always the one furthest behind its share."""
    given = [0] * len(counts)
    slots = []
    for slot in range(BLOCK):
        which = max(range(len(counts)), key=lambda index: (counts[index] * (slot + 1) - given[index] * BLOCK, -index))
        slots.append((which, given[which]))
        given[which] += 1
    return tuple(slots)
