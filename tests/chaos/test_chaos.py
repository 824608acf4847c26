"""The demo under random kills. `make test-chaos`; fewer kills: `make test-chaos ARGS=--smoke`."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

CHAOS = Path(__file__).with_name("chaos.py")


@pytest.mark.chaos
@pytest.mark.timeout(5400)
def test_the_demo_survives_random_kills(request: pytest.FixtureRequest) -> None:
    smoke = ["--smoke"] if request.config.getoption("--smoke") else []
    result = subprocess.run([sys.executable, str(CHAOS), *smoke], text=True, capture_output=True, check=False)
    print(result.stdout, result.stderr)
    assert result.returncode == 0, result.stdout[-4000:]
