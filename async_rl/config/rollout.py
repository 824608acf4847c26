"""What samples: prompts, environment, engine, rewards."""

from __future__ import annotations

from typing import Any, Literal

from pydantic import Field

from async_rl.config.base import LONGEST_S, LONGEST_TOKENS, MOST, MOST_PROCESSES, SHORTEST_S, StrictModel


class DataConfig(StrictModel):
    """Where prompts come from."""

    source: str = "environment"
    """`environment` (the built-in task's own rows), or a path: a .jsonl or .parquet file, or a Hugging Face dataset
    directory."""
    mix: list[dict[str, Any]] = Field(default_factory=list)
    """Several sources instead of one: tables of `source` (a path as above, or `environment`), `weight` and, where they differ
    from the settings below, `split` and `prompt_column`. Tasks come from each in proportion to its weight."""
    split: str = "train"
    """Split to read from a Hugging Face dataset directory; other sources have one split."""
    prompt_column: str = "prompt"
    """Column with the prompt: text, or a list of chat messages."""
    data_epochs: int | None = Field(None, ge=1, le=MOST)
    """Passes over the data; unset: until trainer.max_steps."""
    shuffle: bool = True
    """Shuffle the rows anew in each data epoch, from the run's seed."""
    on_long_prompt: Literal["error", "skip"] = "error"
    """A prompt that leaves no room for a token in the context: stop with an error, or end its task as invalid and go on."""


class EnvironmentConfig(StrictModel):
    """What a policy acts in, and what scores it."""

    name: str = "sort_digits"
    """Built-in environment (`sort_digits`, `look_up`, `json_extraction`, `prompt_reward`, `verify`, `trl`, `reasoning_gym`,
    `verifiers`), or `module:Class` of your own."""
    args: dict[str, Any] = Field(default_factory=dict)
    """Keyword arguments of the environment, e.g. `length = 6` for sort_digits, or `verifiers = [{use = "math"}]` for verify."""
    reward: str | None = None
    """Reward function for `prompt_reward`: `module:function` taking (completion, row) and returning a float."""


class RewardConfig(StrictModel):
    """Where and how completions are scored."""

    placement: Literal["inline", "workers"] = "inline"
    """`inline`: in the rollout worker; `workers`: in reward worker processes, for what is expensive."""
    workers: int = Field(1, ge=1, le=MOST_PROCESSES)
    """Reward worker processes, with placement = workers."""
    timeout_s: float = Field(30.0, ge=SHORTEST_S, le=LONGEST_S)
    """A score, or an environment's answer to a turn, that takes longer makes the reward invalid (never 0)."""
    max_concurrent: int = Field(64, ge=1, le=MOST_PROCESSES)
    """Groups that one reward worker scores at a time."""


class VllmConfig(StrictModel):
    """The vLLM engines, with rollout.engine = vllm or vllm-server. See docs/vllm.md."""

    servers: list[str] = Field(default_factory=list)
    """Addresses of running servers (`http://host:port`), one per rollout worker, with rollout.engine = vllm-server. Empty: each
    worker starts a server of its own."""
    tensor_parallel_size: int = Field(1, ge=1, le=MOST_PROCESSES)
    """Devices that one engine is spread over."""
    block_size: int | None = Field(None, ge=1, le=LONGEST_TOKENS)
    """Tokens per KV block. Members of a group share the KV of their prompt in whole blocks only. Unset: 32 on CPUs (vLLM's own
    choice of 128 shares no shorter prompt), vLLM's choice on GPUs."""
    kv_cache_bytes: int | None = Field(None, ge=2**20, le=2**50)
    """Memory for the KV cache. Unset: 1 GiB on CPUs, what gpu_memory_utilization leaves on GPUs."""
    gpu_memory_utilization: float = Field(0.9, gt=0, le=1)
    """Share of a GPU's memory that the engine may take."""
    enforce_eager: bool | None = None
    """Run without compiling or capturing graphs. Unset: on CPUs."""
    start_timeout_s: float = Field(600.0, ge=SHORTEST_S, le=LONGEST_S)
    """Longest wait for an engine to load its model and answer."""
    args: dict[str, Any] = Field(default_factory=dict)
    """Further engine arguments, by vLLM's own names (`max_num_batched_tokens = 4096`); they win over the ones set here."""


class RolloutConfig(StrictModel):
    """How completions are sampled."""

    engine: Literal["torch", "vllm", "vllm-server"] = "torch"
    """Engine that samples; `torch` is built in and runs on a CPU, `vllm` is vLLM in the rollout worker, `vllm-server` a vLLM
    server that the worker starts or is given (rollout.vllm.servers)."""
    vllm: VllmConfig = VllmConfig()
    workers: int = Field(1, ge=0, le=MOST_PROCESSES)
    """Rollout worker processes that the local launcher starts (0: none, they are started elsewhere)."""
    group_size: int = Field(8, ge=1, le=MOST_PROCESSES)
    """Trajectories per prompt."""
    max_new_tokens: int = Field(64, ge=1, le=LONGEST_TOKENS)
    """Sampled tokens per turn, at most."""
    max_turns: int = Field(8, ge=1, le=MOST_PROCESSES)
    """Turns per trajectory, at most."""
    max_sampled: int | None = Field(None, ge=1, le=LONGEST_TOKENS)
    """Sampled tokens of all turns of a trajectory together, at most; unset: no bound but those of turns and context."""
    max_trajectory_s: float | None = Field(None, ge=SHORTEST_S, le=LONGEST_S)
    """Seconds after which a trajectory begins no further turn; it is scored as it stands. Unset: no bound."""
    max_context: int | None = Field(None, ge=2, le=LONGEST_TOKENS)
    """Tokens per trajectory, prompt included; unset: the model's context."""
    temperature: float = Field(1.0, ge=1e-3, le=100)
    """Sampling temperature. Behavior logprobs are those of the tempered distribution."""
    top_p: float = Field(1.0, gt=0, le=1)
    """Nucleus sampling. Refused below 1: the trainer would need the stored support of every token."""
    top_k: int = Field(0, ge=0, le=MOST)
    """Top-k sampling, 0 is off. Refused above 0, for the same reason."""
    kv: Literal["recompute", "keep"] = "recompute"
    """At a weight swap: recompute the KV of running requests under the new weights, or keep the old one."""
    max_running: int = Field(256, ge=1, le=MOST_PROCESSES)
    """Sequences that the engine decodes at a time."""
    max_groups_in_flight: int = Field(32, ge=1, le=MOST_PROCESSES)
    """Groups that one worker holds at a time."""
    num_threads: int = Field(1, ge=1, le=4096)
    """CPU threads of the engine."""
    dtype: Literal["float32", "bfloat16"] = "float32"
    """Engine weights and compute."""
    device: str = Field("cpu", pattern=r"^(cpu|cuda(:[0-9]+)?)$")
    """torch device of the engine: `cpu`, `cuda` or `cuda:N`."""
