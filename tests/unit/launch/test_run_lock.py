"""One supervisor per run directory."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from async_rl.errors import RunDirError
from async_rl.launch.run_lock import lock_holder, run_lock


def test_a_second_supervisor_is_refused_with_the_first_ones_process(tmp_path: Path) -> None:
    run_dir = tmp_path / "run"
    with run_lock(run_dir):
        assert lock_holder(run_dir) == os.getpid()
        with pytest.raises(RunDirError, match=f"in use by process {os.getpid()}"), run_lock(run_dir):
            pass
    assert lock_holder(run_dir) is None


def test_the_lock_is_free_after_its_holder_was_killed(tmp_path: Path) -> None:
    run_dir = tmp_path / "run"
    script = (
        "import sys, time; from pathlib import Path; from async_rl.launch.run_lock import run_lock\n"
        f"with run_lock(Path({str(run_dir)!r})):\n    print('held', flush=True); time.sleep(600)"
    )
    with subprocess.Popen([sys.executable, "-c", script], stdout=subprocess.PIPE, text=True) as holder:
        assert holder.stdout is not None
        assert holder.stdout.readline() == "held\n"
        assert lock_holder(run_dir) == holder.pid
        holder.kill()
    assert lock_holder(run_dir) is None
    with run_lock(run_dir):
        pass


def test_two_directories_do_not_know_each_other(tmp_path: Path) -> None:
    with run_lock(tmp_path / "a"), run_lock(tmp_path / "b"):
        pass


def test_a_directory_that_cannot_be_made_is_one_clear_error(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(RunDirError, match="cannot be made"), run_lock(tmp_path / "file" / "run"):
        pass
