"""The demo over a network that loses, delays and cuts. The figures are in runs/network/summary.json."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = Path(__file__).parent / "network.py"


@pytest.mark.chaos
@pytest.mark.timeout(2600)
def test_a_run_over_a_bad_network_loses_nothing_and_learns_all_the_same(
    request: pytest.FixtureRequest, capfd: pytest.CaptureFixture[str]
) -> None:
    smoke = ["--smoke"] if request.config.getoption("--smoke") else []
    with capfd.disabled():  # the figures are for whoever looks on
        done = subprocess.run([sys.executable, str(SCRIPT), *smoke], check=False)
    assert done.returncode == 0, "see its PROBLEM lines above, and runs/network/summary.json"
