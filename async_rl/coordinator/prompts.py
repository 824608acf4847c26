"""The prompt source: a pure function from cursor to task. Whoever knows the cursor can make any task again, exactly."""

from __future__ import annotations

from dataclasses import dataclass
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
    """

    def __init__(self, rows: Rows, template: TaskTemplate, *, shuffle: bool = True, data_epochs: int | None = None) -> None:
        self._rows, self._template = rows, template
        self._shuffle, self._data_epochs = shuffle, data_epochs
        self._num_rows = rows.num_rows()
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
    def num_rows(self) -> int:
        """Rows of one data epoch."""
        return self._num_rows

    @property
    def num_tasks(self) -> int | None:
        """Tasks of the whole source; None if it never ends."""
        return None if self._data_epochs is None else self._data_epochs * self._num_rows

    def is_end(self, cursor: int) -> bool:
        """Whether there is no task at `cursor` or beyond."""
        return self.num_tasks is not None and cursor >= self.num_tasks

    def task_at(self, cursor: int, *, issued_at_s: float = 0.0) -> PromptTask | None:
        """The task at `cursor`, or None at and beyond the end. `issued_at_s` is a stamp and changes nothing else."""
        if cursor < 0:
            raise ValueError(f"cursor={cursor}: must not be negative")
        if self.is_end(cursor):
            return None
        data_epoch, position = divmod(cursor, self._num_rows)
        row = self._permutation(data_epoch)(position) if self._shuffle else position
        return self._make(data_epoch, row, repeat=0, issued_at_s=issued_at_s)

    def task_of(self, identity: str, *, issued_at_s: float = 0.0) -> PromptTask | None:
        """The task with id `identity`, made again; None if the id is not one of this source's."""
        source, *numbers = identity.rsplit(":", 3)
        if source != self._template.source or len(numbers) != 3 or not all(_is_number(number) for number in numbers):
            return None
        data_epoch, row, repeat = map(int, numbers)
        beyond = self._data_epochs is not None and data_epoch >= self._data_epochs
        if beyond or row >= self._num_rows:
            return None
        return self._make(data_epoch, row, repeat, issued_at_s=issued_at_s)

    def _make(self, data_epoch: int, row: int, repeat: int, *, issued_at_s: float) -> PromptTask:
        template, content = self._template, self._rows.row(row)
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
            self._order = (data_epoch, Permutation(self._num_rows, *key))
        return self._order[1]


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
