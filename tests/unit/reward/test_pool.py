"""Real processes: what they survive and what ends them."""

from __future__ import annotations

import asyncio
import os
import signal
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import psutil
import pytest
from msgspec.structs import replace

from async_rl.config.rollout import EnvironmentConfig
from async_rl.environments.base import Episode, TurnText
from async_rl.errors import ConfigError
from async_rl.reward.pool import ScoringPool
from async_rl.reward.wire import pack_episode, pack_reward, unpack_episode, unpack_reward
from async_rl.testing.builders import make_task
from protocol.errors import CodecError
from protocol.messages import FinishReason, Reward
from protocol.packing import pack

MODULE = '''
import asyncio, os, signal, subprocess, sys, threading, time

def verify(completion, row):
    """The completion says what this verifier does."""
    if completion == "pid":
        return float(os.getpid())
    if completion == "hang":
        time.sleep(600)
    if completion == "exit":
        os._exit(3)
    if completion == "segv":
        os.kill(os.getpid(), signal.SIGSEGV)
    if completion == "sys.exit":
        sys.exit(0)
    if completion == "print":
        print("ALL PASSED")
        return 0.25
    if completion == "alarm":
        signal.signal(signal.SIGALRM, lambda *_: None)  # main thread only
        return float(threading.current_thread() is threading.main_thread())
    if completion == "child":
        child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
        with open(row["path"], "w") as file:
            file.write(str(child.pid))
        time.sleep(600)
    return float(completion)

async def verify_async(completion, row):
    if completion == "hang":
        await asyncio.sleep(600)
    return float(os.getpid()) if completion == "pid" else float(completion)
'''


