"""Code against tests, in a sandbox. The right answers never enter the process that holds the solution."""

from __future__ import annotations

import asyncio
import os
import re
from collections.abc import Awaitable, Mapping, Sequence
from typing import Any, Literal, TypeVar

from async_rl.environments.base import Episode
from async_rl.environments.verifiers.base import Score, gold_of
from async_rl.environments.verifiers.sandbox import Interpreter, Limits, Misbehaved, Sandbox
from async_rl.errors import ConfigError, DataError
from protocol.messages import Reward

T = TypeVar("T")
_FENCE = re.compile(r"```(?:python|py|python3)?[ \t]*\n(.*?)```", re.DOTALL)
_MEBIBYTE = 2**20


class CodeTests:
    """The share of tests that the completion's code passes, or 1 only if it passes all of them (`score = "all"`).

    tests: column with a list of `{input, output}` (a script: what it reads and must print) or `{call, args, expected}` (a
    function and what it must return), or a text of Python asserts that call the solution's functions (with `check(candidate)`,
    candidate is the function named in column `entry_point`). They run in another process than the solution.
    timeout_s: of one script, of one call, of the asserts as a whole. memory_mb, max_processes: of one sandbox.
    Code that hangs, uses too much or ends its process fails its tests; only a sandbox that does not work is invalid.
    """

    def __init__(
        self,
        *,
        tests: str = "tests",
        entry_point: str = "entry_point",
        score: Literal["all", "share"] = "all",
        fenced: bool = True,
        timeout_s: float = 5.0,
        memory_mb: int = 512,
        max_processes: int = 32,
        concurrent: int | None = None,
        python: str | None = None,
    ) -> None:
        if score not in ("all", "share"):
            raise ConfigError(f"score={score!r}: code knows 'all' and 'share'")
        self._tests, self._entry_point, self._score, self._fenced = tests, entry_point, score, fenced
        self._timeout_s = timeout_s
        limits = Limits(memory_mb * _MEBIBYTE, max_processes)
        self._sandbox = Sandbox(limits, concurrent=2 * (concurrent or os.cpu_count() or 1), python=python)

    async def verify(self, episode: Episode) -> Score:
        tests = gold_of(episode, self._tests)
        entry_point = str(episode.task.columns.get(self._entry_point) or "")
        code = self._code(episode.completion)
        if code is None:
            return Reward(0.0, {"no_code": 1.0})
        passed, verdicts = await self.run(code, tests, entry_point)
        share = sum(passed) / len(passed)
        value = share if self._score == "share" else float(all(passed))
        return Reward(value, {"passed": share, **dict.fromkeys(verdicts, 1.0)})

    async def run(self, code: str, tests: Any, entry_point: str = "") -> tuple[list[bool], list[str]]:
        """Which tests pass, and the verdicts on what misbehaved. Raises: DataError, ConfigError, SandboxError."""
        if isinstance(tests, str):
            return await self._asserts(code, tests, entry_point)
        if not isinstance(tests, list) or not tests or not all(isinstance(test, Mapping) for test in tests):
            raise DataError(f"column {self._tests!r} must hold a list of tests, or their text; it holds {tests!r:.100}")
        if all("output" in test for test in tests):
            return await self._programs(code, tests)
        if all("call" in test and "expected" in test for test in tests):
            return await self._calls(code, tests)
        raise DataError(f"column {self._tests!r}: each test needs input and output, or call, args and expected")

    async def _programs(self, code: str, tests: Sequence[Mapping[str, Any]]) -> tuple[list[bool], list[str]]:
        passed, verdicts = [], list[str]()
        for test in tests:
            try:
                output = await self._program(code, str(test.get("input") or ""))
                passed.append(_lines(output) == _lines(str(test["output"])))
            except Misbehaved as error:
                passed.append(False)
                verdicts.append(error.verdict)
        return passed, verdicts

    async def _program(self, code: str, text: str) -> str:
        async with self._sandbox.interpreter("program", {"code": code, "input": text}) as interpreter:
            return await _within(self._timeout_s, interpreter.output())

    async def _calls(self, code: str, tests: Sequence[Mapping[str, Any]]) -> tuple[list[bool], list[str]]:
        passed, verdicts = [], list[str]()
        rest = list(tests)
        while rest:  # a call that ends or hangs its process costs itself alone: the next ones get another process
            try:
                async with self._sandbox.interpreter("serve", {"code": code}) as interpreter:
                    await _defined(_within(self._timeout_s, interpreter.read()))
                    while rest:
                        test = rest[0]
                        await interpreter.send({"call": test["call"], "args": _tagged(test.get("args") or [])})
                        answer = await _within(self._timeout_s, interpreter.read())
                        rest.pop(0)
                        passed.append("value" in answer and _same(answer["value"], test["expected"]))
                        verdicts += ["memory"] if answer.get("memory") else []
            except _Undefined as error:
                return passed + [False] * len(rest), [*verdicts, error.verdict]
            except Misbehaved as error:
                rest.pop(0)
                passed.append(False)
                verdicts.append(error.verdict)
        return passed, verdicts

    async def _asserts(self, code: str, tests: str, entry_point: str) -> tuple[list[bool], list[str]]:
        try:
            async with self._sandbox.interpreter("serve", {"code": code}) as solution:
                functions = await _defined(_within(self._timeout_s, solution.read()))
                order = {"code": tests, "functions": functions, "entry_point": entry_point}
                async with self._sandbox.interpreter("test", order) as tester:
                    return [await _within(self._timeout_s, _relay(tester, solution))], []
        except Misbehaved as error:
            return [False], [error.verdict]

    def _code(self, completion: str) -> str | None:
        blocks = _FENCE.findall(completion)
        if blocks:
            return str(blocks[-1])
        return None if self._fenced else completion


