"""What vllm_engine needs of a vLLM, in this process or behind HTTP, and the arguments that both start with. Imports no vLLM."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from async_rl.config.rollout import RolloutConfig
from protocol.messages import SamplingParams

BACKEND = "async_rl"
"""Our name in vLLM's weight-transfer factory (see vllm_plugin)."""
WORKER_EXTENSION = "async_rl.rollout.vllm_worker.WorkerExtension"
DIGESTS_METHOD = "async_rl_digests"
LEASH_VARIABLE = "ASYNC_RL_VLLM_STARTER"
"""Process id of who started vLLM: its processes end with their parents (see vllm_plugin)."""
SCORE_PLACES = 32
"""Sequences that are scored at a time, beside those that are sampled."""
OUTPUT_EVERY = 32
"""Tokens of a request between two of its outputs: each one costs the time of some tokens."""
CPU_BLOCK_SIZE = 32
CPU_KV_CACHE_BYTES = 2**30


@dataclass(frozen=True, slots=True)
class LabelSpan:
    """Output tokens [start, end) were sampled by the weights that were given this label."""

    label: str
    start: int
    end: int


@dataclass(frozen=True, slots=True)
class Sampled:
    """One request's answer. logprobs: of the sampled tokens, nats, tempered. is_stop: a stop token ended it."""

    token_ids: Sequence[int]
    logprobs: Sequence[float]
    spans: Sequence[LabelSpan]
    is_stop: bool
    num_cached: int  # prompt tokens whose KV came from the prefix cache


class VllmHost(Protocol):
    """One vLLM engine. Whatever goes wrong is an EngineError; cancelling a request frees what it held."""

    async def start(self) -> None:
        """Load the model. Blocks, for as long as that takes, where vLLM must be started by the main thread."""
        ...

    async def close(self) -> None:
        """End it, and all its processes, if they are ours. May be called again."""
        ...

    async def sample(
        self, prompt_ids: Sequence[int], sampling: SamplingParams, *, salt: str, on_output: Callable[[], object]
    ) -> Sampled:
        """Sample one completion. Requests share the KV of their prompts under one salt. on_output: called at every
        OUTPUT_EVERY tokens, as a sign of life."""
        ...

    async def prompt_logprobs(self, token_ids: Sequence[int], *, salt: str) -> Sequence[float]:
        """Logprob of token t given tokens < t, untempered: [len − 1]."""
        ...

    async def next_logprob(self, prefix_ids: Sequence[int], token_id: int, temperature: float, *, salt: str) -> float:
        """Logprob of `token_id` after a prefix, at `temperature`."""
        ...

    async def pause(self, *, clear_cache: bool) -> None:
        """At a token boundary; requests are kept. clear_cache: their KV and the prefix cache are computed again afterwards."""
        ...

    async def load(self, update: Mapping[str, Any], label: str) -> Mapping[str, str]:
        """While paused: replace all weights by `update` (vllm_worker.StagedUpdate), and label the tokens that they sample.

        Returns: digest of every tensor that was loaded, the same in every rank.
        """
        ...

    async def relabel(self, label: str) -> None:
        """While paused, or before the first request: label tokens anew, with the weights that are held."""
        ...

    async def resume(self) -> None: ...


def engine_arguments(model_path: Path, config: RolloutConfig, max_context: int) -> dict[str, Any]:
    """Engine arguments by vLLM's names; rollout.vllm.args wins."""
    vllm = config.vllm
    arguments: dict[str, Any] = {
        "model": str(model_path),
        "dtype": config.dtype,
        "max_model_len": max_context,
        "max_num_seqs": config.max_running + SCORE_PLACES,  # a probe never waits for a completion
        "tensor_parallel_size": vllm.tensor_parallel_size,
        "enable_prefix_caching": True,
        "logprobs_mode": "processed_logprobs",  # of the distribution that was sampled from; vLLM's default is untempered
        "generation_config": "vllm",  # nothing of the model's own sampling defaults
        "load_format": "safetensors",
        "weight_transfer_config": {"backend": BACKEND},
        "worker_extension_cls": WORKER_EXTENSION,
        "disable_log_stats": True,
        "seed": 0,
    }
    if config.device == "cpu":
        arguments |= {
            "block_size": vllm.block_size or CPU_BLOCK_SIZE,
            "kv_cache_memory_bytes": vllm.kv_cache_bytes or CPU_KV_CACHE_BYTES,
            "enforce_eager": vllm.enforce_eager is not False,
        }
    else:
        optional = {
            "block_size": vllm.block_size,
            "kv_cache_memory_bytes": vllm.kv_cache_bytes,
            "enforce_eager": vllm.enforce_eager,
        }
        arguments |= {name: value for name, value in optional.items() if value is not None}
        arguments["gpu_memory_utilization"] = vllm.gpu_memory_utilization
    return arguments | dict(vllm.args)


def command_flags(arguments: Mapping[str, Any]) -> list[str]:
    """Engine arguments as the server's flags."""
    flags: list[str] = []
    for name, value in arguments.items():
        flag = f"--{name.replace('_', '-')}"
        if value is True:
            flags.append(flag)
        elif value is False:
            flags.append(f"--no-{flag[2:]}")
        elif isinstance(value, dict | list):
            flags.extend((flag, json.dumps(value)))
        elif value is not None:
            flags.extend((flag, str(value)))
    return flags


def environment(config: RolloutConfig, starter_pid: int) -> dict[str, str]:
    """Environment variables of vLLM's processes. What the user has set wins over all but the leash."""
    threads = str(config.num_threads)
    return {
        LEASH_VARIABLE: str(starter_pid),
        "VLLM_LOGGING_LEVEL": "WARNING",
        "VLLM_NO_USAGE_STATS": "1",
        "HF_HUB_OFFLINE": "1",
        "VLLM_CPU_OMP_THREADS_BIND": "nobind",  # bound to a core, it would fight the other roles for that core alone
        "OMP_NUM_THREADS": threads,
        "OMP_WAIT_POLICY": "PASSIVE",
    }


def next_logprob_params(token_id: int) -> dict[str, Any]:
    """Sampling parameters, but for the temperature, that bring the logprob of one token beside the sampled one's.

    Asked for twice: a server shows as many entries as are asked for, and the sampled token's is the first of them.
    """
    return {"max_tokens": 1, "seed": 0, "logprob_token_ids": [token_id, token_id], "logprobs": 2, "detokenize": False}


def stop_kind(finish_reason: str | None) -> bool:
    """Whether vLLM says that a stop token ended a request. Raises: ValueError for ends that are neither stop nor length."""
    if finish_reason not in ("stop", "length"):
        raise ValueError(f"it ended with {finish_reason!r}")
    return finish_reason == "stop"


def one_digest(ranks: Sequence[Mapping[str, str]]) -> Mapping[str, str]:
    """Digests that all ranks agree on; a tensor that they read differently has none that could be right."""
    first = dict(ranks[0])
    for other in ranks[1:]:
        for name in first.keys() | other.keys():
            if first.get(name) != other.get(name):
                first[name] = "ranks differ"
    return first
