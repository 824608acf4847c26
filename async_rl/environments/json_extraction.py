"""The built-in task for a real model: four facts of a sentence as JSON, from one example.

The prompt is a chat: "Extract name, age, job and city as JSON.", an example, and a sentence such as "Anna is a 35-year-old
clerk from Vienna."; the reward is 1 if the answer parses to exactly the object with its four keys.
"""

from __future__ import annotations

import json
import random
from collections.abc import Iterator, Mapping, Sequence

from async_rl.environments.base import Episode, Row
from async_rl.environments.permutation import Permutation
from async_rl.errors import ConfigError
from protocol.messages import ChatMessage, Json, Reward

SYSTEM = "Extract name, age, job and city as JSON."
NAMES = (
    "Mark", "Anna", "Peter", "Julia", "Tom", "Laura", "David", "Emma", "Paul", "Sarah",
    "Lukas", "Nina", "Oscar", "Clara", "Simon", "Helen", "Victor", "Alice", "Martin", "Rosa",
)  # fmt: skip
JOBS = (
    "clerk", "nurse", "teacher", "baker", "driver", "lawyer", "farmer", "painter",
    "pilot", "cook", "doctor", "tailor", "plumber", "waiter", "builder", "singer",
)  # fmt: skip
CITIES = (
    "Vienna", "Berlin", "Paris", "Rome", "Madrid", "Oslo", "Prague", "Lisbon",
    "Dublin", "Athens", "Warsaw", "Zurich", "Milan", "Geneva", "Krakow", "Porto",
)  # fmt: skip
AGES = range(18, 81)
TEMPLATES = (
    "{name} is a {age}-year-old {job} from {city}.",
    "{name}, {age}, works as a {job} in {city}.",
    "In {city} lives {name}, a {job} who is {age} years old.",
    "The {job} {name} is {age} and comes from {city}.",
)
EXAMPLE: Mapping[str, Json] = {"name": "Maria", "age": 41, "job": "dentist", "city": "Lyon"}
NUM_SENTENCES = len(NAMES) * len(JOBS) * len(CITIES) * len(AGES) * len(TEMPLATES)


class JsonExtraction:
    """Every sentence, split once and for all into held-out and training prompts."""

    def __init__(self, held_out_share: float = 0.1) -> None:
        if isinstance(held_out_share, bool) or not isinstance(held_out_share, int | float) or not 0 < held_out_share < 1:
            raise ConfigError(f"environment.args.held_out_share={held_out_share!r}: needs a number between 0 and 1")
        self._order = Permutation(NUM_SENTENCES, "json_extraction")
        self._num_held_out = max(1, int(NUM_SENTENCES * held_out_share))

    # -- Environment ---------------------------------------------------------------------------------------------
    async def observe(self, episode: Episode) -> str | None:
        """One turn only."""
        return None

    async def score(self, episode: Episode) -> Reward:
        """1 if the completion is the sentence's object as JSON and nothing else. parses: it is JSON at all."""
        try:
            found = json.loads(episode.completion)
        except (ValueError, RecursionError):
            return Reward(0.0, {"exact_match": 0.0, "parses": 0.0})
        value = float(found == episode.task.columns["facts"])
        return Reward(value, {"exact_match": value, "parses": 1.0})

    # -- RowSource -----------------------------------------------------------------------------------------------
    def num_rows(self) -> int:
        return self._order.size - self._num_held_out

    def row(self, index: int) -> Row:
        if not 0 <= index < self.num_rows():
            raise IndexError(f"json_extraction row {index} is outside 0 .. {self.num_rows() - 1}")
        return _row(self._order(self._num_held_out + index))

    def held_out_rows(self, count: int) -> Sequence[Row]:
        return [_row(self._order(position)) for position in range(min(count, self._num_held_out))]

    def warmup_pairs(self, count: int, seed: int) -> Iterator[tuple[str, str]]:
        """Sentences and their objects, as text."""
        draw = random.Random(seed)
        for _ in range(count):
            row = self.row(draw.randrange(self.num_rows()))
            yield str(row.prompt[-1]["content"]), json.dumps(row.columns["facts"])  # type: ignore[index]  # ours are messages


def _row(number: int) -> Row:
    number, template = divmod(number, len(TEMPLATES))
    number, age = divmod(number, len(AGES))
    number, city = divmod(number, len(CITIES))
    name, job = divmod(number, len(JOBS))
    facts: dict[str, Json] = {"name": NAMES[name], "age": AGES[age], "job": JOBS[job], "city": CITIES[city]}
    messages: tuple[ChatMessage, ...] = (
        {"role": "system", "content": SYSTEM},
        {"role": "user", "content": TEMPLATES[0].format(**EXAMPLE)},
        {"role": "assistant", "content": json.dumps(EXAMPLE)},
        {"role": "user", "content": TEMPLATES[template].format(**facts)},
    )
    return Row(prompt=messages, columns={"facts": facts})
