"""Tool calls as methods and functions: their schemas, and calling them with what a model wrote."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from async_rl.environments.calls import call, with_keywords
from async_rl.environments.session import ToolCall
from async_rl.errors import ConfigError
from protocol.messages import ChatMessage, Json


def schemas_of(tools: Sequence[Callable[..., Any]]) -> tuple[Mapping[str, Json], ...]:
    """JSON schemas from names, type hints and Google-style docstrings, as chat templates take them. Raises: ConfigError."""
    from transformers.utils.chat_template_utils import get_json_schema

    schemas = []
    for tool in tools:
        try:
            schemas.append(get_json_schema(tool))
        except Exception as error:  # docstrings and hints that it cannot read: its own kinds of errors
            name = getattr(tool, "__name__", repr(tool))
            raise ConfigError(f"the tool {name!r} needs type hints and a docstring for each argument: {error}") from error
    return tuple(schemas)


async def run_calls(calls: Sequence[ToolCall], tools: Mapping[str, Callable[..., Any]]) -> tuple[ChatMessage, ...]:
    """A tool message per call, in order. What a tool raises, or a call that fits no tool, is told to the model as an error."""
    return tuple([{"role": "tool", "name": one.name, "content": await _result(one, tools)} for one in calls])


async def _result(one: ToolCall, tools: Mapping[str, Callable[..., Any]]) -> str:
    if one.error is not None:
        return str({"error": one.error})
    tool = tools.get(one.name)
    if tool is None:
        return str({"error": f"no tool {one.name!r}; there are {', '.join(tools)}"})
    try:
        inspect.signature(tool).bind(**one.arguments)
    except TypeError as error:
        return str({"error": str(error)})
    try:
        return str(await call(with_keywords(tool, one.arguments)))
    except Exception as error:
        return str({"error": str(error)})
