"""A language model as judge, at any address that speaks OpenAI's chat completions: rate limit, retries, cache."""

from __future__ import annotations

import asyncio
import json
import os
import re
import time
from collections import OrderedDict
from collections.abc import Mapping
from hashlib import blake2b
from pathlib import Path
from typing import Any

from async_rl.environments.base import Episode
from async_rl.environments.verifiers.base import Score, row_of
from async_rl.errors import ConfigError
from protocol.messages import Reward

_DEFAULT = (
    "Judge the answer to a question. Reply with one line: Score: N, where N is a whole number from 0 (wrong) to 10 (right).\n\n"
    "Question:\n{prompt}\n\nAnswer:\n{completion}\n"
)
_RETRIED = frozenset({408, 409, 425, 429, 500, 502, 503, 504})
_LONGEST_WAIT_S = 60.0
UNREADABLE = "JudgeUnreadable"
UNAVAILABLE = "JudgeUnavailable"


class Judge:
    """The score that the judge gives, scaled from `low` … `high` to 0 … 1; invalid if it cannot be had or read, never 0.

    url: of the API (`https://host/v1`). template: the question, with {prompt}, {completion} and any column in braces. pattern:
    finds the number in the reply (its last match). key_env: name of the environment variable with the API key. per_second,
    max_concurrent: bounds on requests of one process. retries: on refused or broken connections and on the status codes
    that mean "later", waiting twice as long each time, or as long as the server asks. cache: replies kept in memory; equal
    questions are asked once. cache_file: JSON lines where they are kept for other processes and runs.
    """

    def __init__(
        self,
        *,
        url: str,
        model: str,
        template: str = _DEFAULT,
        pattern: str = r"[Ss]core:\s*(-?\d+(?:\.\d+)?)",
        low: float = 0.0,
        high: float = 10.0,
        key_env: str | None = None,
        temperature: float = 0.0,
        max_tokens: int = 256,
        per_second: float = 20.0,
        max_concurrent: int = 16,
        retries: int = 4,
        request_timeout_s: float = 30.0,
        backoff_s: float = 0.5,
        cache: int = 100_000,
        cache_file: str | None = None,
    ) -> None:
        if not url.startswith(("http://", "https://")):
            raise ConfigError(f"judge: url={url!r} is no http address")
        if high <= low or per_second <= 0 or max_concurrent < 1:
            raise ConfigError(
                f"judge: needs low < high, per_second > 0 and max_concurrent >= 1 ({low=}, {high=}, {per_second=})"
            )
        self._url, self._model, self._template = url.rstrip("/"), model, template
        self._pattern, self._low, self._high = re.compile(pattern), low, high
        self._key_env, self._temperature, self._max_tokens = key_env, temperature, max_tokens
        self._retries, self._timeout_s, self._backoff_s = retries, request_timeout_s, backoff_s
        self._slots = asyncio.Semaphore(max_concurrent)
        self._pace = _Pace(per_second)
        self._cache = _Cache(cache, cache_file)
        self._asked: dict[str, asyncio.Future[str]] = {}
        self._client: Any = None

    async def verify(self, episode: Episode) -> Score:
        try:
            reply = await self._reply(self._question(episode))
        except _Unavailable as error:
            return Reward.invalid(str(error), UNAVAILABLE)
        found = self._pattern.findall(reply)
        if not found:
            return Reward.invalid(f"the judge's reply has no score in it: {reply[-200:]!r}", UNREADABLE)
        score = (float(found[-1]) - self._low) / (self._high - self._low)
        if not 0.0 <= score <= 1.0:
            return Reward.invalid(f"the judge's score {found[-1]} is outside {self._low:g} … {self._high:g}", UNREADABLE)
        return score

    async def close(self) -> None:
        if self._client is not None:
            await self._client.aclose()

    def _question(self, episode: Episode) -> str:
        row = {name: value if isinstance(value, str) else json.dumps(value) for name, value in row_of(episode).items()}
        fields = {**row, "completion": episode.completion}
        return re.sub(r"\{(\w+)\}", lambda match: fields.get(match[1], match[0]), self._template)

    async def _reply(self, question: str) -> str:
        """From the cache, from a request that asks the same now, or from the judge."""
        key = blake2b(json.dumps([self._url, self._model, self._temperature, question]).encode(), digest_size=16).hexdigest()
        known = self._cache.get(key)
        if known is not None:
            return known
        if key in self._asked:
            return await asyncio.shield(self._asked[key])
        asked: asyncio.Future[str] = asyncio.get_running_loop().create_future()
        self._asked[key] = asked
        try:
            reply = await self._ask(question)
        except BaseException as error:
            asked.set_exception(error if isinstance(error, _Unavailable) else _Unavailable("the request was given up"))
            asked.exception()  # somebody may wait for it, or nobody
            raise
        finally:
            del self._asked[key]
        asked.set_result(reply)
        self._cache.put(key, reply)
        return reply

    async def _ask(self, question: str) -> str:
        why, wait_s = "", self._backoff_s
        for attempt in range(self._retries + 1):
            if attempt:
                await asyncio.sleep(wait_s)
                wait_s = min(2 * wait_s, _LONGEST_WAIT_S)
            async with self._slots:
                await self._pace.turn()
                reply, why, asked_s = await self._once(question)
            if reply is not None:
                return reply
            wait_s = max(wait_s, asked_s)
        raise _Unavailable(f"no reply from the judge in {self._retries + 1} tries: {why}")

    async def _once(self, question: str) -> tuple[str | None, str, float]:
        """(reply, why there is none, seconds the server asks to wait). Raises: _Unavailable if another try cannot help."""
        import httpx

        if self._client is None:
            self._client = httpx.AsyncClient(timeout=self._timeout_s)
        headers = {} if self._key_env is None else {"Authorization": f"Bearer {self._key()}"}
        body: Mapping[str, Any] = {
            "model": self._model,
            "messages": [{"role": "user", "content": question}],
            "temperature": self._temperature,
            "max_tokens": self._max_tokens,
        }
        try:
            response = await self._client.post(f"{self._url}/chat/completions", json=body, headers=headers)
        except httpx.HTTPError as error:
            return None, f"{type(error).__name__} {error}".strip(), 0.0
        if response.status_code in _RETRIED:
            return None, f"status {response.status_code}", _seconds(response.headers.get("retry-after"))
        if response.status_code != 200:
            raise _Unavailable(f"the judge refuses: status {response.status_code} {response.text[:200]!r}")
        try:
            return str(response.json()["choices"][0]["message"]["content"] or ""), "", 0.0
        except (ValueError, LookupError, TypeError) as error:
            return None, f"not a chat completion ({type(error).__name__})", 0.0

    def _key(self) -> str:
        key = os.environ.get(self._key_env or "")
        if not key:
            raise _Unavailable(f"the environment variable {self._key_env} with the judge's key is not set")
        return key


