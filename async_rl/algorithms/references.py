"""A user's function by `module:function`."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Iterable
from typing import Any

from async_rl.errors import ConfigError


def load_function(reference: str, *, setting: str, known: Iterable[str]) -> Callable[..., Any]:
    """Import `module:function`. `setting` and the `known` names go into the message of an error.

    Raises: ConfigError if it is no such reference, or names nothing that can be called.
    """
    module_name, _, name = reference.partition(":")
    if not module_name or not name:
        raise ConfigError(f"{setting}={reference!r} is unknown; use one of {', '.join(known)}, or module:function of your own")
    try:
        function = getattr(importlib.import_module(module_name), name)
    except (ImportError, AttributeError) as error:
        raise ConfigError(f"{setting}={reference!r} cannot be imported ({error}); put its module on PYTHONPATH") from error
    if not callable(function):
        raise ConfigError(f"{setting}={reference!r} is a {type(function).__name__}; it must be a function")
    loaded: Callable[..., Any] = function
    return loaded
