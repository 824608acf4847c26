"""From `environment.*` in the config to an environment: built-in by name, the user's own by `module:Class`."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, Protocol, cast

from async_rl.environments.base import Environment
from async_rl.environments.json_extraction import JsonExtraction
from async_rl.environments.look_up import LookUp
from async_rl.environments.objects import construct, load_object, nearest, require_takes
from async_rl.environments.prompt_reward import PromptReward
from async_rl.environments.reasoning_gym import ReasoningGym
from async_rl.environments.sort_digits import SortDigits
from async_rl.environments.trl_environment import TrlEnvironment
from async_rl.environments.verifiers.base import Closable
from async_rl.environments.verifiers.load import verify
from async_rl.environments.verifiers_taskset import VerifiersTaskset
from async_rl.errors import ConfigError

PROMPT_REWARD = "prompt_reward"
BUILT_IN: Mapping[str, Callable[..., Environment]] = {
    "json_extraction": JsonExtraction,
    "look_up": LookUp,
    "reasoning_gym": ReasoningGym,
    "sort_digits": SortDigits,
    "trl": TrlEnvironment,
    "verifiers": VerifiersTaskset,
    "verify": verify,
}


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
    environment = cast(
        "Environment", construct(factory, config.args, field="environment.args", what=f"environment {config.name!r}")
    )
    missing = [method for method in ("observe", "score") if not callable(getattr(environment, method, None))]
    if missing:
        raise ConfigError(f"environment.name={config.name!r} is not an environment: it has no {' and no '.join(missing)}")
    return environment


async def close_environment(environment: Environment) -> None:
    """End the processes and connections that it holds, if it holds any."""
    if isinstance(environment, Closable):
        await environment.close()


def require_environment(config: EnvironmentSpec) -> None:
    """Import nothing. Raises: ConfigError if the name is neither built in nor `module:Class`."""
    known = [*BUILT_IN, PROMPT_REWARD]
    if config.name not in known and ":" not in config.name:
        raise ConfigError(
            f"environment.name={config.name!r} is not known{nearest(config.name, known)}; "
            f"use one of {', '.join(known)}, or module:Class"
        )


def _prompt_reward(config: EnvironmentSpec) -> Environment:
    if config.reward is None:
        raise ConfigError(f"environment.name={PROMPT_REWARD!r} needs environment.reward = module:function")
    if config.args:
        raise ConfigError(f"environment.args={config.args!r}: {PROMPT_REWARD} takes no arguments; remove them")
    function = load_object(config.reward, field="environment.reward", kind="function")
    require_takes(function, ("completion", "row"), path=config.reward, field="environment.reward")
    return PromptReward(function)
