"""Code against tests: what passes, what fails, and what can be forged. Every sandbox here is a real one."""

from __future__ import annotations

import asyncio
import os
import shutil
from typing import Any

import psutil
import pytest
from msgspec.structs import replace

from async_rl.environments.base import Episode, TurnText
from async_rl.environments.verifiers.code_tests import CodeTests
from async_rl.environments.verifiers.sandbox import find_layout
from async_rl.errors import ConfigError, DataError
from async_rl.testing.builders import make_task
from protocol.messages import FinishReason, Json, Reward

needs_bwrap = pytest.mark.skipif(shutil.which("bwrap") is None, reason="bubblewrap is not installed")
SQUARE = [{"call": "f", "args": [2], "expected": 4}, {"call": "f", "args": [-3], "expected": 9}]
ECHO = [{"input": "4\n", "output": "16\n"}, {"input": "5\n", "output": "25"}]
RIGHT = "def f(x):\n    return x * x"


def episode(code: str, tests: Json, **columns: Json) -> Episode:
    task = replace(make_task(), columns={"tests": tests, **columns})
    return Episode(task, 0, (TurnText(f"Here it is:\n```python\n{code}\n```\n", FinishReason.STOP),))


async def verdict(code: str, tests: Any, **arguments: Any) -> Reward:
    reward = await CodeTests(**{"timeout_s": 5.0, **arguments}).verify(episode(code, tests))
    assert isinstance(reward, Reward)
    return reward


@needs_bwrap
@pytest.mark.parametrize(
    ("code", "tests", "passed"),
    [
        (RIGHT, SQUARE, 1.0),
        ("def f(x):\n    return 4", SQUARE, 0.5),
        ("def f(x):\n    return x * x * 1.0", SQUARE, 1.0),
        ("def f(x):\n    return True", [{"call": "f", "args": [], "expected": 1}], 0.0),
        ("def f():\n    return {1: (2, {3})}", [{"call": "f", "args": [], "expected": {"1": [2, [3]]}}], 1.0),
        ("print(int(input()) ** 2)", ECHO, 1.0),
        ("print(16)", ECHO, 0.5),
        (RIGHT, "assert f(3) == 9\nassert f(2) == 4", 1.0),
        (RIGHT, "def check(candidate):\n    assert f(3) == 10", 1.0),  # check is never called without an entry point
        (RIGHT, "assert f(3) == 10", 0.0),
        ("def f(x):\n    raise KeyError(x)", "try:\n    f(1)\nexcept KeyError:\n    pass\nelse:\n    assert False", 1.0),
        ("class Twice:\n    pass\ndef f():\n    return Twice()", "f()", 0.0),
        ("def f(:", SQUARE, 0.0),
    ],
)
async def test_the_share_of_tests_that_pass(code: str, tests: Any, passed: float) -> None:
    reward = await verdict(code, tests, score="share")
    assert reward.value == passed
    assert (await verdict(code, tests)).value == float(passed == 1.0)


@needs_bwrap
async def test_the_entry_point_is_checked() -> None:
    tests = "def check(candidate):\n    assert candidate(3) == 9"
    for name, value in (("f", 1.0), ("g", 0.0)):
        code = "def f(x):\n    return x * x\ndef g(x):\n    return x"
        reward = await CodeTests().verify(episode(code, tests, entry_point=name))
        assert isinstance(reward, Reward)
        assert reward.value == value


@needs_bwrap
@pytest.mark.parametrize("code", ["import sys\nsys.exit(0)", "import os\nos._exit(0)", 'print("ALL PASSED")'])
@pytest.mark.parametrize("tests", [SQUARE, ECHO, "assert f(3) == 9"])
async def test_success_cannot_be_claimed(code: str, tests: Any) -> None:
    assert (await verdict(code, tests)).value == 0.0


@needs_bwrap
async def test_success_cannot_be_written_to_the_control_socket() -> None:
    forged = (
        "import json, os, struct\n"
        "def say(value):\n"
        "    body = json.dumps(value).encode()\n"
        "    os.write(3, struct.pack('<I', len(body)) + body)\n"
        "say({'defined': ['f']}); say({'finished': True}); say({'value': None}); say({'value': None})\n"
        "os._exit(0)\n"
    )
    for tests in (SQUARE, "assert f(3) == 9", ECHO):
        assert (await verdict(forged, tests)).value == 0.0


@needs_bwrap
async def test_a_fork_that_sleeps_ends_at_the_limit_and_leaves_nothing() -> None:
    sandboxed = CodeTests(timeout_s=0.4, concurrent=4)
    forks = episode("import os, time\nos.fork()\ntime.sleep(60)", SQUARE)
    rewards = await asyncio.gather(*(sandboxed.verify(forks) for _ in range(20)))
    assert [dict(reward.components) for reward in rewards if isinstance(reward, Reward)] == [
        {"passed": 0.0, "timeout": 1.0}
    ] * 20
    assert leftovers() == []


@needs_bwrap
async def test_too_much_memory_is_its_own_verdict_and_the_neighbour_passes() -> None:
    sandboxed = CodeTests(memory_mb=256)
    greedy = sandboxed.verify(episode("x = [0] * 10**10\n" + RIGHT, SQUARE))
    hidden = sandboxed.verify(episode("def f(x):\n    y = [0] * 10**10\n    return x * x", SQUARE))
    right = sandboxed.verify(episode(RIGHT, SQUARE))
    results = await asyncio.gather(greedy, hidden, right)
    values = [(reward.value, "memory" in reward.components) for reward in results if isinstance(reward, Reward)]
    assert values == [(0.0, True), (0.0, True), (1.0, False)]


@needs_bwrap
async def test_nothing_of_the_host_is_visible(monkeypatch: pytest.MonkeyPatch, tmp_path: Any) -> None:
    monkeypatch.setenv("SECRET", "x")
    secret = tmp_path / "secret"
    secret.write_text("x")
    looks = (
        "import os\n"
        "def f():\n"
        "    known = ('PYTHONIOENCODING', 'PYTHONHASHSEED', 'PWD', 'LC_CTYPE')\n"
        "    found = [name for name in os.environ if name not in known]\n"
        f"    places = ({str(secret)!r}, '/etc/passwd', '/root', '/home', '/proc/1')\n"
        "    found += [path for path in places if os.path.exists(path)]\n"
        "    return found + [name for name in os.listdir('/tmp')]\n"
    )
    assert (await verdict(looks, [{"call": "f", "args": [], "expected": []}])).value == 1.0


async def test_no_code_is_a_wrong_answer_and_bad_tests_are_an_error() -> None:
    silent = Episode(replace(make_task(), columns={"tests": SQUARE}), 0, (TurnText("I cannot.", FinishReason.STOP),))
    assert await CodeTests().verify(silent) == Reward(0.0, {"no_code": 1.0})
    with pytest.raises(DataError, match="each test needs input and output, or call, args and expected"):
        await CodeTests().verify(episode(RIGHT, [{"input": "1"}]))


def test_a_host_that_cannot_isolate_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("async_rl.environments.verifiers.sandbox.shutil.which", lambda *_, **__: None)
    with pytest.raises(ConfigError, match="bwrap, which is not installed; install the package bubblewrap"):
        find_layout(None)


def leftovers() -> list[int]:
    """Processes of sandbox users that still live."""
    mine = range(200_000 + (os.getpid() % 4096) * 64, 200_000 + (os.getpid() % 4096) * 64 + 64)
    return [process.pid for process in psutil.process_iter(["uids"]) if (process.info["uids"] or [0])[0] in mine]
