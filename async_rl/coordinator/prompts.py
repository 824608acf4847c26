"""The prompt source: a pure function from cursor to task. Whoever knows the cursor can make any task again, exactly."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path

from async_rl.config.run import RunConfig
from async_rl.coordinator.rows import Rows, open_rows
from async_rl.environments.base import Environment, RowSource
from async_rl.environments.permutation import Permutation
from async_rl.errors import ConfigError
from protocol.messages import PromptTask, task_id
from protocol.seeds import group_seed

BUILT_IN_SOURCE = "environment"


@dataclass(frozen=True, slots=True)
class TaskTemplate:
    """What all tasks of a run share."""

    run_id: str
    source: str
    environment: str
    run_seed: int
    group_size: int
    temperature: float
    max_new_tokens: int


class PromptSource:
    """Rows in a fixed order: data epoch by data epoch, each shuffled by the run's seed. Holds no position.

    The cursor counts rows since the start of the run. A task's id, order and seed depend on the run's seed and its place
    in the data alone, so that the task of a cursor is the same in every process.

    lengths: (data epoch, rows that it and those after it have), ascending, from 0: rows that were appended join at an epoch.
    """

    def __init__(
        self,
        rows: Rows,
        template: TaskTemplate,
        *,
        shuffle: bool = True,
        data_epochs: int | None = None,
        lengths: Sequence[tuple[int, int]] | None = None,
    ) -> None:
        self.rows, self._template = rows, template
        self.shuffle, self.data_epochs = shuffle, data_epochs
        self._lengths = tuple(lengths or [(0, rows.num_rows())])
        self._order: tuple[int, Permutation] | None = None  # of the data epoch asked for last

    @staticmethod
    def from_config(config: RunConfig, run_id: str, environment: Environment) -> PromptSource:
        """The source that `config.data` names.

        Raises: DataError if the data cannot be used; ConfigError if the environment brings no rows of its own.
        """
        template = TaskTemplate(
            run_id=run_id,
            source=config.environment.name if config.data.source == BUILT_IN_SOURCE else Path(config.data.source).stem,
            environment=config.environment.name,
            run_seed=config.seed,
            group_size=config.rollout.group_size,
            temperature=config.rollout.temperature,
            max_new_tokens=config.rollout.max_new_tokens,
        )
        rows = _rows_of(config, environment)
        return PromptSource(rows, template, shuffle=config.data.shuffle, data_epochs=config.data.data_epochs)

    @property
    def name(self) -> str:
        """What its tasks' ids begin with."""
        return self._template.source

    @property
    def num_rows(self) -> int:
        """Rows of a data epoch, of the newest length."""
        return self._lengths[-1][1]

    @property
    def num_tasks(self) -> int | None:
        """Tasks of the whole source; None if it never ends."""
        if self.data_epochs is None:
            return None
        ends = [min(epoch, self.data_epochs) for epoch, _ in self._lengths[1:]] + [self.data_epochs]
        return sum((end - min(epoch, end)) * rows for (epoch, rows), end in zip(self._lengths, ends, strict=True))

    @property
    def parts(self) -> Sequence[PromptSource]:
        """Itself: the sources that this one is made of."""
        return (self,)

    def cursors(self, cursor: int) -> Sequence[int]:
        """How far each part is when the whole is at `cursor`."""
        return (cursor,)

    def with_lengths(self, lengths: Mapping[str, Sequence[tuple[int, int]]]) -> PromptSource:
        """The same source with the lengths that are given for its name."""
        known = lengths.get(self.name, self._lengths)
        return PromptSource(self.rows, self._template, shuffle=self.shuffle, data_epochs=self.data_epochs, lengths=known)

    def epochs_begun(self, cursor: int) -> int:
        """Data epochs of which a task lies below `cursor`."""
        return 0 if cursor == 0 else self._place(cursor - 1)[0] + 1

    def is_end(self, cursor: int) -> bool:
        """Whether there is no task at `cursor` or beyond."""
        return self.num_tasks is not None and cursor >= self.num_tasks

    def task_at(self, cursor: int, *, issued_at_s: float = 0.0) -> PromptTask | None:
        """The task at `cursor`, or None at and beyond the end. `issued_at_s` is a stamp and changes nothing else."""
        if cursor < 0:
            raise ValueError(f"cursor={cursor}: must not be negative")
        if self.is_end(cursor):
            return None
        data_epoch, position = self._place(cursor)
        row = self._permutation(data_epoch)(position) if self.shuffle else position
        return self._make(data_epoch, row, repeat=0, issued_at_s=issued_at_s)

    def task_of(self, identity: str, *, issued_at_s: float = 0.0) -> PromptTask | None:
        """The task with id `identity`, made again; None if the id is not one of this source's."""
        source, *numbers = identity.rsplit(":", 3)
        if source != self._template.source or len(numbers) != 3 or not all(_is_number(number) for number in numbers):
            return None
        data_epoch, row, repeat = map(int, numbers)
        beyond = self.data_epochs is not None and data_epoch >= self.data_epochs
        if beyond or row >= self._rows_in(data_epoch):
            return None
        return self._make(data_epoch, row, repeat, issued_at_s=issued_at_s)

    def _make(self, data_epoch: int, row: int, repeat: int, *, issued_at_s: float) -> PromptTask:
        template, content = self._template, self.rows.row(row)
        identity = task_id(template.source, data_epoch, row, repeat)
        return PromptTask(
            run_id=template.run_id,
            task_id=identity,
            source=template.source,
            data_epoch=data_epoch,
            row=row,
            repeat=repeat,
            prompt=content.prompt,
            columns=content.columns,
            environment=template.environment,
            group_size=template.group_size,
            seed=group_seed(template.run_seed, identity),
            temperature=template.temperature,
            max_new_tokens=template.max_new_tokens,
            issued_at_s=issued_at_s,
        )

    def _permutation(self, data_epoch: int) -> Permutation:
        if self._order is None or self._order[0] != data_epoch:
            key = ("prompt order", self._template.run_seed, data_epoch)
            self._order = (data_epoch, Permutation(self._rows_in(data_epoch), *key))
        return self._order[1]

    def _place(self, cursor: int) -> tuple[int, int]:
        """(data epoch, position in it)."""
        for (epoch, rows), (following, _) in pairwise(self._lengths):
            if cursor < (following - epoch) * rows:
                break
            cursor -= (following - epoch) * rows
        else:
            epoch, rows = self._lengths[-1]
        passed, position = divmod(cursor, rows)
        return epoch + passed, position

    def _rows_in(self, data_epoch: int) -> int:
        return next(rows for epoch, rows in reversed(self._lengths) if epoch <= data_epoch)


def _rows_of(config: RunConfig, environment: Environment) -> Rows:
    if config.data.source != BUILT_IN_SOURCE:
        return open_rows(Path(config.data.source), prompt_column=config.data.prompt_column, split=config.data.split)
    if not isinstance(environment, RowSource):
        raise ConfigError(
            f"data.source='environment', but environment.name={config.environment.name!r} brings no prompts of its own; "
            f"set data.source to a .jsonl or .parquet file or a dataset directory"
        )
    return environment


def _is_number(text: str) -> bool:
    return text.isascii() and text.isdigit()