class _Unavailable(Exception):
    """The judge gave no reply."""


class _Pace:
    """Turns at most `per_second` times a second, evenly."""

    def __init__(self, per_second: float) -> None:
        self._gap_s = 1.0 / per_second
        self._next = 0.0

    async def turn(self) -> None:
        now = time.monotonic()
        self._next = max(self._next, now) + self._gap_s
        await asyncio.sleep(self._next - self._gap_s - now)


class _Cache:
    """The newest `size` replies, and all of a file that other processes append to."""

    def __init__(self, size: int, path: str | None) -> None:
        self._size, self._path = size, path
        self._replies: OrderedDict[str, str] = OrderedDict()
        if path is not None and Path(path).exists():
            with Path(path).open(encoding="utf-8") as lines:
                for line in lines:
                    self._load(line)

    def get(self, key: str) -> str | None:
        if key in self._replies:
            self._replies.move_to_end(key)
        return self._replies.get(key)

    def put(self, key: str, reply: str) -> None:
        self._keep(key, reply)
        if self._path is not None:
            line = json.dumps({"key": key, "reply": reply}) + "\n"
            descriptor = os.open(self._path, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o600)
            try:
                os.write(descriptor, line.encode())  # one write: lines of several processes do not mix
            finally:
                os.close(descriptor)

    def _load(self, line: str) -> None:
        try:
            fields = json.loads(line)
            self._keep(str(fields["key"]), str(fields["reply"]))
        except (ValueError, LookupError, TypeError):
            return  # the torn last line of a process that was killed

    def _keep(self, key: str, reply: str) -> None:
        self._replies[key] = reply
        self._replies.move_to_end(key)
        while len(self._replies) > self._size:
            self._replies.popitem(last=False)


def _seconds(text: str | None) -> float:
    try:
        return min(float(text or 0.0), _LONGEST_WAIT_S)
    except ValueError:
        return 0.0
