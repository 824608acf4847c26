"""`python -m async_rl.launch.user_code_child FD`: load what one frame names, and answer what is wrong with it."""

from __future__ import annotations

import tomllib
from collections.abc import Mapping
from typing import Any

from async_rl.environments.load import load_environment
from async_rl.environments.objects import load_object, require_takes
from async_rl.environments.process_child import ParentConnection
from async_rl.errors import ConfigError
from async_rl.reward.wire import NamedEnvironment
from protocol.packing import pack

OBJECTIVES = {"loss": ("tokens", "settings"), "advantage": ("groups", "settings")}
"""Settings of `algorithm` that may be a function of the user's, and what each is called with."""


def main() -> None:
    parent = ParentConnection()
    asked = tomllib.loads(parent.read().decode())
    parent.send(pack({"error": _problem(asked)}))


def _problem(asked: Mapping[str, Any]) -> str | None:
    try:
        load_environment(NamedEnvironment(asked["name"], asked["args"], asked.get("reward")))
        for key, takes in OBJECTIVES.items():
            if ":" in asked[key]:
                field = f"algorithm.{key}"
                require_takes(load_object(asked[key], field=field, kind="function"), takes, path=asked[key], field=field)
    except ConfigError as error:
        return str(error)
    except (Exception, SystemExit) as error:  # an import may raise anything, and must not pass for a process that died
        return f"environment.name={asked['name']!r}: loading it raised {type(error).__name__}: {error}"
    return None


if __name__ == "__main__":
    main()
