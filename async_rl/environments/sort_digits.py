"""The built-in task: sort the digits of a number. Small enough that a CPU learns it in minutes.

`"402913>"` is answered by `"012349"` and the end-of-sequence token; the reward is exact match, 1 or 0.
"""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence

from async_rl.environments.base import Episode, Row
from async_rl.environments.permutation import Permutation
from async_rl.errors import ConfigError
from protocol.messages import FinishReason, Reward

MAX_LENGTH = 18
SEPARATOR = ">"


class SortDigits:
    """All digit strings of one length, split once and for all into held-out and training prompts.

    A fixed permutation of all 10**length strings puts the held-out ones first: the two sets are disjoint, every prompt
    occurs once, and row `index` is the same in every process and run.
    """

    def __init__(self, length: int = 6, held_out_share: float = 0.1) -> None:
        if isinstance(length, bool) or not isinstance(length, int) or not 1 <= length <= MAX_LENGTH:
            raise ConfigError(f"environment.args.length={length!r}: sort_digits needs an integer from 1 to {MAX_LENGTH}")
        if isinstance(held_out_share, bool) or not isinstance(held_out_share, int | float) or not 0 < held_out_share < 1:
            raise ConfigError(f"environment.args.held_out_share={held_out_share!r}: needs a number between 0 and 1")
        self._length = length
        self._order = Permutation(10**length, "sort_digits", length)
        self._num_held_out = max(1, int(10**length * held_out_share))

    # -- Environment ---------------------------------------------------------------------------------------------
    async def observe(self, episode: Episode) -> str | None:
        """One turn only."""
        return None

    async def score(self, episode: Episode) -> Reward:
        """1 for the sorted digits and a stop token behind them, else 0."""
        answer = episode.task.columns["answer"]
        stopped = bool(episode.turns) and episode.turns[-1].finish_reason is FinishReason.STOP
        value = float(stopped and episode.completion == answer)
        return Reward(value, {"exact_match": value})

    # -- RowSource -----------------------------------------------------------------------------------------------
    def num_rows(self) -> int:
        return self._order.size - self._num_held_out

    def row(self, index: int) -> Row:
        if not 0 <= index < self.num_rows():
            raise IndexError(f"sort_digits row {index} is outside 0 .. {self.num_rows() - 1}")
        return self._make(self._order(self._num_held_out + index))

    def held_out_rows(self, count: int) -> Sequence[Row]:
        """The first `count` held-out rows; fewer if there are fewer (short lengths)."""
        return [self._make(self._order(position)) for position in range(min(count, self._num_held_out))]

    def warmup_pairs(self, count: int, seed: int) -> Iterator[tuple[str, str]]:
        draw = random.Random(seed)
        for _ in range(count):
            row = self.row(draw.randrange(self.num_rows()))
            yield str(row.prompt), str(row.columns["answer"])

    def _make(self, number: int) -> Row:
        digits = f"{number:0{self._length}d}"
        return Row(prompt=digits + SEPARATOR, columns={"answer": "".join(sorted(digits))})
