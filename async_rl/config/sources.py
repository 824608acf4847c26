"""The layers of a config as sources of pydantic-settings, which nests and merges them.

Ours is only what its own sources do not do: refuse a missing file, read text by the type of its setting, replace a table that
is set as a whole, and remember where each value came from.
"""

from __future__ import annotations

import tomllib
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeAlias

from pydantic_settings import (
    BaseSettings,
    EnvSettingsSource,
    InitSettingsSource,
    PydanticBaseSettingsSource,
    SettingsConfigDict,
    TomlConfigSettingsSource,
)

from async_rl.config.fields import is_known, leaf_fields, sections, table_of
from async_rl.config.run import RunConfig
from async_rl.config.text import ENV_DELIMITER, ENV_PREFIX, environment_settings, parse_overrides, parse_text
from async_rl.errors import ConfigError


class RunSettings(BaseSettings, RunConfig):
    """A RunConfig that is filled from `sources` alone, the first one on top."""

    model_config = SettingsConfigDict(extra="forbid", frozen=True, strict=True, case_sensitive=True, enable_decoding=False)

    def __init__(self, sources: Sequence[PydanticBaseSettingsSource]) -> None:
        super().__init__(sources=sources)

    @classmethod
    def settings_customise_sources(
        cls,
        settings_cls: type[BaseSettings],
        init_settings: PydanticBaseSettingsSource,
        env_settings: PydanticBaseSettingsSource,
        dotenv_settings: PydanticBaseSettingsSource,
        file_secret_settings: PydanticBaseSettingsSource,
    ) -> tuple[PydanticBaseSettingsSource, ...]:
        assert isinstance(init_settings, InitSettingsSource)
        return tuple(init_settings.init_kwargs["sources"])


class TextSource(EnvSettingsSource):
    """Settings written as text (dotted key, text, where), below tables that a higher layer has `replaced`.

    `where` has the unknown keys as well; only known ones are handed over.
    """

    def __init__(
        self, settings: Iterable[tuple[str, str, str]], *, prefix: str, delimiter: str, replaced: Collection[str] = ()
    ) -> None:
        super().__init__(RunSettings, env_prefix=prefix, env_nested_delimiter=delimiter)
        self.where: dict[str, str] = {}
        self.tables = set(replaced)
        values: dict[str, Any] = {}
        for key, text, where in settings:
            table, name = table_of(RunConfig, f"{key}."), prefix + key.replace(".", delimiter)
            if table in replaced:
                continue
            self.where.pop(key, None)  # the last one wins, and takes its place after what it repeats
            self.where[key] = where
            if is_known(RunConfig, key):
                values.pop(name, None)
                values[name] = parse_text(text, leaf_fields(RunConfig).get(key))
            if table == key:
                self.tables.add(key)
        self.env_vars = values


class FileSource(TomlConfigSettingsSource):
    """The TOML file, below tables that a higher layer has `replaced`."""

    def __init__(self, path: Path | None, *, replaced: Collection[str] = ()) -> None:
        super().__init__(RunSettings, path)
        for table in replaced:
            section, _, name = table.rpartition(".")
            tables = self.init_kwargs.get(section)
            if isinstance(tables, dict):
                tables.pop(name, None)
        self.where: dict[str, str] = dict.fromkeys(flatten(self.init_kwargs), str(path))

    def _read_files(self, files: Any, deep_merge: bool = False) -> dict[str, Any]:
        del deep_merge
        return {} if files is None else read_toml(Path(files))  # the library's own skips what is missing in silence


Layers: TypeAlias = tuple[TextSource, TextSource, FileSource]


def layers(path: Path | None, overrides: Sequence[str], env: Mapping[str, str]) -> Layers:
    """Flags, environment and file, the highest first. Raises: ConfigError for what cannot be read at all."""
    flags = TextSource(parse_overrides(overrides), prefix="", delimiter=".")
    variables = environment_settings(env)
    environment = TextSource(variables, prefix=ENV_PREFIX.lower(), delimiter=ENV_DELIMITER, replaced=flags.tables)
    return flags, environment, FileSource(path, replaced=environment.tables)


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


def flatten(table: Mapping[str, Any], prefix: str = "") -> Iterator[str]:
    """Dotted key of every setting; tables that are not a section stay whole."""
    for name, value in table.items():
        key = prefix + name
        if isinstance(value, dict) and key not in leaf_fields(RunConfig) and (value or key in sections(RunConfig)):
            yield from flatten(value, f"{key}.")
        else:
            yield key
