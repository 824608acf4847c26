"""One scoring process: `python -m async_rl.reward.pool_child FD`. Reads episodes, answers rewards, one at a time.

Scoring runs in the main thread, because many verifiers set alarms, which only works there.
"""

from __future__ import annotations

import asyncio
import sys

from async_rl.environments.base import Environment, GroupScorer
from async_rl.environments.calls import call_inline
from async_rl.environments.load import load_environment
from async_rl.environments.process_child import ParentConnection
from async_rl.reward.score import score_episode, score_group
from async_rl.reward.wire import is_group, pack_reward, pack_rewards, unpack_episode, unpack_group, unpack_start
from protocol.packing import pack


def main() -> None:
    parent = ParentConnection()
    start = parent.read()
    try:
        config, timeout_s, sys.path[:] = unpack_start(start)
        environment = load_environment(config)
    except Exception as error:
        parent.send(pack({"error": str(error)}))
        return
    parent.send(pack({"error": None, "group": isinstance(environment, GroupScorer)}))
    parent.listen()
    call_inline()
    with asyncio.Runner() as runner:
        while True:
            parent.send(runner.run(_answer(environment, parent.next(), timeout_s)))


async def _answer(environment: Environment, frame: bytes, timeout_s: float) -> bytes:
    if is_group(frame):
        episodes, rewards = unpack_group(frame)
        return pack_rewards(await score_group(environment, episodes, rewards, timeout_s))
    return pack_reward(await score_episode(environment, unpack_episode(frame), timeout_s))


if __name__ == "__main__":
    main()