class _Undefined(Misbehaved):
    """The code does not even define its functions."""


async def _defined(reading: Awaitable[dict[str, Any]]) -> list[str]:
    """Names of the functions that the solution defines. Raises: _Undefined."""
    try:
        frame = await reading
    except Misbehaved as error:
        raise _Undefined(error.verdict, str(error)) from None
    names = frame.get("defined")
    if not isinstance(names, list) or not all(isinstance(name, str) and name.isidentifier() for name in names):
        raise _Undefined("memory" if frame.get("memory") else "error", str(frame.get("failed", "it defines nothing")))
    return names


async def _relay(tester: Interpreter, solution: Interpreter) -> bool:
    """Carry calls from the tests to the solution and answers back, until the tests say how they ended."""
    while True:
        frame = await tester.read()
        if "finished" in frame:
            return frame["finished"] is True
        await solution.send({key: frame[key] for key in ("call", "args", "kwargs")})
        answer = await solution.read()
        known = {"value": answer["value"]} if "value" in answer else {"error": str(answer.get("error", "no answer"))[:500]}
        await tester.send(known)


async def _within(timeout_s: float, work: Awaitable[T]) -> T:
    try:
        async with asyncio.timeout(timeout_s):
            return await work
    except TimeoutError:
        raise Misbehaved("timeout", f"not done within {timeout_s:g} s") from None


def _lines(text: str) -> list[str]:
    """Without white space at the ends of lines and of the text."""
    return [line.rstrip() for line in text.rstrip().splitlines()]


def _tagged(value: Any) -> Any:
    """Plain JSON in the guest's tags (objects are tagged there)."""
    if isinstance(value, dict):
        return {"t": "dict", "v": [[key, _tagged(item)] for key, item in value.items()]}
    return [_tagged(item) for item in value] if isinstance(value, list) else value


def _same(answer: Any, expected: Any) -> bool:
    """A tagged answer against plain JSON: tuples are lists, a set is a list in any order; true is not 1, floats to 1e-9."""
    if isinstance(answer, dict):
        tag, inner = answer.get("t"), answer.get("v")
        if tag == "int" and isinstance(expected, int) and isinstance(inner, str):
            return hex(expected) == inner
        if tag == "tuple":
            return _same(inner, expected)
        if tag in ("set", "frozenset") and isinstance(inner, list) and isinstance(expected, list):
            return len(inner) == len(expected) and all(any(_same(item, other) for other in expected) for item in inner)
        if tag != "dict" or not isinstance(expected, dict) or not isinstance(inner, list) or len(inner) != len(expected):
            return False
        pairs = [pair for pair in inner if isinstance(pair, list) and len(pair) == 2]
        keyed = {str(key): value for key, value in pairs if isinstance(key, str | int)}
        return keyed.keys() == expected.keys() and all(_same(keyed[key], expected[key]) for key in expected)
    if isinstance(answer, list) and isinstance(expected, list):
        return len(answer) == len(expected) and all(map(_same, answer, expected))
    if isinstance(answer, bool) or isinstance(expected, bool) or not isinstance(answer, int | float):
        return answer is expected or (isinstance(answer, str) and answer == expected)
    is_number = isinstance(expected, int | float)
    return is_number and (answer == expected or abs(answer - expected) <= 1e-9 * max(abs(answer), abs(expected)))
