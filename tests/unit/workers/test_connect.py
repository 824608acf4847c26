"""How a role process ends."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

from async_rl.errors import STALLED

HUNG = """
import asyncio, threading
from protocol.lease import LeaseKeeper, Work
from protocol.memory_streams import MemoryStreams
from workers.connect import run_until_stopped

def hang_here():
    threading.Event().wait()

async def worker():
    work = Work()
    work.begin("train, after micro-batch 2")
    keeper = LeaseKeeper(MemoryStreams(), "trainer-0", "trainer", lease_s=0.1, progress_s=0.1, works=[work])
    async with asyncio.TaskGroup() as tasks:
        tasks.create_task(keeper.run())
        await asyncio.to_thread(hang_here)

asyncio.run(run_until_stopped(worker(), lambda: None))
"""


def test_a_process_with_a_thread_that_hangs_ends_by_itself_and_says_where_it_stood() -> None:
    root = str(Path(__file__).parents[3])
    done = subprocess.run(
        [sys.executable, "-c", HUNG],
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
        env={**os.environ, "PYTHONPATH": root},
    )
    assert done.returncode == STALLED
    assert "in hang_here" in done.stderr
    assert "error: trainer-0 made no progress for" in done.stderr
    assert "in: train, after micro-batch 2; its lease is gone" in done.stderr
