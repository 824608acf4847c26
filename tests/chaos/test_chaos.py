"""The demo under random kills. `make test-chaos`; fewer kills: `make test-chaos ARGS=--smoke`."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

CHAOS = Path(__file__).with_name("chaos.py")


@pytest.mark.chaos
@pytest.mark.timeout(5400)
def test_the_demo_survives_random_kills(request: pytest.FixtureRequest, capfd: pytest.CaptureFixture[str]) -> None:
    smoke = ["--smoke"] if request.config.getoption("--smoke") else []
    with capfd.disabled():  # every kill, and the table of recovery times, are for whoever looks on
        result = subprocess.run([sys.executable, str(CHAOS), *smoke], check=False)
    assert result.returncode == 0, "see its PROBLEM lines above, and runs/chaos/summary.json"
