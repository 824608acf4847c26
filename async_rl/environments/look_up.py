"""The built-in task with a tool: look a number up, and use what was found. Small enough that a CPU learns it in minutes.

The prompt is `"4071>"`. Whoever calls the tool with exactly that key (`"*4071"`) is told its entry (`"=8163>"`), a number that
cannot be guessed; the answer is the entry's digits, sorted: `"1368"`. Reward 1 for the right last turn, else 0.
"""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from hashlib import blake2b

from async_rl.environments.base import Episode, Row
from async_rl.environments.permutation import Permutation
from async_rl.errors import ConfigError
from protocol.messages import FinishReason, Reward

MAX_LENGTH = 12
ASK, CALL, FOUND, UNKNOWN = ">", "*", "=", "-"


class LookUp:
    """All keys of one length, split once and for all into held-out and training prompts; each key has one entry.

    sort: the answer is the entry's digits in order; else the entry as it is. eos: what ends a turn in warm-up texts.
    """

    def __init__(self, length: int = 4, sort: bool = False, held_out_share: float = 0.1, eos: str = "<eos>") -> None:
        if isinstance(length, bool) or not isinstance(length, int) or not 1 <= length <= MAX_LENGTH:
            raise ConfigError(f"environment.args.length={length!r}: look_up needs an integer from 1 to {MAX_LENGTH}")
        if isinstance(held_out_share, bool) or not isinstance(held_out_share, int | float) or not 0 < held_out_share < 1:
            raise ConfigError(f"environment.args.held_out_share={held_out_share!r}: needs a number between 0 and 1")
        self._length, self._sort, self._eos = length, sort, eos
        self._order = Permutation(10**length, "look_up", length)
        self._num_held_out = max(1, int(10**length * held_out_share))

    def entry(self, key: str) -> str:
        """The number that belongs to `key`: fixed, and without a pattern."""
        digest = int.from_bytes(blake2b(key.encode(), digest_size=8, person=b"look_up").digest(), "little")
        return f"{digest % 10**self._length:0{self._length}d}"

    # -- Environment ---------------------------------------------------------------------------------------------
    async def observe(self, episode: Episode) -> str | None:
        """The entry of the key that the first turn asks for; "-" for a call with another key; the second turn is the last."""
        turn = episode.turns[-1]
        if len(episode.turns) > 1 or not turn.text.startswith(CALL) or turn.finish_reason is not FinishReason.STOP:
            return None
        key = turn.text.removeprefix(CALL)
        return f"{FOUND}{self.entry(key)}{ASK}" if key == episode.task.columns["key"] else f"{UNKNOWN}{ASK}"

    async def score(self, episode: Episode) -> Reward:
        last = episode.turns[-1]
        called = float(len(episode.turns) == 2 and episode.observations[0].startswith(FOUND))
        right = last.text == episode.task.columns["answer"] and last.finish_reason is FinishReason.STOP
        value = float(right and bool(called))
        return Reward(value, {"called": called, "exact_match": value})

    # -- RowSource -----------------------------------------------------------------------------------------------
    def num_rows(self) -> int:
        return self._order.size - self._num_held_out

    def row(self, index: int) -> Row:
        if not 0 <= index < self.num_rows():
            raise IndexError(f"look_up row {index} is outside 0 .. {self.num_rows() - 1}")
        return self._make(self._order(self._num_held_out + index))

    def held_out_rows(self, count: int) -> Sequence[Row]:
        return [self._make(self._order(position)) for position in range(min(count, self._num_held_out))]

    def warmup_pairs(self, count: int, seed: int) -> Iterator[tuple[str, str]]:
        """The first turn and the second, by turns."""
        draw = random.Random(seed)
        for number in range(count):
            row = self.row(draw.randrange(self.num_rows()))
            prompt, key, answer = str(row.prompt), str(row.columns["key"]), str(row.columns["answer"])
            call = f"{CALL}{key}"
            if number % 2:
                yield f"{prompt}{call}{self._eos}{FOUND}{self.entry(key)}{ASK}", answer
            else:
                yield prompt, call

    def _make(self, number: int) -> Row:
        key = f"{number:0{self._length}d}"
        entry = self.entry(key)
        return Row(prompt=key + ASK, columns={"key": key, "answer": "".join(sorted(entry)) if self._sort else entry})
