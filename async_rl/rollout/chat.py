"""Chat messages to token ids and tool calls from text, by the template of the model's own tokenizer.

A later turn's prompt is the exact ids so far and the ids of what the template puts behind an assistant's message: nothing that
was sampled is decoded and encoded again.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol, TypeAlias

from async_rl.environments.session import Said, ToolCall
from async_rl.errors import DataError
from protocol.messages import ChatMessage, Json

Tools: TypeAlias = Sequence[Mapping[str, Json]]
_SENTINEL = "\u2063assistant\u2063"
_PROBE = "probe_function"
_JSON = json.JSONDecoder()


class Tokenizer(Protocol):
    """What is needed of a Hugging Face tokenizer."""

    @property
    def eos_token_id(self) -> int | None: ...

    @property
    def bos_token_id(self) -> int | None: ...

    def encode(self, text: str, *, add_special_tokens: bool) -> list[int]: ...

    def decode(self, token_ids: Sequence[int], *, skip_special_tokens: bool) -> str: ...

    def apply_chat_template(
        self, messages: Sequence[object], *, add_generation_prompt: bool, tokenize: bool, tools: Any = None
    ) -> str: ...


class Chat:
    """Renders for one tokenizer. stop_token_ids: what ends a turn of the model."""

    def __init__(self, tokenizer: Tokenizer, stop_token_ids: Sequence[int]) -> None:
        self._tokenizer = tokenizer
        self._stops = frozenset(stop_token_ids)
        bos = getattr(tokenizer, "bos_token_id", None)
        adds_bos = bos is not None and tokenizer.encode("x", add_special_tokens=True)[:1] == [bos]
        self._bos: int | None = bos if adds_bos else None
        self._read_calls: Callable[[str], tuple[ToolCall, ...]] | None = None

    def opening_ids(self, prompt: Said, tools: Tools = ()) -> list[int]:
        """Ids of the first prompt, with exactly one beginning-of-text token if the model has one. Raises: DataError."""
        if isinstance(prompt, str):
            return self._with_one_bos(self._tokenizer.encode(prompt, add_special_tokens=True))
        text = self._render(prompt, tools, add_generation_prompt=True)
        return self._with_one_bos(self._tokenizer.encode(text, add_special_tokens=False))

    def reply_ids(self, said: Said, *, last_id: int, tools: Tools = ()) -> list[int]:
        """Ids that follow a sampled turn whose last id is `last_id`, up to where the model speaks again. Raises: DataError."""
        if isinstance(said, str):
            return self._tokenizer.encode(said, add_special_tokens=False)
        before: tuple[ChatMessage, ...] = ({"role": "user", "content": "."}, {"role": "assistant", "content": _SENTINEL})
        text = self._render((*before, *said), tools, add_generation_prompt=True)
        _, found, behind = text.rpartition(_SENTINEL)
        if not found:
            raise DataError(
                "the tokenizer's chat template does not show what the assistant said: later turns cannot be rendered"
            )
        ids = self._tokenizer.encode(behind, add_special_tokens=False)
        closed = last_id in self._stops and ids[:1] and ids[0] in self._stops
        return ids[1:] if closed else ids

    def tool_calls(self, raw: str) -> tuple[ToolCall, ...]:
        """The calls in a turn, special tokens included, in the format that the template itself writes. Raises: DataError."""
        if self._read_calls is None:
            self._read_calls = self._find_format()
        return self._read_calls(raw)

    def _find_format(self) -> Callable[[str], tuple[ToolCall, ...]]:
        """The first format that reads what the template writes for a call."""
        call = {"name": _PROBE, "arguments": {"x": 1}}
        asked: list[ChatMessage] = [{"role": "user", "content": "."}]
        answered: ChatMessage = {"role": "assistant", "content": "", "tool_calls": [{"type": "function", "function": call}]}  # type: ignore[dict-item]  # JSON is invariant
        text = self._render((*asked, answered), (), add_generation_prompt=False)
        for read in FORMATS.values():
            if any(found.name == _PROBE and dict(found.arguments) == {"x": 1} for found in read(text)):
                return read
        raise DataError(
            f"the tokenizer's chat template writes tool calls in no format that is known ({', '.join(FORMATS)}): "
            f"use a model whose template can call tools"
        )

    def _with_one_bos(self, ids: list[int]) -> list[int]:
        if self._bos is None:
            return ids
        body = 0
        while ids[body : body + 1] == [self._bos]:
            body += 1
        return [self._bos, *ids[body:]]

    def _render(self, messages: Sequence[ChatMessage], tools: Tools, *, add_generation_prompt: bool) -> str:
        offered = {"tools": [dict(tool) for tool in tools]} if tools else {}
        try:
            return self._tokenizer.apply_chat_template(
                list(messages), add_generation_prompt=add_generation_prompt, tokenize=False, **offered
            )
        except Exception as error:  # no template, or one that cannot render these messages: its own kinds of errors
            raise DataError(
                f"the tokenizer's chat template cannot render the prompt ({type(error).__name__}: "
                f"{' '.join(str(error).split())}); give text prompts, or a model with a template that can"
            ) from error


# -- formats of tool calls -------------------------------------------------------------------------------------------
def _tagged(raw: str) -> tuple[ToolCall, ...]:
    """`<tool_call>{"name": …, "arguments": …}</tool_call>` (Hermes, Qwen, SmolLM3)."""
    return tuple(_call(body) for body in re.findall(r"<tool_call>\s*(.*?)\s*(?:</tool_call>|$)", raw, re.DOTALL))


def _listed(raw: str) -> tuple[ToolCall, ...]:
    """`[TOOL_CALLS][{"name": …, "arguments": …}, …]` (Mistral)."""
    _, marker, rest = raw.partition("[TOOL_CALLS]")
    if not marker:
        return ()
    try:
        calls, _ = _JSON.raw_decode(rest.strip())
    except ValueError as error:
        return (ToolCall("", error=f"not JSON: {error}"),)
    return tuple(_from(call) for call in calls) if isinstance(calls, list) else (_from(calls),)


def _bare(raw: str) -> tuple[ToolCall, ...]:
    """A message that is JSON with a name and its parameters (Llama 3)."""
    match = re.search(r'(?:^|>|\n)\s*(\{\s*"(?:type"\s*:\s*"function"\s*,\s*")?name"\s*:.*)', raw, re.DOTALL)
    if match is None:
        return ()
    try:
        call, _ = _JSON.raw_decode(match[1])
    except ValueError as error:
        return (ToolCall("", error=f"not JSON: {error}"),)
    return (_from(call),)


FORMATS: Mapping[str, Callable[[str], tuple[ToolCall, ...]]] = {"tagged": _tagged, "listed": _listed, "bare": _bare}


def _call(body: str) -> ToolCall:
    try:
        return _from(json.loads(body))
    except (ValueError, RecursionError) as error:
        return ToolCall("", error=f"not JSON: {error}")


def _from(call: Any) -> ToolCall:
    call = call.get("function", call) if isinstance(call, Mapping) else call
    if not isinstance(call, Mapping) or not isinstance(call.get("name"), str):
        return ToolCall("", error="a call needs a name and arguments")
    arguments = call.get("arguments", call.get("parameters", {}))
    if isinstance(arguments, str):
        try:
            arguments = json.loads(arguments)
        except ValueError as error:
            return ToolCall(call["name"], error=f"the arguments are not JSON: {error}")
    if not isinstance(arguments, Mapping):
        return ToolCall(call["name"], error="the arguments are not an object")
    return ToolCall(call["name"], dict(arguments))
