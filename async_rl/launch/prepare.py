"""The run directory before the roles start: made or opened, with the resolved config in it, and what a resumed run changes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from async_rl.config import RunConfig, dump_toml, load_config
from async_rl.config.dump import toml_value
from async_rl.config.fields import leaf_fields
from async_rl.errors import ConfigError
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


FIXED_KEYS = (
    "seed",
    "data.source",
    "data.split",
    "data.prompt_column",
    "data.shuffle",
    "environment.name",
    "environment.args",
)
"""What names a run's tasks: under other data or another order, an id of the log would mean another prompt."""


def prepare(config: RunConfig, *, resume: bool, overwrite: bool) -> PreparedRun:
    """Make or open the run directory and write the resolved config to it.

    Raises: RunDirError; ConfigError if a resumed run would read other prompts, or the same in another order.
    """
    layout, identity = open_run(config.run_dir) if resume else create_run(config.run_dir, overwrite=overwrite)
    if resume:
        _refuse_other_tasks(config, layout)
    changes = _changes_since_last_start(config, layout) if resume else ()
    write_config(config, layout)
    return PreparedRun(layout, identity, resume, changes)


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
    try:
        before = load_config(layout.config_toml, env={}).config
    except (ConfigError, OSError):
        return  # said by `_changes_since_last_start`
    for key in FIXED_KEYS:
        old, new = _value(before, key), _value(config, key)
        if old != new:
            raise ConfigError(
                f"{key} was {_shown(old, key)} and cannot become {_shown(new, key)} in a resumed run: its tasks are named by "
                f"their place in the data; leave it, or start another run"
            )


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
    return config.model_copy(update={"redis": redis})


def _value(config: RunConfig, key: str) -> Any:
    value: Any = config
    for name in key.split("."):
        value = getattr(value, name)
    return value


def _shown(value: Any, key: str) -> str:
    if value is None:
        return "not set"
    return toml_value(redact_url(value) if isinstance(value, str) else value, key)
