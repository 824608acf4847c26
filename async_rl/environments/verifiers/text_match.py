"""Matches of text: exact, by regular expression, as JSON."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from typing import Any, Literal

from async_rl.environments.base import Episode
from async_rl.environments.verifiers.answers import find_answer
from async_rl.environments.verifiers.base import Score, gold_of
from async_rl.environments.verifiers.checks import CheckPool
from async_rl.errors import ConfigError
from protocol.messages import Json

_FENCE = re.compile(r"```(?:json|JSON)?\s*\n(.*?)```", re.DOTALL)


class ExactMatch:
    r"""1 if the completion is the gold answer (or one of them, if the column holds a list), else 0.

    find: compare all of the completion, or what `\boxed{…}` or a "Final answer:" gives. White space around is no difference.
    """

    def __init__(
        self, *, gold: str = "answer", ignore_case: bool = False, find: Literal["all", "boxed", "answer"] = "all"
    ) -> None:
        if find not in ("all", "boxed", "answer"):
            raise ConfigError(f"find={find!r}: exact knows 'all', 'boxed' and 'answer'")
        self._gold, self._ignore_case, self._find = gold, ignore_case, find

    async def verify(self, episode: Episode) -> Score:
        gold = gold_of(episode, self._gold)
        text = episode.completion if self._find == "all" else find_answer(episode.completion, strict=self._find == "boxed")
        if text is None:
            return 0.0
        return float(any(self._same(text, str(one)) for one in (gold if isinstance(gold, list) else [gold])))

    def _same(self, text: str, gold: str) -> bool:
        text, gold = text.strip(), gold.strip()
        return text.casefold() == gold.casefold() if self._ignore_case else text == gold


class RegexMatch:
    """1 if `pattern` (or the one in column `column`) matches the completion, else 0. "." matches newlines too.

    whole: the pattern must match all of it. Some patterns take forever on some texts: invalid after `timeout_s`.
    """

    def __init__(
        self,
        *,
        pattern: str | None = None,
        column: str | None = None,
        whole: bool = False,
        ignore_case: bool = False,
        timeout_s: float = 2.0,
        processes: int = 1,
    ) -> None:
        if (pattern is None) == (column is None):
            raise ConfigError("regex needs either pattern or column")
        try:
            re.compile(pattern or "")
        except re.error as error:
            raise ConfigError(f"pattern={pattern!r} is no regular expression: {error}") from error
        self._pattern, self._column, self._whole, self._ignore_case = pattern, column, whole, ignore_case
        self._pool = CheckPool("regex", processes=processes, timeout_s=timeout_s)

    async def verify(self, episode: Episode) -> Score:
        pattern = self._pattern if self._column is None else str(gold_of(episode, self._column))
        fields: dict[str, Json] = {"pattern": pattern, "text": episode.completion}
        return await self._pool.check({**fields, "whole": self._whole, "ignore_case": self._ignore_case})

    async def close(self) -> None:
        await self._pool.close()


class JsonMatch:
    """1 if the completion is JSON that fits a schema (Draft 2020-12) and equals the gold value, else 0.

    schema, schema_column: the schema, or the column with it. gold: column with the right value, as JSON or as its text; unset:
    any value that fits. fenced: what a ```json block holds counts, if there is one. Duplicate keys and NaN are no JSON.
    """

    def __init__(
        self,
        *,
        schema: Mapping[str, Any] | None = None,
        schema_column: str | None = None,
        gold: str | None = None,
        fenced: bool = False,
        timeout_s: float = 2.0,
        processes: int = 1,
    ) -> None:
        if schema is not None and schema_column is not None:
            raise ConfigError("json takes schema or schema_column, not both")
        self._schema, self._schema_column, self._gold, self._fenced = schema, schema_column, gold, fenced
        self._pool = CheckPool("json", processes=processes, timeout_s=timeout_s)

    async def verify(self, episode: Episode) -> Score:
        blocks = _FENCE.findall(episode.completion) if self._fenced else []
        fields: dict[str, Json] = {"text": blocks[-1] if blocks else episode.completion.strip()}
        if self._schema is not None:
            fields["schema"] = dict(self._schema)
        if self._schema_column is not None:
            fields["schema"] = _as_json(gold_of(episode, self._schema_column))
        if self._gold is not None:
            fields["gold"] = _as_json(gold_of(episode, self._gold))
        return await self._pool.check(fields)

    async def close(self) -> None:
        await self._pool.close()


def _as_json(value: Json) -> Json:
    """Arrow files often hold objects as their text. Raises: ValueError if text is no JSON."""
    return json.loads(value) if isinstance(value, str) else value
