"""Datasets of reasoning-gym by name and config, or a weighted mix of them: their questions, and their own scoring.

Source of the interface: reasoning-gym 0.1.25, `create_dataset` and `ProceduralDataset.score_answer`.
"""

from __future__ import annotations

import random
import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Literal

from async_rl.environments.base import Episode, Row
from async_rl.environments.calls import call
from async_rl.environments.objects import nearest
from async_rl.environments.verifiers.answers import find_answer
from async_rl.errors import ConfigError
from protocol.messages import ChatMessage, Json, Reward

_TAG = re.compile(r"<answer>(.*?)</answer>", re.DOTALL)
_HELD_OUT_SEED = 1_000_003


class ReasoningGym:
    """datasets: tables of {name, weight, config}. size: training rows; held_out: rows of another seed, for evaluation.

    The rows are made from `seed`, the same at every call; row i is of a dataset drawn by weight. answer: what of the completion
    is scored: what stands between the last <answer> tags, in the last box, or all of it. chat: prompts are chat messages,
    under `system` if it is given; else text, with `suffix` behind it. Held-out questions come from another seed, which small
    question spaces do not keep from meeting a training question.
    """

    def __init__(
        self,
        datasets: Sequence[Mapping[str, Any]],
        *,
        size: int = 10_000,
        held_out: int = 1_000,
        seed: int = 0,
        answer: Literal["tag", "boxed", "all"] = "tag",
        chat: bool = True,
        system: str = "",
        suffix: str = "",
    ) -> None:
        if answer not in ("tag", "boxed", "all"):
            raise ConfigError(f"environment.args.answer={answer!r}: reasoning_gym knows 'tag', 'boxed' and 'all'")
        if not datasets:
            raise ConfigError("environment.args.datasets is empty: name at least one, such as {name = 'chain_sum'}")
        self._names = [str(entry.get("name")) for entry in datasets]
        self._weights = [float(entry.get("weight", 1.0)) for entry in datasets]
        if min(self._weights) <= 0:
            raise ConfigError(f"environment.args.datasets: weights {self._weights} must be positive")
        self._size, self._num_held_out, self._seed, self._answer = size, held_out, seed, answer
        self._chat, self._system, self._suffix = chat, system, suffix
        self._train = [_dataset(entry, seed + index, size) for index, entry in enumerate(datasets)]
        self._held_out = [_dataset(entry, seed + index + _HELD_OUT_SEED, held_out) for index, entry in enumerate(datasets)]

    # -- Environment ---------------------------------------------------------------------------------------------
    async def observe(self, episode: Episode) -> str | None:
        """One turn only."""
        return None

    async def score(self, episode: Episode) -> Reward:
        """What the dataset's own scoring gives for the answer; 0 if there is none."""
        columns = episode.task.columns
        index, number = int(str(columns["dataset"])), int(str(columns["index"]))
        dataset = (self._held_out if columns["held_out"] else self._train)[index]
        answer = self._found(episode.completion)
        value = float(await call(dataset.score_answer, answer, dataset[number])) if answer is not None else 0.0
        return Reward(value, {self._names[index]: value})

    # -- RowSource -----------------------------------------------------------------------------------------------
    def num_rows(self) -> int:
        return self._size

    def row(self, index: int) -> Row:
        if not 0 <= index < self._size:
            raise IndexError(f"reasoning_gym row {index} is outside 0 .. {self._size - 1}")
        return self._make(index, held_out=False)

    def held_out_rows(self, count: int) -> Sequence[Row]:
        return [self._make(index, held_out=True) for index in range(min(count, self._num_held_out))]

    def warmup_pairs(self, count: int, seed: int) -> Iterator[tuple[str, str]]:
        """Questions and the dataset's answers, as text."""
        draw = random.Random(seed)
        for _ in range(count):
            entry = self._entry(draw.randrange(self._size), held_out=False)[1]
            yield f"{entry['question']}{self._suffix}", str(entry["answer"])

    def _entry(self, index: int, *, held_out: bool) -> tuple[int, Mapping[str, Any]]:
        draw = random.Random(f"{self._seed} {held_out} {index}")
        (which,) = draw.choices(range(len(self._names)), weights=self._weights)
        return which, (self._held_out if held_out else self._train)[which][index]

    def _make(self, index: int, *, held_out: bool) -> Row:
        which, entry = self._entry(index, held_out=held_out)
        question = f"{entry['question']}{self._suffix}"
        system: list[ChatMessage] = [{"role": "system", "content": self._system}] if self._system else []
        messages: tuple[ChatMessage, ...] = (*system, {"role": "user", "content": question})
        columns: dict[str, Json] = {"dataset": which, "index": index, "held_out": held_out, "answer": str(entry["answer"])}
        return Row(prompt=messages if self._chat else question, columns=columns)

    def _found(self, completion: str) -> str | None:
        if self._answer == "all":
            return completion.strip()
        if self._answer == "boxed":
            return find_answer(completion, strict=True)
        tagged = _TAG.findall(completion)
        return tagged[-1].strip() if tagged else None


def _dataset(entry: Mapping[str, Any], seed: int, size: int) -> Any:
    """Raises: ConfigError for an unknown name or setting, or if reasoning-gym is not installed."""
    try:
        from reasoning_gym.factory import DATASETS, create_dataset
    except ImportError as error:
        raise ConfigError(f"environment reasoning_gym needs {error.name}: pip install 'async-rl[environments]'") from error
    unknown = [key for key in entry if key not in ("name", "weight", "config")]
    if unknown or "name" not in entry:
        raise ConfigError(f"environment.args.datasets: {dict(entry)!r} needs name, and takes weight and config")
    name = str(entry["name"])
    if name not in DATASETS:
        raise ConfigError(f"environment.args.datasets: reasoning-gym has no dataset {name!r}{nearest(name, DATASETS)}")
    try:
        return create_dataset(name, **{"seed": seed, "size": size, **entry.get("config", {})})
    except (AssertionError, TypeError, ValueError) as error:
        raise ConfigError(f"environment.args.datasets: {name} with {dict(entry.get('config', {}))!r}: {error}") from error
