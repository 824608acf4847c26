"""`async-rl try CONFIG`: play an environment without a trainer or a queue, and show each trajectory token by token."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, cast

import numpy as np
from rich.console import Console

from async_rl.config import RunConfig
from async_rl.coordinator.sources import open_source
from async_rl.environments.base import GroupScorer
from async_rl.environments.load import close_environment, load_environment
from async_rl.errors import ConfigError, DataError, EngineError
from async_rl.model.tokenizer import load_tokenizer, stop_token_ids
from async_rl.monitor.trajectories import print_trajectories
from async_rl.reward.score import score_episode, score_group
from async_rl.rollout.chat import Tokenizer
from async_rl.rollout.engine import Completion, Sampler
from async_rl.rollout.group import GroupRollout, RolloutLimits
from async_rl.rollout.torch_engine import TorchEngine
from protocol.messages import FinishReason, SamplingParams, TrajectoryGroup

_ADDRESS_CONTEXT = 32_768


@dataclass(frozen=True, slots=True)
class Policy:
    """What acts: the config's model (default), the lines of a file (one a turn, in order), or an address."""

    script: Path | None = None
    address: str | None = None
    served_model: str = ""


def try_environment(config: RunConfig, policy: Policy, *, first_row: int, rows: int, members: int) -> list[TrajectoryGroup]:
    """Play `rows` rows from `first_row` on, `members` trajectories each, scored as a rollout worker would.

    Raises: ConfigError, DataError, EngineError.
    """
    return asyncio.run(_play(config, policy, range(first_row, first_row + rows), members))


async def _play(config: RunConfig, policy: Policy, cursors: Sequence[int], members: int) -> list[TrajectoryGroup]:
    environment = load_environment(config.environment)
    rollout_config = config.rollout.model_copy(update={"group_size": members})
    source = open_source(config.model_copy(update={"rollout": rollout_config}), "try", environment)
    tokenizer = cast(Tokenizer, load_tokenizer(config.model.path))
    stops = stop_token_ids(config.model.path, load_tokenizer(config.model.path))
    engine = await _engine(config, policy, tokenizer)
    try:
        timeout_s = config.reward.timeout_s
        rollout = GroupRollout(
            engine,
            tokenizer,
            environment,
            RolloutLimits(config.rollout.max_turns, engine.max_context, config.rollout.max_new_tokens),
            worker_id="try",
            stop_token_ids=stops,
            score=partial(score_episode, environment, timeout_s=timeout_s),
            score_group=partial(score_group, environment, timeout_s=timeout_s)
            if isinstance(environment, GroupScorer)
            else None,
            score_session=partial(score_episode, timeout_s=timeout_s),
            observe_timeout_s=timeout_s,
        )
        tasks = [source.task_at(cursor) for cursor in cursors]
        return [await rollout.run(task) for task in tasks if task is not None]
    finally:
        await close_environment(environment)
        await engine.close()


async def _engine(config: RunConfig, policy: Policy, tokenizer: Tokenizer) -> Sampler:
    if policy.script is not None:
        return _Script(policy.script, tokenizer)
    if policy.address is not None:
        return _Address(policy.address, policy.served_model, tokenizer)
    engine = TorchEngine(config.model.path, config.rollout, "try")
    await engine.start()
    await engine.serve(0)
    return engine


def print_tried(groups: Sequence[TrajectoryGroup], config: RunConfig, console: Console) -> None:
    """Every trajectory as a table of tokens, and its reward with its components."""
    tokenizer = load_tokenizer(config.model.path)
    for group in groups:
        print_trajectories(group, lambda ids: str(tokenizer.decode(list(ids))), console)


class _Script:
    """Says the lines of a file, one a turn, over and over. A line is text; a JSON string may hold line breaks."""

    engine_id, serving_version, max_context = "script", 0, _ADDRESS_CONTEXT

    def __init__(self, path: Path, tokenizer: Tokenizer) -> None:
        if not path.is_file():
            raise DataError(f"the script {path} does not exist; give a file with what the policy says, a line a turn")
        lines = [line for line in path.read_text(encoding="utf-8").splitlines() if line.strip()]
        if not lines:
            raise DataError(f"the script {path} says nothing")
        self._turns = [json.loads(line) if line.startswith('"') else line for line in lines]
        self._tokenizer = tokenizer
        self._spoken: dict[int, int] = {}

    async def generate(self, prompt_ids: Sequence[int], sampling: Sequence[SamplingParams]) -> Sequence[Completion]:
        return [self._say(one, index) for index, one in enumerate(sampling)]

    def _say(self, sampling: SamplingParams, index: int) -> Completion:
        turn = self._spoken.get(index, 0)
        self._spoken[index] = turn + 1
        ids = self._tokenizer.encode(self._turns[turn % len(self._turns)], add_special_tokens=False)
        if self._tokenizer.eos_token_id is not None:
            ids = [*ids, self._tokenizer.eos_token_id]
        return _completion(ids, sampling, FinishReason.STOP)

    async def close(self) -> None:
        return


class _Address:
    """Any server with OpenAI's completions that takes token ids; what comes back as text only is encoded to be shown."""

    engine_id, serving_version, max_context = "address", 0, _ADDRESS_CONTEXT

    def __init__(self, url: str, model: str, tokenizer: Tokenizer) -> None:
        try:
            import httpx
        except ImportError as error:
            raise ConfigError("an address needs httpx: pip install 'async-rl[verifiers]'") from error
        self._url, self._model, self._tokenizer = url.rstrip("/"), model, tokenizer
        self._client: Any = httpx.AsyncClient(timeout=120.0)

    async def generate(self, prompt_ids: Sequence[int], sampling: Sequence[SamplingParams]) -> Sequence[Completion]:
        return await asyncio.gather(*(self._ask(list(prompt_ids), one) for one in sampling))

    async def _ask(self, prompt_ids: list[int], sampling: SamplingParams) -> Completion:
        body = {
            "model": self._model,
            "prompt": prompt_ids,
            "max_tokens": sampling.max_new_tokens,
            "temperature": sampling.temperature,
            "seed": sampling.seed % 2**31,
            "return_token_ids": True,
        }
        try:
            response = await self._client.post(f"{self._url}/completions", json=body)
            response.raise_for_status()
            choice = response.json()["choices"][0]
            ids = choice.get("token_ids") or self._tokenizer.encode(choice["text"], add_special_tokens=False)
            finish = FinishReason.LENGTH if choice.get("finish_reason") == "length" else FinishReason.STOP
        except Exception as error:  # the client's own kinds, and answers of another form
            raise EngineError(f"{self._url} gave no completion: {type(error).__name__}: {error}") from error
        return _completion(ids, sampling, finish)

    async def close(self) -> None:
        await self._client.aclose()


def _completion(ids: Sequence[int], sampling: SamplingParams, finish: FinishReason) -> Completion:
    """Without logprobs: who speaks has none."""
    if len(ids) > sampling.max_new_tokens:
        ids, finish = ids[: sampling.max_new_tokens], FinishReason.LENGTH
    versions = np.zeros(len(ids), dtype=np.int64)
    return Completion(
        token_ids=np.array(ids, dtype=np.int32),
        logprobs=np.zeros(len(ids), dtype=np.float32),
        versions=versions,
        kv_versions=versions,
        finish_reason=finish,
        queued_s=0.0,
        generate_s=0.0,
    )
