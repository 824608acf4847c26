"""From `environment.args.verifiers` in the config to the environment `verify`."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from async_rl.environments.objects import construct, load_object, nearest, require_takes
from async_rl.environments.verified import Part, Verified, verified
from async_rl.environments.verifiers.base import GroupVerifier, Verifier
from async_rl.environments.verifiers.code_tests import CodeTests
from async_rl.environments.verifiers.functions import FunctionVerifier, GroupFunctionVerifier
from async_rl.environments.verifiers.judge import Judge
from async_rl.environments.verifiers.math_answer import MathAnswer
from async_rl.environments.verifiers.shaping import Finished, Length
from async_rl.environments.verifiers.text_match import ExactMatch, JsonMatch, RegexMatch
from async_rl.environments.verifiers.trl_reward import TrlReward
from async_rl.errors import ConfigError

VERIFIERS: Mapping[str, Callable[..., Verifier | GroupVerifier]] = {
    "code": CodeTests,
    "exact": ExactMatch,
    "finished": Finished,
    "json": JsonMatch,
    "judge": Judge,
    "length": Length,
    "math": MathAnswer,
    "regex": RegexMatch,
}
_FIELD = "environment.args.verifiers"
_KINDS = ("use", "group", "trl")
_OWN = (*_KINDS, "name", "weight", "timeout_s", "retries", "max_concurrent")


def verify(verifiers: Sequence[Mapping[str, Any]]) -> Verified:
    """The environment of the verifiers that `environment.args.verifiers` lists.

    Each entry: `use` (a name of VERIFIERS, or `module:function` taking (completion, row)), `group` (`module:function` taking
    (completions, rows) of a whole group) or `trl` (`module:function`, called as TRL calls reward functions); then name, weight,
    timeout_s, retries, max_concurrent, and what the verifier itself takes.
    Raises: ConfigError.
    """
    if not verifiers or isinstance(verifiers, Mapping | str):
        raise ConfigError(f"{_FIELD}={verifiers!r}: needs a list of tables, one a verifier, such as {{use = 'math'}}")
    parts = [_part(entry, f"{_FIELD}[{index}]") for index, entry in enumerate(verifiers)]
    names = [part.name for part in parts]
    for index, name in enumerate(names):
        if name in names[:index]:
            raise ConfigError(f"{_FIELD}[{index}]: the name {name!r} is taken; give this one another with name = ")
    return verified(parts)


def load_verifier(use: str, args: Mapping[str, Any], *, field: str) -> Verifier | GroupVerifier:
    """The verifier named `use`, with its own arguments. Raises: ConfigError."""
    if use in VERIFIERS:
        verifier: Verifier | GroupVerifier = construct(VERIFIERS[use], args, field=field, what=f"verifier {use!r}")
        return verifier
    if ":" not in use:
        raise ConfigError(
            f"{field}.use={use!r} is not known{nearest(use, VERIFIERS)}; use one of {', '.join(VERIFIERS)}, or module:function"
        )
    loaded = load_object(use, field=f"{field}.use", kind="function")
    if inspect.isclass(loaded):
        built = construct(loaded, args, field=field, what=f"verifier {use!r}")
        return built if isinstance(built, GroupVerifier) or hasattr(built, "verify") else FunctionVerifier(built)
    if args:
        raise ConfigError(f"{field}: {use!r} is a function and takes no further arguments ({', '.join(args)}); use a class")
    require_takes(loaded, ("completion", "row"), path=use, field=f"{field}.use")
    return FunctionVerifier(loaded)


def _part(entry: Mapping[str, Any], field: str) -> Part:
    if not isinstance(entry, Mapping) or sum(key in entry for key in _KINDS) != 1:
        raise ConfigError(f"{field}={entry!r}: needs one of {', '.join(_KINDS)}")
    args = {key: value for key, value in entry.items() if key not in _OWN}
    path = str(next(entry[key] for key in _KINDS if key in entry))
    timeout_s = entry.get("timeout_s")
    if "use" not in entry:
        if args:
            raise ConfigError(f"{field}: unknown {', '.join(args)}")
        kind = "group" if "group" in entry else "trl"
        function = load_object(path, field=f"{field}.{kind}", kind="function")
        if kind == "group":
            require_takes(function, ("completions", "rows"), path=path, field=f"{field}.{kind}")
        verifier: Verifier | GroupVerifier = GroupFunctionVerifier(function) if kind == "group" else TrlReward(function)
    else:
        if timeout_s is not None and "timeout_s" in inspect.signature(VERIFIERS.get(path, verify)).parameters:
            args, timeout_s = {**args, "timeout_s": timeout_s}, None  # it has a limit of its own
        verifier = load_verifier(path, args, field=field)
    return Part(
        name=str(entry.get("name", path)),
        verifier=verifier,
        weight=_number(entry, "weight", 1.0, field),
        timeout_s=None if timeout_s is None else _number(entry, "timeout_s", 0.0, field, above=0.0),
        retries=_count(entry, "retries", 0, field),
        max_concurrent=_count(entry, "max_concurrent", 1, field) if "max_concurrent" in entry else None,
    )


def _number(entry: Mapping[str, Any], key: str, default: float, field: str, above: float | None = None) -> float:
    value = entry.get(key, default)
    if isinstance(value, bool) or not isinstance(value, int | float) or (above is not None and value <= above):
        raise ConfigError(f"{field}.{key}={value!r}: needs a number{'' if above is None else f' above {above:g}'}")
    return float(value)


def _count(entry: Mapping[str, Any], key: str, least: int, field: str) -> int:
    value = entry.get(key, least)
    if isinstance(value, bool) or not isinstance(value, int) or value < least:
        raise ConfigError(f"{field}.{key}={value!r}: needs a whole number of at least {least}")
    return value
