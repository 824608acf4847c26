"""A short round of tests/chaos/fuzz.py: bad frames at the decoder and through a real stream. The long one: `make test-fuzz`."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

SCRIPT = Path(__file__).parents[1] / "chaos" / "fuzz.py"


def test_bad_frames_are_refused_and_dead_lettered_while_good_ones_pass(tmp_path: Path) -> None:
    command = [
        sys.executable,
        "-W",
        "error",
        str(SCRIPT),
        "--seconds",
        "3",
        "--entries",
        "300",
        "--seed",
        "1",
        "--out",
        str(tmp_path),
    ]
    done = subprocess.run(command, check=False, capture_output=True, text=True, timeout=100)
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-3000:]
    summary = json.loads((tmp_path / "summary.json").read_text())
    decoder, stream = summary["decoder"], summary["stream"]
    assert decoder["frames"] >= 2000
    assert decoder["refused"] > 10 * decoder["accepted"] > 0
    assert decoder["kinds_of_refusal"] > 20
    assert min(stream["good_in_log"], stream["bad_in_dead"]) > 100
    assert stream["good_in_log"] + stream["bad_in_dead"] == stream["entries"] == 300
