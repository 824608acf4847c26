"""From `environment.*` in the config to an environment: built-in by name, the user's own by `module:Class`."""

from __future__ import annotations

import difflib
import importlib
import inspect
from collections.abc import Callable, Mapping
from typing import Any, Protocol, cast

from async_rl.environments.base import Environment
from async_rl.environments.prompt_reward import PromptReward
from async_rl.environments.sort_digits import SortDigits
from async_rl.errors import ConfigError

PROMPT_REWARD = "prompt_reward"
BUILT_IN: Mapping[str, Callable[..., Environment]] = {"sort_digits": SortDigits}


class EnvironmentSpec(Protocol):
    """What names an environment: `config.environment`, or its copy in a scoring process, which loads no config models."""

    @property
    def name(self) -> str: ...

    @property
    def args(self) -> Mapping[str, Any]: ...

    @property
    def reward(self) -> str | None: ...


def load_environment(config: EnvironmentSpec) -> Environment:
    """Build the environment that `config` names.

    Raises: ConfigError for an unknown name, module, class, function or argument; it names the nearest known one.
    """
    require_environment(config)
    if config.name == PROMPT_REWARD:
        return _prompt_reward(config)
    if config.reward is not None:
        raise ConfigError(
            f"environment.reward={config.reward!r} is for environment.name={PROMPT_REWARD!r} only, not {config.name!r}; "
            f"remove it or change the name"
        )
    factory = BUILT_IN.get(config.name) or load_object(config.name, field="environment.name", kind="Class")
    environment = _construct(factory, config)
    missing = [method for method in ("observe", "score") if not callable(getattr(environment, method, None))]
    if missing:
        raise ConfigError(f"environment.name={config.name!r} is not an environment: it has no {' and no '.join(missing)}")
    return environment


def require_environment(config: EnvironmentSpec) -> None:
    """Import nothing. Raises: ConfigError if the name is neither built in nor `module:Class`."""
    known = [*BUILT_IN, PROMPT_REWARD]
    if config.name not in known and ":" not in config.name:
        raise ConfigError(
            f"environment.name={config.name!r} is not known{nearest(config.name, known)}; "
            f"use one of {', '.join(known)}, or module:Class"
        )


def load_object(path: str, *, field: str, kind: str) -> Callable[..., Any]:
    """Import `module:name`; `field` and `kind` are for the error. Raises: ConfigError."""
    module_name, _, name = path.partition(":")
    if not module_name or not name:
        raise ConfigError(f"{field}={path!r}: needs the form module:{kind}")
    try:
        module = importlib.import_module(module_name)
    except ModuleNotFoundError as error:
        raise ConfigError(f"{field}={path!r}: no module {error.name!r}; put its directory on PYTHONPATH") from error
    except Exception as error:
        raise ConfigError(f"{field}={path!r}: importing {module_name} raised {type(error).__name__}: {error}") from error
    found = module
    for part in name.split("."):
        if not hasattr(found, part):
            raise ConfigError(f"{field}={path!r}: {module_name} has no {part!r}{nearest(part, dir(found))}")
        found = getattr(found, part)
    if not callable(found):
        raise ConfigError(f"{field}={path!r}: {name} is a {type(found).__name__}, not a {kind}")
    return cast("Callable[..., Any]", found)


def nearest(name: str, known: list[str]) -> str:
    """`" (did you mean 'x'?)"`, or nothing when no known name is near."""
    matches = difflib.get_close_matches(name, known, n=1)
    return f" (did you mean {matches[0]!r}?)" if matches else ""


def _prompt_reward(config: EnvironmentSpec) -> Environment:
    if config.reward is None:
        raise ConfigError(f"environment.name={PROMPT_REWARD!r} needs environment.reward = module:function")
    if config.args:
        raise ConfigError(f"environment.args={config.args!r}: {PROMPT_REWARD} takes no arguments; remove them")
    return PromptReward(load_object(config.reward, field="environment.reward", kind="function"))


def _construct(factory: Callable[..., Any], config: EnvironmentSpec) -> Environment:
    parameters = inspect.signature(factory).parameters
    takes_any = any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters.values())
    for name in config.args:
        if name not in parameters and not takes_any:
            raise ConfigError(f"environment.args.{name}: {config.name} has no such argument{nearest(name, list(parameters))}")
    try:
        return cast("Environment", factory(**config.args))
    except ConfigError:
        raise
    except Exception as error:
        raise ConfigError(
            f"environment {config.name!r} with args {config.args!r} raised {type(error).__name__}: {error}"
        ) from error
