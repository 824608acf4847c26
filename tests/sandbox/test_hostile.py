"""Hostile programs of every kind: none passes, none gets out, none outlives its sandbox. `make test-sandbox`."""

from __future__ import annotations

import asyncio
import os
import socket
from pathlib import Path

import psutil
import pytest

from async_rl.environments.verifiers.code_tests import CodeTests
from async_rl.environments.verifiers.sandbox import SandboxError
from async_rl.testing import hostile

SEED = 0
VARIANTS, SMOKE_VARIANTS = 60, 4
RIGHT = "def f(x):\n    return x * x"
CALLS = [{"call": "f", "args": [7], "expected": 49}]
ASSERTS = "assert f(7) == 49"
PROGRAM = [{"input": "7", "output": "49"}]


@pytest.mark.sandbox
@pytest.mark.parametrize("kind", hostile.KINDS)
async def test_no_hostile_program_passes_escapes_or_survives(
    kind: str, request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SECRET", "a secret of the worker")
    host = _host_directory(tmp_path)
    count = SMOKE_VARIANTS if request.config.getoption("--smoke") else VARIANTS
    programs = hostile.variants(kind, count, SEED, host)
    verifier = CodeTests(timeout_s=0.5, memory_mb=256, max_processes=24, concurrent=1)
    with socket.create_server(("127.0.0.1", 0)) as listener:
        listener.setblocking(False)
        for index, code in enumerate(programs):
            tests = (CALLS, ASSERTS, PROGRAM)[index % 3]
            passed, verdicts = await verifier.run(code, tests)
            assert not any(passed), f"passed: {code!r} with {tests!r} ({verdicts})"
        with pytest.raises(BlockingIOError):
            listener.accept()
    assert _written(host) == []
    assert _survivors() == []
    for _ in range(2):
        assert await verifier.run(RIGHT, CALLS) == ([True], [])


@pytest.mark.sandbox
async def test_a_neighbour_of_bombs_passes(request: pytest.FixtureRequest, tmp_path: Path) -> None:
    """Right code beside a fork bomb, a memory hog and a flood: it passes every time, or its sandbox says that it failed."""
    rounds = 2 if request.config.getoption("--smoke") else 15
    verifier = CodeTests(timeout_s=10.0, memory_mb=256, concurrent=2)
    rough = CodeTests(timeout_s=0.5, memory_mb=256, concurrent=1)
    for index in range(rounds):
        bombs = [hostile.variants(kind, 1, index, str(tmp_path))[0] for kind in ("fork bomb", "memory", "output")]
        results = await asyncio.gather(
            verifier.run(RIGHT, CALLS), *(rough.run(code, CALLS) for code in bombs), return_exceptions=True
        )
        assert not any(isinstance(result, BaseException) and not isinstance(result, SandboxError) for result in results)
        assert results[0] == ([True], [])
    assert _survivors() == []


def _host_directory(directory: Path) -> str:
    """A place that anybody could read and write, with a secret in it."""
    (directory / "secret").write_text("a secret of the host")
    directory.chmod(0o777)
    return str(directory)


def _written(host: str) -> list[str]:
    new = [str(path) for path in Path(host).iterdir() if path.name != "secret"]
    return [*new, *(path for path in ("/usr/lib/out", "/out") if Path(path).exists())]


def _survivors() -> list[str]:
    """Whatever runs under a uid of a sandbox, dead and unclaimed processes too."""
    first = 200_000 + (os.getpid() % 4096) * 64
    mine = range(first, first + 64)
    found = psutil.process_iter(["uids", "cmdline", "status"])
    return [str(process.info) for process in found if process.info["uids"] and process.info["uids"].real in mine]
