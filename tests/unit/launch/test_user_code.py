"""What the user brings is loaded in a process of its own: it may be missing, hang or crash, and costs one line."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest

from async_rl.config import RunConfig
from async_rl.errors import ConfigError
from async_rl.launch.user_code import require_user_code

MODULE = """
import datetime, os, sys, time

def score(completion, row):
    return 1.0

def three(completion, row, temperature):
    return 1.0

def loss(tokens, settings):
    return tokens

def advantage(groups):
    return groups

class Game:
    def __init__(self, when=None):
        assert when is None or when == datetime.date(2026, 12, 1), when

    async def observe(self, episode):
        return None

    async def score(self, episode):
        return 1.0
"""


def children() -> set[str]:
    """Process ids of what this process has started (none where /proc does not tell)."""
    path = Path(f"/proc/{os.getpid()}/task/{os.getpid()}/children")
    return set(path.read_text().split()) if path.exists() else set()


@pytest.fixture(autouse=True)
def _here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Modules are found in the working directory, as roles find them."""
    (tmp_path / "tried_rewards.py").write_text(MODULE)
    (tmp_path / "tried_hangs.py").write_text("import time\nprint('waits', flush=True)\ntime.sleep(600)\n")
    (tmp_path / "tried_dies.py").write_text("import os\nprint('no licence found', flush=True)\nos._exit(9)\n")
    (tmp_path / "tried_kills.py").write_text("import os, signal\nos.kill(os.getpid(), signal.SIGSEGV)\n")
    (tmp_path / "tried_script.py").write_text("import sys\nsys.exit('usage: tried_script FILE')\n")
    monkeypatch.chdir(tmp_path)


def config(*, start_timeout_s: float = 60.0, algorithm: dict[str, Any] | None = None, **environment: Any) -> RunConfig:
    return RunConfig.model_validate(
        {
            "model": {"path": "/m"},
            "environment": environment,
            "algorithm": algorithm or {},
            "launch": {"start_timeout_s": start_timeout_s},
        }
    )


@pytest.mark.parametrize(
    "environment",
    [
        {"name": "sort_digits", "args": {"length": 4}},
        {"name": "prompt_reward", "reward": "tried_rewards:score"},
        {"name": "tried_rewards:Game"},
    ],
    ids=["built in", "reward", "class"],
)
def test_what_can_be_loaded_passes(environment: dict[str, Any]) -> None:
    require_user_code(config(**environment))


def test_arguments_arrive_as_the_file_has_them(tmp_path: Path) -> None:
    path = tmp_path / "c.toml"
    path.write_text('[model]\npath = "m"\n[environment]\nname = "tried_rewards:Game"\nargs = { when = 2026-12-01 }\n')
    from async_rl.config import load_config

    require_user_code(load_config(path, env={}).config)


@pytest.mark.parametrize(
    ("reward", "parts"),
    [
        ("absent_module:score", ["environment.reward='absent_module:score'", "no module 'absent_module'", "PYTHONPATH"]),
        ("tried_rewards:scor", ["has no 'scor'", "did you mean 'score'?"]),
        ("tried_rewards:three", ["called as three(completion, row)", "(completion, row, temperature)", "'temperature'"]),
        ("tried_script:main", ["importing tried_script raised SystemExit", "usage: tried_script FILE"]),
        ("tried_dies:score", ["'tried_dies:score'", "ended its process with exit code 9", "no licence found"]),
        ("tried_kills:score", ["ended its process by SIGSEGV"]),
    ],
)
def test_what_cannot_be_loaded_is_one_line(reward: str, parts: list[str]) -> None:
    with pytest.raises(ConfigError) as error:
        require_user_code(config(name="prompt_reward", reward=reward))
    assert "\n" not in str(error.value)
    for part in parts:
        assert part in str(error.value)


def test_what_hangs_is_said_then_refused_and_killed(tmp_path: Path) -> None:
    said: list[str] = []
    before = children()
    hanging = config(name="prompt_reward", reward="tried_hangs:score", start_timeout_s=1.0)
    with pytest.raises(ConfigError, match=r"'tried_hangs:score' did not load within launch\.start_timeout_s=1 s"):
        require_user_code(hanging, say=said.append, quiet_s=0.2)
    assert len(said) == 1
    assert "launch.start_timeout_s=1 s" in said[0]
    assert children() <= before


@pytest.mark.parametrize(
    ("algorithm", "part"),
    [
        ({"loss": "tried_rewards:los"}, "did you mean 'loss'?"),
        ({"advantage": "tried_rewards:advantage"}, "algorithm.advantage='tried_rewards:advantage' is called as"),
    ],
)
def test_functions_of_the_objective_are_tried_too(algorithm: dict[str, Any], part: str) -> None:
    require_user_code(config(algorithm={"loss": "tried_rewards:loss"}))
    with pytest.raises(ConfigError) as error:
        require_user_code(config(algorithm=algorithm))
    assert part in str(error.value)
