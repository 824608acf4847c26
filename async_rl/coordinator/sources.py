"""Where a run's tasks come from: one source, or several mixed by weight."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Protocol

from async_rl.config.run import RunConfig
from async_rl.coordinator.mix import MixedSource
from async_rl.coordinator.prompts import PromptSource
from async_rl.environments.base import Environment
from protocol.messages import PromptTask


class TaskSource(Protocol):
    """A pure function from cursor to task, as `PromptSource` and `MixedSource` are."""

    @property
    def parts(self) -> Sequence[PromptSource]: ...

    def cursors(self, cursor: int) -> Sequence[int]: ...

    def with_lengths(self, lengths: Mapping[str, Sequence[tuple[int, int]]]) -> TaskSource: ...

    @property
    def num_rows(self) -> int: ...

    @property
    def num_tasks(self) -> int | None: ...

    def is_end(self, cursor: int) -> bool: ...

    def task_at(self, cursor: int, *, issued_at_s: float = 0.0) -> PromptTask | None: ...

    def task_of(self, identity: str, *, issued_at_s: float = 0.0) -> PromptTask | None: ...


def open_source(config: RunConfig, run_id: str, environment: Environment) -> TaskSource:
    """What `config.data` names.

    Raises: DataError if the data cannot be used; ConfigError if the environment brings no rows of its own.
    """
    if not config.data.mix:
        return PromptSource.from_config(config, run_id, environment)
    sources = []
    for entry in config.data.mix:
        own: dict[str, Any] = {key: entry[key] for key in ("source", "split", "prompt_column") if key in entry}
        data = config.data.model_copy(update={**own, "mix": []})
        sources.append(PromptSource.from_config(config.model_copy(update={"data": data}), run_id, environment))
    return MixedSource(sources, [float(entry.get("weight", 1.0)) for entry in config.data.mix])
