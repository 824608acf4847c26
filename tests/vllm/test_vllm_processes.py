"""Engine processes end with whoever started them, whatever dies; a run goes on when one of them does."""

from __future__ import annotations

import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import psutil
import pytest

from async_rl.testing.tiny_models import TinyModel, save_tiny_model

pytestmark = pytest.mark.vllm

START_S = 400.0
GONE_S = 30.0
SAMPLE = """
import asyncio, sys
from pathlib import Path
from async_rl.config.rollout import RolloutConfig, VllmConfig
from async_rl.rollout.engines import make_engine
from protocol.messages import SamplingParams

async def main():
    config = RolloutConfig(engine=sys.argv[2], vllm=VllmConfig(kv_cache_bytes=2**26))
    engine = make_engine(Path(sys.argv[1]), config, "engine-0")
    await engine.start()
    await engine.serve(0)
    print("serving", flush=True)
    while True:
        await engine.generate([3, 4, 5], [SamplingParams(1.0, 200, seed) for seed in range(4)])

if __name__ == "__main__":
    asyncio.run(main())
"""


class Engine:
    """A process that samples without end, and the processes of its engine."""

    def __init__(self, directory: Path, kind: str) -> None:
        path = save_tiny_model(directory / "model", TinyModel.LLAMA, head_dim=32)
        script = directory / "sample.py"
        script.write_text(SAMPLE)
        command = [sys.executable, str(script), str(path), kind]
        self.process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True)
        assert self.process.stdout is not None
        line = next((line for line in self.process.stdout if line.startswith("serving")), None)
        assert line is not None, "the engine did not start"
        self.children = psutil.Process(self.process.pid).children(recursive=True)

    def named(self, part: str) -> psutil.Process:
        return next(child for child in self.children if part in " ".join(child.cmdline()) or part in child.name())

    def ended(self) -> bool:
        return self.process.poll() is not None and not any(is_alive(child) for child in self.children)


def is_alive(process: psutil.Process) -> bool:
    try:
        return process.is_running() and process.status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


def eventually(holds: Callable[[], bool], timeout_s: float) -> bool:
    end = time.monotonic() + timeout_s
    while not holds():
        if time.monotonic() > end:
            return False
        time.sleep(0.1)
    return True


@pytest.mark.timeout(900)
@pytest.mark.parametrize("kind", ["vllm", "vllm-server"])
@pytest.mark.parametrize("victim", ["starter", "EngineCore", "Worker"])
def test_nothing_of_an_engine_outlives_it(kind: str, victim: str, tmp_path: Path) -> None:
    engine = Engine(tmp_path, kind)
    try:
        assert len(engine.children) >= 2
        target = engine.process.pid if victim == "starter" else engine.named(victim).pid
        psutil.Process(target).send_signal(signal.SIGKILL)
        assert eventually(engine.ended, GONE_S), [child for child in engine.children if is_alive(child)]
        assert engine.process.returncode != 0
    finally:
        for left in (engine.process, *engine.children):
            try:
                left.kill()
            except psutil.NoSuchProcess:
                continue
        engine.process.wait(30)
