"""Objects that a config names: imported by `module:name`, built with arguments that are checked by name."""

from __future__ import annotations

import difflib
import importlib
import inspect
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any, cast

from async_rl.errors import ConfigError


def load_object(path: str, *, field: str, kind: str) -> Callable[..., Any]:
    """Import `module:name`; `field` and `kind` are for the error. Raises: ConfigError."""
    module_name, _, name = path.partition(":")
    if not module_name or not name:
        raise ConfigError(f"{field}={path!r}: needs the form module:{kind}")
    try:
        module = importlib.import_module(module_name)
    except ModuleNotFoundError as error:
        raise ConfigError(f"{field}={path!r}: no module {error.name!r}; put its directory on PYTHONPATH") from error
    except (Exception, SystemExit) as error:  # a script that is no module ends itself when it is imported
        raise ConfigError(f"{field}={path!r}: importing {module_name} raised {type(error).__name__}: {error}") from error
    found = module
    for part in name.split("."):
        if not hasattr(found, part):
            raise ConfigError(f"{field}={path!r}: {module_name} has no {part!r}{nearest(part, dir(found))}")
        found = getattr(found, part)
    if not callable(found):
        raise ConfigError(f"{field}={path!r}: {name} is a {type(found).__name__}, not a {kind}")
    return cast("Callable[..., Any]", found)


def require_takes(function: Callable[..., Any], takes: Sequence[str], *, path: str, field: str) -> None:
    """Raises: ConfigError if `function` cannot be called with the positional arguments that `takes` names."""
    try:
        signature = inspect.signature(function)
    except (TypeError, ValueError):  # some callables written in C have none: the first call will tell
        return
    try:
        signature.bind(*takes)
    except TypeError as error:
        raise ConfigError(
            f"{field}={path!r} is called as {path.rpartition(':')[2]}({', '.join(takes)}), but it is defined with {signature}: "
            f"{error}"
        ) from error


def nearest(name: str, known: Collection[str]) -> str:
    """`" (did you mean 'x'?)"`, or nothing when no known name is near."""
    matches = difflib.get_close_matches(name, known, n=1)
    return f" (did you mean {matches[0]!r}?)" if matches else ""


def construct(factory: Callable[..., Any], args: Mapping[str, Any], *, field: str, what: str) -> Any:
    """`factory(**args)`. `field` and `what` are for the error. Raises: ConfigError for an unknown or unusable argument."""
    parameters = inspect.signature(factory).parameters
    takes_any = any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters.values())
    for name in args:
        if name not in parameters and not takes_any:
            raise ConfigError(f"{field}.{name}: {what} has no such argument{nearest(name, list(parameters))}")
    try:
        return factory(**args)
    except ConfigError:
        raise
    except Exception as error:
        raise ConfigError(f"{what} with args {dict(args)!r} raised {type(error).__name__}: {error}") from error
