"""Settings written as text: command-line overrides and environment variables."""

from __future__ import annotations

import tomllib
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, cast

from pydantic import TypeAdapter, ValidationError
from pydantic.fields import FieldInfo

from async_rl.config.fields import is_optional, is_table
from async_rl.errors import ConfigError

ENV_PREFIX = "ASYNC_RL_"
ENV_DELIMITER = "__"


def parse_overrides(arguments: Sequence[str]) -> Iterator[tuple[str, str, str]]:
    """Yield (dotted key, text, the override as written) for `--key=value`, `--key value` and `key=value`.

    Raises: ConfigError for an override without a key or without a value.
    """
    rest = iter(arguments)
    for argument in rest:
        name, equals, text = argument.removeprefix("--").partition("=")
        if equals:
            yield name.strip(), text, argument
            continue
        following = next(rest, None) if argument.startswith("--") else None
        if following is None or following.startswith("--"):
            raise ConfigError(f"{argument!r} has no value; write --section.key=value, e.g. --trainer.max_steps=100")
        yield name.strip(), following, f"{argument} {following}"


def environment_settings(env: Mapping[str, str]) -> Iterator[tuple[str, str, str]]:
    """Yield (dotted key, text, variable) for every ASYNC_RL_SECTION__KEY variable, in order of name."""
    for variable in sorted(env):
        if variable.startswith(ENV_PREFIX):
            key = variable.removeprefix(ENV_PREFIX).lower().replace(ENV_DELIMITER, ".")
            yield key, env[variable], variable


def environment_variable(key: str) -> str:
    """The variable that sets the dotted `key`."""
    return ENV_PREFIX + key.upper().replace(".", ENV_DELIMITER)


def parse_text(text: str, field: FieldInfo | None) -> Any:
    """The value that `text` means for `field` (None: a key of a free table, whose type nobody knows).

    A TOML literal where one fits the field's type, the text itself otherwise; `none` unsets an optional setting. What fits
    neither is returned as it reads, for validation to refuse.
    """
    literal = toml_literal(text)
    if field is None or is_table(field):
        return literal
    if is_optional(field) and text.strip().lower() == "none":
        return None
    if isinstance(literal, list | dict):
        return literal
    adapter: TypeAdapter[Any] = TypeAdapter(cast(Any, field.annotation))
    for value, strict in ((literal, True), (text, False)):
        try:
            return adapter.validate_python(value, strict=strict)
        except ValidationError:
            continue
    return literal


def toml_literal(text: str) -> Any:
    """`text` read as a TOML value; a bare word is a string."""
    if "\n" in text or "\r" in text:
        return text
    try:
        return tomllib.loads(f"value = {text}")["value"]
    except tomllib.TOMLDecodeError:
        return text
