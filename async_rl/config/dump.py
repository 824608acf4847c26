"""A config as TOML that `load_config` reads back to an equal config, each setting under its documentation."""

from __future__ import annotations

import datetime
import json
import math
import re
from collections.abc import Iterator, Mapping, Sequence
from pathlib import PurePath
from typing import Any

from pydantic import BaseModel

from async_rl.config.run import RunConfig
from async_rl.errors import ConfigError
from async_rl.logs import redact_url

_BARE_KEY = re.compile(r"[A-Za-z0-9_-]+")


def dump_toml(config: RunConfig, *, redact: bool = False) -> str:
    """Write the whole config; with `redact`, passwords in URLs become `***` (for people, not for loading).

    Raises: ConfigError if environment.args holds what TOML cannot say (a null, an object).
    """
    return "\n".join(_table(config, "", redact)).strip("\n") + "\n"


def toml_value(value: Any, key: str) -> str:
    """`value` as a TOML value on one line; `key` names it in errors."""
    match value:
        case bool():
            return "true" if value else "false"
        case int():
            return str(value)
        case float():
            return repr(value) if math.isfinite(value) else {"inf": "inf", "-inf": "-inf", "nan": "nan"}[str(value)]
        case str() | PurePath():
            return json.dumps(str(value), ensure_ascii=False).replace("\x7f", "\\u007f")
        case datetime.datetime() | datetime.date() | datetime.time():
            return value.isoformat()
        case Mapping():
            pairs = (f"{_key(name)} = {toml_value(inner, f'{key}.{name}')}" for name, inner in value.items())
            return f"{{ {', '.join(pairs)} }}" if value else "{}"
        case Sequence():
            return f"[{', '.join(toml_value(inner, f'{key}[{index}]') for index, inner in enumerate(value))}]"
    raise ConfigError(f"{key} = {value!r}: TOML has no {type(value).__name__}; use text, numbers, booleans, lists or tables")


def _table(model: BaseModel, prefix: str, redact: bool) -> Iterator[str]:
    """Plain settings first, then sections: a TOML header ends the settings of the table above it."""
    inner: list[tuple[str, BaseModel]] = []
    for name, field in type(model).model_fields.items():
        value = getattr(model, name)
        if isinstance(value, BaseModel):
            inner.append((name, value))
            continue
        yield from (f"# {line.strip()}" for line in (field.description or "").splitlines())
        if redact and isinstance(value, str):
            value = redact_url(value)
        yield f"# {name} is not set" if value is None else f"{name} = {toml_value(value, prefix + name)}"
    for name, section in inner:
        yield ""
        yield from (f"# {line.strip()}" for line in (type(section).__doc__ or "").strip().splitlines())
        yield f"[{prefix}{name}]"
        yield from _table(section, f"{prefix}{name}.", redact)


def _key(name: str) -> str:
    return name if _BARE_KEY.fullmatch(name) else toml_value(name, name)
