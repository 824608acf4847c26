"""Logprobs of given tokens from a vLLM."""

from __future__ import annotations

import asyncio
import secrets
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from async_rl.rollout.vllm_host import VllmHost

MAX_AT_ONCE = 256


async def score(
    host: VllmHost, sequences: Sequence[Sequence[int]], temperature: float, max_context: int
) -> Sequence[npt.NDArray[np.float32]]:
    """Logprob of token t given tokens < t, [len − 1] per sequence.

    vLLM's prompt logprobs know no temperature, and a prompt leaves room for one token; what they do not say is asked for as the
    next token of its prefix.
    """
    salt = f"score-{secrets.token_hex(8)}"  # what is cached under it is read by this call alone
    gate = asyncio.Semaphore(MAX_AT_ONCE)

    async def next_of(ids: Sequence[int], position: int) -> float:
        async with gate:
            return await host.next_logprob(ids[:position], ids[position], temperature, salt=salt)

    async def one(ids: Sequence[int]) -> npt.NDArray[np.float32]:
        if len(ids) < 2:
            return np.empty(0, dtype=np.float32)
        known: list[float] = []
        if temperature == 1.0:
            async with gate:
                known = list(await host.prompt_logprobs(ids[: max_context - 1], salt=salt))
        rest = await asyncio.gather(*(next_of(ids, position) for position in range(1 + len(known), len(ids))))
        return np.asarray([*known, *rest], dtype=np.float32)

    return await asyncio.gather(*(one(ids) for ids in sequences))
