"""The run directory before the roles start: made or opened, with the resolved config in it, and what a resumed run changes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from async_rl.config import RunConfig, dump_toml, load_config
from async_rl.config.dump import toml_value
from async_rl.config.fields import leaf_fields
from async_rl.coordinator.data_record import appended, read_records, write_records
from async_rl.coordinator.prompts import BUILT_IN_SOURCE
from async_rl.coordinator.rows import open_rows
from async_rl.errors import ConfigError, DataError, RunDirError
from async_rl.logs import redact_url
from async_rl.run_dir.layout import RunIdentity, RunLayout, create_run, open_run, write_atomic


@dataclass(frozen=True, slots=True)
class PreparedRun:
    """A run directory that the roles can start in."""

    layout: RunLayout
    identity: RunIdentity
    resumed: bool
    changes: Sequence[str] = ()
    """`key: before → now` of every setting that a resumed run does not share with its last start."""


@dataclass(frozen=True, slots=True)
class Fork:
    """Where a new run begins: a checkpoint of another one, written RUN@STEP."""

    run_dir: Path
    step: int

    @staticmethod
    def parse(text: str) -> Fork:
        """Raises: ConfigError."""
        run_dir, _, step = text.rpartition("@")
        if not run_dir or not step.isdecimal():
            raise ConfigError(f"--fork={text!r} is not RUN@STEP: a run directory, and the step of one of its checkpoints")
        return Fork(Path(run_dir), int(step))


FIXED_KEYS = (
    "seed",
    "data.source",
    "data.mix",
    "data.split",
    "data.prompt_column",
    "data.shuffle",
    "environment.name",
    "environment.args",
)
"""What names a run's tasks: under other data or another order, an id of the log would mean another prompt."""


def prepare(config: RunConfig, *, resume: bool, overwrite: bool, fork: Fork | None = None) -> PreparedRun:
    """Make or open the run directory and write the resolved config to it.

    Raises: RunDirError; ConfigError if a resumed run would read other prompts, or the same in another order; DataError if rows
    that it has read were removed or changed; CheckpointError if there is nothing to fork from.
    """
    if fork is not None:
        layout, identity = _forked(config, fork, overwrite=overwrite)
    else:
        layout, identity = open_run(config.run_dir) if resume else create_run(config.run_dir, overwrite=overwrite)
    if resume:
        _refuse_other_tasks(config, layout)
    changes = [*_changes_since_last_start(config, layout), *data_changes(config, layout)] if resume else ()
    write_config(config, layout)
    return PreparedRun(layout, identity, resume, changes)


def _forked(config: RunConfig, fork: Fork, *, overwrite: bool) -> tuple[RunLayout, RunIdentity]:
    """Raises: RunDirError, CheckpointError, ConfigError if there would be nothing left to train."""
    from async_rl.trainer.fork import fork_origin, write_fork  # not for other runs: it brings torch

    origin_layout, origin_identity = open_run(fork.run_dir)
    if config.run_dir.resolve() == origin_layout.root.resolve():
        raise RunDirError(f"run_dir={config.run_dir} is the run to fork from; name another --run_dir")
    origin = fork_origin(origin_layout, fork.step)
    if config.trainer.max_steps <= origin.step:
        raise ConfigError(
            f"trainer.max_steps={config.trainer.max_steps} is not above the step {origin.step} that the fork begins from; "
            f"raise --trainer.max_steps"
        )
    layout, identity = create_run(
        config.run_dir,
        overwrite=overwrite,
        forked_from=f"{origin_identity.run_id}@{origin.step}",
        first_version=origin.step,
    )
    same_prompts = not _other_tasks(config, origin_layout) and _same_rows(config, origin_layout)
    if same_prompts and (records := read_records(origin_layout.data_json)):
        write_records(layout.data_json, records)
    write_fork(origin, layout, same_prompts=same_prompts)
    return layout, identity


def data_changes(config: RunConfig, layout: RunLayout) -> Sequence[str]:
    """A sentence for each prompt file that has more rows than when the run in `layout` was last started.

    Raises: DataError if rows were removed or changed, or cannot be used.
    """
    records, found = read_records(layout.data_json), []
    for entry in config.data.mix or [{"source": config.data.source}]:
        path = Path(entry["source"])
        if (record := records.get(path.stem)) is None or entry["source"] == BUILT_IN_SOURCE:
            continue
        column, split = (str(entry.get(key, getattr(config.data, key))) for key in ("prompt_column", "split"))
        rows = open_rows(path, prompt_column=column, split=split)
        if more := appended(rows, record, rows.where):
            found.append(f"{rows.where}: {more:,} rows appended, {record.num_rows:,} → {rows.num_rows():,}")
    return found


def _same_rows(config: RunConfig, layout: RunLayout) -> bool:
    """Whether a fork reads what the run in `layout` read: else it begins at the first prompt."""
    try:
        return not data_changes(config, layout)
    except DataError:
        return False


def write_config(config: RunConfig, layout: RunLayout) -> None:
    """Write config.toml for the roles, without the server's password: that goes by environment."""
    write_atomic(layout.config_toml, dump_toml(_as_written(config)).encode())


def without_password(url: str) -> str:
    """The address with its user but no password."""
    scheme, separator, rest = url.partition("://")
    secrets, at, place = rest.rpartition("@")
    name = secrets.partition(":")[0]
    return f"{scheme}{separator}{name}{at if name else ''}{place}"


def _refuse_other_tasks(config: RunConfig, layout: RunLayout) -> None:
    for key, old, new in _other_tasks(config, layout):
        raise ConfigError(
            f"{key} was {_shown(old, key)} and cannot become {_shown(new, key)} in a resumed run: its tasks are named by "
            f"their place in the data; leave it, or start another run"
        )


def _other_tasks(config: RunConfig, layout: RunLayout) -> Sequence[tuple[str, Any, Any]]:
    """(key, there, here) of every setting under which the run in `layout` has other tasks than `config` would have."""
    try:
        before = load_config(layout.config_toml, env={}).config
    except (ConfigError, OSError):
        return ()  # said by `_changes_since_last_start`
    pairs = ((key, _value(before, key), _value(config, key)) for key in FIXED_KEYS)
    return [(key, old, new) for key, old, new in pairs if old != new]


def changed_settings(before: RunConfig, now: RunConfig) -> Sequence[str]:
    """`key: before → now` of every setting that differs."""
    pairs = ((key, _value(before, key), _value(now, key)) for key in leaf_fields(RunConfig))
    return [f"{key}: {_shown(old, key)} → {_shown(new, key)}" for key, old, new in pairs if old != new]


def _changes_since_last_start(config: RunConfig, layout: RunLayout) -> Sequence[str]:
    if not layout.config_toml.exists():
        return ()
    try:
        before = load_config(layout.config_toml, env={}).config
    except ConfigError as error:  # written by another version
        return [f"the config of the last start cannot be compared: {error}"]
    return changed_settings(before, _as_written(config))


def _as_written(config: RunConfig) -> RunConfig:
    redis = config.redis.model_copy(update={"url": without_password(config.redis.url)})
    return config.model_copy(update={"redis": redis, "run_dir": config.run_dir.absolute()})


def _value(config: RunConfig, key: str) -> Any:
    value: Any = config
    for name in key.split("."):
        value = getattr(value, name)
    return value


def _shown(value: Any, key: str) -> str:
    if value is None:
        return "not set"
    return toml_value(redact_url(value) if isinstance(value, str) else value, key)
