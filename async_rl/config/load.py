"""From a TOML file, environment variables and command-line overrides to one checked RunConfig, with where each value came from.

Later layers win: default < file < environment (ASYNC_RL_SECTION__KEY) < flag (--section.key=value). Every problem of every
layer is reported at once.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, TypeAlias

from pydantic import BaseModel, ValidationError

from async_rl.config.fields import is_known, leaf_fields, nearest_key, sections, table_of
from async_rl.config.run import RunConfig
from async_rl.config.sources import FileSource, RunSettings, TextSource, layers
from async_rl.config.text import environment_variable
from async_rl.errors import ConfigError

RUN_IDENTITY = "run.json"
"""Beside the config.toml that a run wrote itself."""

NOT_SET = "not-set"
"""Stands for a required setting that nobody set, where a config is only looked at."""

OriginKind: TypeAlias = Literal["default", "file", "environment", "flag"]


@dataclass(frozen=True, slots=True)
class Origin:
    """Where a value came from: `where` is the file, the variable, or the flag as written; empty for a default."""

    kind: OriginKind
    where: str = ""

    def __str__(self) -> str:
        return f"{self.kind} {self.where}".rstrip()


@dataclass(frozen=True, slots=True)
class Resolved:
    """A config and the origin of each of its values, by dotted key.

    A free table (`environment.args`) has an origin, and so has each of its keys that was set alone.
    """

    config: RunConfig
    origins: Mapping[str, Origin]


def load_config(
    path: Path | None, overrides: Sequence[str] = (), env: Mapping[str, str] = os.environ, *, to_show: bool = False
) -> Resolved:
    """Read, merge and validate. A relative model.path is taken from the working directory and made absolute.

    to_show: required settings may be missing; their place is taken by NOT_SET, and they have no origin.
    Raises: ConfigError naming each unknown key, wrong value or missing setting (one line per problem).
    """
    flags, environment, file = sources = layers(path, overrides, env)
    origins: dict[str, Origin] = {key: Origin("default") for key in leaf_fields(RunConfig)}
    problems: list[str] = []
    lowest_first: tuple[tuple[OriginKind, FileSource | TextSource], ...]
    lowest_first = (("file", file), ("environment", environment), ("flag", flags))
    for kind, source in lowest_first:
        for key, where in source.where.items():
            problems.extend(_unknown(key, where))
            for inner in [name for name in origins if name.startswith(f"{key}.") and table_of(RunConfig, name) == key]:
                del origins[inner]  # a table that is set as a whole replaces its keys
            origins[key] = Origin(kind, where)
    missing = [key for key, field in leaf_fields(RunConfig).items() if field.is_required() and origins[key].kind == "default"]
    if to_show and missing:
        filled = load_config(path, [*overrides, *(f"--{key}={NOT_SET}" for key in missing)], env)
        return Resolved(filled.config, {key: origin for key, origin in filled.origins.items() if key not in missing})
    try:
        settings = RunSettings(sources)
    except ValidationError as error:
        problems.extend(_describe(error, origins))
    if problems:
        raise ConfigError(_one_line_each(problems))
    config = RunConfig.model_construct(settings.model_fields_set, **dict(settings))
    model = config.model.model_copy(update={"path": Path(os.path.abspath(config.model.path))})  # noqa: PTH100 (keeps symlinks)
    config = config.model_copy(update={"model": model})
    if path is not None and (path.parent / RUN_IDENTITY).exists() and origins["run_dir"].kind != "default":
        config = _at_home(config, Path(file.init_kwargs.get("run_dir", "")), path.parent.absolute(), origins)
    return Resolved(config, origins)


def _at_home(config: RunConfig, before: Path, home: Path, origins: Mapping[str, Origin]) -> RunConfig:
    """A run's own config is read where the run lies now: what it names below the run directory has moved with it."""

    def moved(path: Path) -> Path:
        return home / path.relative_to(before) if before.is_absolute() and path.is_relative_to(before) else path

    source = Path(config.data.source)
    changes: dict[str, Any] = {"model": config.model.model_copy(update={"path": moved(config.model.path)})}
    if moved(source) != source:
        changes["data"] = config.data.model_copy(update={"source": str(moved(source))})
    if origins["run_dir"].kind == "file":
        changes["run_dir"] = home
    return config.model_copy(update=changes)


def _unknown(key: str, where: str) -> Iterator[str]:
    """What is wrong with a dotted key, if anything."""
    if is_known(RunConfig, key):
        return
    known_sections = sections(RunConfig)
    section, _, name = key.rpartition(".")
    hint = f"did you mean {section if section in leaf_fields(RunConfig) else nearest_key(RunConfig, key)}?"
    if key in known_sections:
        example = next(iter(known_sections[key].model_fields))
        yield f"{key} is a section, not a value ({where}): set its keys, e.g. {key}.{example}"
    elif "" in key.split("."):
        yield f"malformed key '{key}' ({where}): an empty name beside a dot; {hint}"
    elif not section:
        yield f"unknown key '{name}' at the top level ({where}): {hint}"
    elif section in leaf_fields(RunConfig):
        yield f"unknown key '{key}' ({where}): {section} is a value, not a section; {hint}"
    elif section not in known_sections:
        yield f"unknown key '{name}' in unknown section '{section}' ({where}): {hint}"
    else:
        yield f"unknown key '{name}' in section '{section}' ({where}): {hint}"


def _describe(error: ValidationError, origins: Mapping[str, Origin]) -> Iterator[str]:
    for item in error.errors(include_url=False):
        if item["type"] in {"extra_forbidden", "model_type"}:
            continue  # an unknown key of the file: reported with its layer
        key = _known_prefix(item["loc"])
        origin = origins.get(key, Origin("default"))
        if item["type"] == "missing" and origin.kind == "default":
            names = [f"{key}.{name}" for name, field in _section_fields(key) if field.is_required()] or [key]
            for name in names:
                yield f"{name} is not set: set it in the config file, with --{name}=… or with {environment_variable(name)}"
            continue
        yield f"{key} = {item['input']!r} ({origin.where or origin.kind}): {item['msg']}"


def _section_fields(key: str) -> Iterator[tuple[str, Any]]:
    section: type[BaseModel] | None = sections(RunConfig).get(key)
    if section is not None:
        yield from section.model_fields.items()


def _known_prefix(location: Sequence[str | int]) -> str:
    """The dotted key of an error's location, without pydantic's names of union members and indices."""
    names: list[str] = []
    for part in location:
        candidate = ".".join([*names, str(part)])
        if candidate in leaf_fields(RunConfig) or candidate in sections(RunConfig) or table_of(RunConfig, candidate):
            names.append(str(part))
        else:
            break
    return ".".join(names)


def _one_line_each(problems: Sequence[str]) -> str:
    unique = list(dict.fromkeys(problems))
    if len(unique) == 1:
        return unique[0]
    return f"{len(unique)} problems in the configuration:\n" + "\n".join(f"  {problem}" for problem in unique)