@pytest.fixture
def module(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    (tmp_path / "verifiers_of_a_user.py").write_text(MODULE)
    (tmp_path / "verifiers_that_exit.py").write_text("import os; os._exit(4)")
    monkeypatch.syspath_prepend(str(tmp_path))
    return "verifiers_of_a_user"


def _episode(text: str, **columns: str) -> Episode:
    return Episode(replace(make_task(), columns=columns), 0, (TurnText(text, FinishReason.STOP),))


@asynccontextmanager
async def _pool(reward: str, *, processes: int = 1, timeout_s: float = 60.0) -> AsyncIterator[ScoringPool]:
    pool = ScoringPool(EnvironmentConfig(name="prompt_reward", reward=reward), processes=processes, timeout_s=timeout_s)
    try:
        await pool.start()
        yield pool
    finally:
        await pool.close()


async def test_crashes_exits_and_errors_cost_one_reward_each(module: str) -> None:
    async with _pool(f"{module}:verify") as pool:
        outcomes = [
            await pool.score(_episode(text)) for text in ("0.5", "exit", "segv", "sys.exit", "nonsense", "print", "alarm")
        ]
    assert [outcome.value for outcome in outcomes] == [0.5, None, None, None, None, 0.25, 1.0]
    assert [outcome.error_type for outcome in outcomes[1:5]] == ["crash", "crash", "SystemExit", "ValueError"]
    assert outcomes[1].invalid_reason == "the scoring process died: exit code 3"
    assert outcomes[2].invalid_reason == "the scoring process died: signal SIGSEGV"


async def test_a_process_serves_many_episodes_and_is_replaced_after_a_crash(module: str) -> None:
    async with _pool(f"{module}:verify") as pool:
        first, second = [(await pool.score(_episode("pid"))).value for _ in range(2)]
        await pool.score(_episode("exit"))
        third = (await pool.score(_episode("pid"))).value
    assert first == second
    assert third not in (None, first)


async def test_what_hangs_is_killed_with_all_that_it_started(module: str, tmp_path: Path) -> None:
    pid_file = tmp_path / "child.pid"
    async with _pool(f"{module}:verify", timeout_s=1.5) as pool:
        reward = await pool.score(_episode("child", path=str(pid_file)))
        assert reward == Reward.invalid("no score within reward.timeout_s=1.5", "timeout")
        descendant = int(pid_file.read_text())
        assert not psutil.pid_exists(descendant) or psutil.Process(descendant).status() == psutil.STATUS_ZOMBIE
        assert (await pool.score(_episode("1"))).value == 1.0


async def test_an_async_verifier_is_cancelled_and_its_process_goes_on(module: str) -> None:
    async with _pool(f"{module}:verify_async", timeout_s=1.0) as pool:
        before = (await pool.score(_episode("pid"))).value
        assert (await pool.score(_episode("hang"))).error_type == "timeout"
        assert (await pool.score(_episode("pid"))).value is not None
        assert before is not None


async def test_a_hanging_episode_does_not_hold_the_others(module: str) -> None:
    async with _pool(f"{module}:verify", processes=2) as pool:
        hanging = asyncio.ensure_future(pool.score(_episode("hang")))
        rewards = await asyncio.gather(*(pool.score(_episode(str(number))) for number in range(8)))
        assert [reward.value for reward in rewards] == [float(number) for number in range(8)]
        hanging.cancel()
        with pytest.raises(asyncio.CancelledError):
            await hanging
        assert (await pool.score(_episode("2"))).value == 2.0


async def test_nothing_is_left_after_close(module: str) -> None:
    async with _pool(f"{module}:verify", processes=2) as pool:
        pids = {int((await pool.score(_episode("pid"))).value or 0) for _ in range(2)}
        assert pids
    mine = {child.pid for child in psutil.Process().children(recursive=True)}
    assert not pids & mine


async def test_what_cannot_be_loaded_is_said_at_start(module: str) -> None:
    with pytest.raises(ConfigError, match="has no 'verifi'"):
        async with _pool(f"{module}:verifi", processes=2):
            pass
    with pytest.raises(ConfigError, match=r"ended its process: exit code 4"):
        async with _pool("verifiers_that_exit:verify"):
            pass


@pytest.mark.skipif(sys.platform != "linux", reason="a parent's death is a signal on Linux only")
async def test_scoring_processes_end_with_their_worker(module: str, tmp_path: Path) -> None:
    """A worker that is killed with -9 leaves nothing behind, even while a verifier hangs."""
    program = (
        "import asyncio, sys\n"
        f"sys.path.insert(0, {str(tmp_path)!r})\n"
        "from async_rl.config.rollout import EnvironmentConfig\n"
        "from async_rl.reward.pool import ScoringPool\n"
        f"pool = ScoringPool(EnvironmentConfig(name='prompt_reward', reward='{module}:verify'), processes=1, timeout_s=600)\n"
        "async def work():\n"
        "    await pool.start()\n"
        "    print(pool.pids[0], flush=True)\n"
        "    await asyncio.sleep(600)\n"
        "asyncio.run(work())\n"
    )
    worker = await asyncio.create_subprocess_exec(sys.executable, "-c", program, stdout=asyncio.subprocess.PIPE)
    assert worker.stdout is not None
    scoring = psutil.Process(int(await asyncio.wait_for(worker.stdout.readline(), 60)))
    os.kill(worker.pid, signal.SIGKILL)
    await worker.wait()
    gone, _ = await asyncio.to_thread(psutil.wait_procs, [scoring], 20)
    assert gone == [scoring]


def test_an_episode_survives_the_wire() -> None:
    episode = Episode(
        task=make_task(row=3),
        index=2,
        turns=(TurnText("é 1", FinishReason.STOP), TurnText("", FinishReason.LENGTH)),
        observations=("again>",),
    )
    assert unpack_episode(pack_episode(episode)) == episode


@pytest.mark.parametrize("reward", [Reward(0.5, {"a": 1.0}), Reward.invalid("why", "kind")])
def test_a_reward_survives_the_wire(reward: Reward) -> None:
    assert unpack_reward(pack_reward(reward)) == reward


@pytest.mark.parametrize("body", [pack([1]), pack({"value": None}), pack({"value": 1.0, "bonus": 2.0}), b"\xc1"])
def test_what_is_no_reward_is_refused(body: bytes) -> None:
    with pytest.raises(CodecError):
        unpack_reward(body)
