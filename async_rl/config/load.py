"""From a TOML file, environment variables and command-line overrides to one checked RunConfig, with where each value came from.

Later layers win: default < file < environment (ASYNC_RL_SECTION__KEY) < flag (--section.key=value). Every problem of every
layer is reported at once. pydantic-settings is not used: its sources skip a missing file and an unknown variable in silence,
and cannot say where a value came from.
"""

from __future__ import annotations

import os
import tomllib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, TypeAlias

from pydantic import BaseModel, ValidationError

from async_rl.config.fields import leaf_fields, nearest_key, sections, table_of
from async_rl.config.run import RunConfig
from async_rl.config.text import environment_settings, environment_variable, parse_overrides, parse_text
from async_rl.errors import ConfigError

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


@dataclass(frozen=True, slots=True)
class _Setting:
    key: str
    value: Any
    origin: Origin


def load_config(path: Path | None, overrides: Sequence[str] = (), env: Mapping[str, str] = os.environ) -> Resolved:
    """Read, merge and validate. A relative model.path is taken from the working directory and made absolute.

    Raises: ConfigError naming each unknown key, wrong value or missing setting (one line per problem).
    """
    settings, problems = _settings(path, overrides, env)
    merged: dict[str, Any] = {}
    origins: dict[str, Origin] = {key: Origin("default") for key in leaf_fields(RunConfig)}
    for setting in settings:
        for inner in [name for name in origins if name.startswith(f"{setting.key}.")]:
            del origins[inner]  # a table that is set as a whole replaces its keys
        origins[setting.key] = setting.origin
        _insert(merged, setting.key.split("."), setting.value)
    try:
        config = RunConfig.model_validate(merged)
    except ValidationError as error:
        problems.extend(_describe(error, origins))
    if problems:
        raise ConfigError(_one_line_each(problems))
    model = config.model.model_copy(update={"path": Path(os.path.abspath(config.model.path))})  # noqa: PTH100 (keeps symlinks)
    return Resolved(config.model_copy(update={"model": model}), origins)


def _settings(path: Path | None, overrides: Sequence[str], env: Mapping[str, str]) -> tuple[list[_Setting], list[str]]:
    """All known settings, lowest layer first, and a line for each unknown key."""
    settings: list[_Setting] = []
    problems: list[str] = []
    known = leaf_fields(RunConfig)
    if path is not None:
        for key, value in _flatten(read_toml(path)):
            problem = _unknown(key, str(path))
            if problem is None:
                settings.append(_Setting(key, value, Origin("file", str(path))))
            else:
                problems.append(problem)
    texts = [(entry, "environment") for entry in environment_settings(env)]
    texts += [(entry, "flag") for entry in parse_overrides(overrides)]
    for (key, text, where), kind in texts:
        problem = _unknown(key, where)
        if problem is None:
            origin = Origin("environment" if kind == "environment" else "flag", where)
            settings.append(_Setting(key, parse_text(text, known.get(key)), origin))
        else:
            problems.append(problem)
    return settings, problems


def read_toml(path: Path) -> dict[str, Any]:
    """The tables of a TOML file. Raises: ConfigError if it is missing, unreadable or no TOML (with line and column)."""
    try:
        return tomllib.loads(path.read_text("utf-8"))
    except FileNotFoundError:
        raise ConfigError(f"config file {path} does not exist (working directory {Path.cwd()})") from None
    except UnicodeDecodeError as error:
        raise ConfigError(f"config file {path} is not UTF-8 text: {error.reason} at byte {error.start}") from None
    except OSError as error:
        raise ConfigError(f"config file {path} cannot be read: {error.strerror}") from None
    except tomllib.TOMLDecodeError as error:
        raise ConfigError(f"config file {path} is not valid TOML: {error}") from None


def _flatten(table: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Dotted key and value of every setting; tables that are not a section stay whole."""
    for name, value in table.items():
        key = prefix + name
        if not isinstance(value, dict) or key in leaf_fields(RunConfig):
            yield key, value
        elif value or key in sections(RunConfig):
            yield from _flatten(value, f"{key}.")
        else:
            yield key, value  # an empty table of an unknown name


def _unknown(key: str, where: str) -> str | None:
    """What is wrong with a dotted key, or None."""
    if key in leaf_fields(RunConfig) or table_of(RunConfig, key) is not None:
        return None
    known_sections = sections(RunConfig)
    if key in known_sections:
        example = next(iter(known_sections[key].model_fields))
        return f"{key} is a section, not a value ({where}): set its keys, e.g. {key}.{example}"
    section, _, name = key.rpartition(".")
    hint = f"did you mean {section if section in leaf_fields(RunConfig) else nearest_key(RunConfig, key)}?"
    if "" in key.split("."):
        return f"malformed key '{key}' ({where}): an empty name beside a dot; {hint}"
    if not section:
        return f"unknown key '{name}' at the top level ({where}): {hint}"
    if section in leaf_fields(RunConfig):
        return f"unknown key '{key}' ({where}): {section} is a value, not a section; {hint}"
    if section not in known_sections:
        return f"unknown key '{name}' in unknown section '{section}' ({where}): {hint}"
    return f"unknown key '{name}' in section '{section}' ({where}): {hint}"


def _insert(tables: dict[str, Any], parts: Sequence[str], value: Any) -> None:
    for part in parts[:-1]:
        inner = tables.get(part)
        if not isinstance(inner, dict):
            inner = tables[part] = {}
        tables = inner
    tables[parts[-1]] = value


def _describe(error: ValidationError, origins: Mapping[str, Origin]) -> Iterator[str]:
    for item in error.errors(include_url=False):
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
