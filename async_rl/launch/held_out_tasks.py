"""The held-out prompts of a run, as tasks that are in no queue; refused if they are trained on."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from hashlib import blake2b
from pathlib import Path

from async_rl.config.run import RunConfig
from async_rl.coordinator.prompts import BUILT_IN_SOURCE
from async_rl.coordinator.rows import open_rows
from async_rl.environments.base import Environment, Row, RowSource
from async_rl.errors import ConfigError, DataError
from protocol.messages import PromptTask, task_id
from protocol.seeds import group_seed

MOST_COMPARED = 200_000
"""Training rows whose prompts are compared with the held-out ones, of each source."""


def held_out_tasks_of(config: RunConfig, environment: Environment) -> Mapping[str, Sequence[PromptTask]]:
    """Tasks by the name that they count under: their source, or the value of the column `evaluation.by`.

    The same config makes the same tasks with the same seeds, at every version: differences between versions are not
    differences between prompts. Raises: ConfigError, DataError.
    """
    tasks: dict[str, list[PromptTask]] = {}
    rows = dict(_held_out_rows(config, environment))
    _require_disjoint(config, rows)
    for source, those in rows.items():
        for index, row in enumerate(those):
            tasks.setdefault(_name(config, source, row), []).append(_task(config, source, index, row))
    return tasks


def _held_out_rows(config: RunConfig, environment: Environment) -> Iterator[tuple[str, Sequence[Row]]]:
    count = config.evaluation.prompts
    if not config.evaluation.sources:
        rows = environment.held_out_rows(count) if isinstance(environment, RowSource) else ()
        if not rows:
            raise ConfigError(
                f"evaluation.sources is empty, and environment.name={config.environment.name!r} brings no held-out prompts; "
                "name a file or dataset that is not trained on"
            )
        yield config.environment.name, rows
    names: Counter[str] = Counter()
    for entry in config.evaluation.sources:
        source = open_rows(
            Path(entry["source"]),
            prompt_column=entry.get("prompt_column", config.data.prompt_column),
            split=entry.get("split", config.data.split),
        )
        name = Path(entry["source"]).stem
        names[name] += 1
        shown = name if names[name] == 1 else f"{name}-{names[name]}"
        yield shown, [source.row(index) for index in range(min(count, source.num_rows()))]


def _require_disjoint(config: RunConfig, held_out: Mapping[str, Sequence[Row]]) -> None:
    """Prompts of other files may be the same ones. An environment's own rows are disjoint by construction."""
    digests = {_digest(row): (name, index) for name, rows in held_out.items() for index, row in enumerate(rows)}
    for entry in config.data.mix or [{"source": config.data.source}]:
        if entry["source"] == BUILT_IN_SOURCE:
            continue
        trained = open_rows(
            Path(entry["source"]),
            prompt_column=entry.get("prompt_column", config.data.prompt_column),
            split=entry.get("split", config.data.split),
        )
        for number in range(min(MOST_COMPARED, trained.num_rows())):
            found = digests.get(_digest(trained.row(number)))
            if found is not None:
                raise DataError(
                    f"evaluation.sources: prompt {found[1]} of {found[0]} is row {number} of {entry['source']}, which is "
                    "trained on; remove it from one of the two"
                )


def _digest(row: Row) -> bytes:
    text = row.prompt if isinstance(row.prompt, str) else json.dumps(row.prompt, sort_keys=True)
    return blake2b(text.encode(), digest_size=16).digest()


def _name(config: RunConfig, source: str, row: Row) -> str:
    by = config.evaluation.by
    if by is None:
        return source
    if by not in row.columns:
        raise DataError(f"evaluation.by={by!r} is no column of {source}; it has {', '.join(row.columns) or 'none'}")
    return f"{by} {row.columns[by]}"


def _task(config: RunConfig, source: str, index: int, row: Row) -> PromptTask:
    identity = task_id(f"held_out.{source}", 0, index, 0)
    return PromptTask(
        run_id="evaluation",
        task_id=identity,
        source=source,
        data_epoch=0,
        row=index,
        repeat=0,
        prompt=row.prompt,
        columns=row.columns,
        environment=config.environment.name,
        group_size=config.evaluation.samples,
        seed=group_seed(config.seed, identity),
        temperature=config.evaluation.temperature or config.rollout.temperature,
        max_new_tokens=config.rollout.max_new_tokens,
        issued_at_s=0.0,
    )
