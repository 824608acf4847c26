"""Logprobs of given tokens from a vLLM."""

from __future__ import annotations

import asyncio
import secrets
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from async_rl.errors import DataError
from async_rl.rollout.vllm_host import SCORE_PLACES, VllmHost


def checked_sequence(sequence: Sequence[int], *, max_context: int, vocab_size: int) -> list[int]:
    """Raises: DataError if the sequence is empty, longer than the context or holds an id outside the vocabulary."""
    ids = [int(token) for token in sequence]
    if not 1 <= len(ids) <= max_context:
        raise DataError(f"sequence of {len(ids)} tokens cannot be scored: the context holds 1 to {max_context}")
    if min(ids) < 0 or max(ids) >= vocab_size:
        raise DataError(f"sequence holds token ids outside the model's vocabulary of {vocab_size}")
    return ids


async def score(
    host: VllmHost, sequences: Sequence[Sequence[int]], temperature: float, max_context: int
) -> Sequence[npt.NDArray[np.float32]]:
    """Logprob of token t given tokens < t, [len − 1] per sequence.

    vLLM's prompt logprobs know no temperature, and a prompt leaves room for one token; what they do not say is asked for as the
    next token of its prefix.
    """
    salt = f"score-{secrets.token_hex(8)}"  # what is cached under it is read by this call alone
    gate = asyncio.Semaphore(SCORE_PLACES)

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
