"""What learns: staleness, trainer, weight push, checkpoints."""

from __future__ import annotations

from pathlib import Path
from typing import Literal

from pydantic import Field

from async_rl.config.base import LONGEST_S, LONGEST_TOKENS, MOST, MOST_PROCESSES, SHORTEST_S, StrictModel


class StalenessConfig(StrictModel):
    """What happens to work that was sampled by an old policy."""

    max_lag: int = Field(4, ge=0, le=MOST)
    """Oldest behavior policy accepted, in optimizer steps behind the trainer."""
    stragglers: Literal["wait", "mask", "drop"] = "mask"
    """Work that would outlive max_lag: the step waits for it (`wait`, nothing is discarded because of its age), or goes on, and
    what comes too late is dropped (`drop`) or loses its too-old tokens (`mask`). See docs/staleness.md."""
    wait_timeout_s: float = Field(300.0, ge=SHORTEST_S, le=LONGEST_S)
    """With stragglers = wait: a step that has all its groups waits this long for stragglers, then goes on without them."""
    on_wait_timeout: Literal["mask", "drop"] = "drop"
    """With stragglers = wait: `drop` or `mask` what comes too old all the same (after wait_timeout_s, or from a worker that
    lost its lease)."""


class TrainerConfig(StrictModel):
    """The optimizer and its batches."""

    world_size: int = Field(1, ge=1, le=MOST_PROCESSES)
    """FSDP2 ranks."""
    shard_size: int | None = Field(None, ge=1, le=MOST_PROCESSES)
    """Ranks that shard one copy of the model (HSDP: every other group of as many ranks holds a copy of its own); unset: all
    ranks shard one copy."""
    cpu_offload: bool = False
    """Keep parameters, gradients and optimizer state in host memory, and step there."""
    groups_per_step: int = Field(16, ge=1, le=2**20)
    """Groups per optimizer step."""
    steps_per_batch: int = Field(1, ge=1, le=2**16)
    """Optimizer steps taken from one drawn batch of groups_per_step × steps_per_batch groups."""
    max_steps: int = Field(100, ge=1, le=MOST)
    """Optimizer steps of the whole run."""
    max_tokens_per_micro_batch: int = Field(8192, ge=1, le=2**30)
    """Packed tokens per forward and backward pass; a longer sequence gets a micro-batch of its own."""
    share_prompts: bool = True
    """Compute the prompt of a group once for all its trajectories. Exact: the same logprobs and gradients."""
    learning_rate: float = Field(1e-5, gt=0, le=1)
    """Peak learning rate of AdamW."""
    schedule: Literal["constant", "linear", "cosine"] = "constant"
    """Learning rate after the warm-up."""
    warmup_steps: int = Field(0, ge=0, le=MOST)
    """Steps of linear warm-up from 0."""
    final_lr_fraction: float = Field(0.1, ge=0, le=1)
    """Learning rate at max_steps, as a fraction of the peak (linear and cosine)."""
    betas: tuple[float, float] = Field((0.9, 0.999), strict=False)
    """AdamW's moment decay rates."""
    weight_decay: float = Field(0.0, ge=0, le=10)
    """AdamW's decoupled weight decay."""
    grad_clip: float = Field(1.0, gt=0, le=1e9)
    """Global gradient norm is clipped to this."""
    dtype: Literal["float32", "bfloat16"] = "float32"
    """Compute dtype; master weights, logits and reductions stay float32."""
    activation_checkpointing: bool = False
    """Recompute each layer in the backward pass to save memory."""
    logprob_chunk_tokens: int = Field(1024, ge=1, le=2**30)
    """Tokens whose logits are held at a time."""
    num_threads: int = Field(1, ge=1, le=4096)
    """CPU threads per rank."""
    device: str = Field("cpu", pattern=r"^(cpu|cuda)$")
    """torch device type of the ranks: `cpu` or `cuda`."""
    watchdog_s: float = Field(60.0, ge=SHORTEST_S, le=LONGEST_S)
    """A rank that waits in one collective for longer says so, with what every other rank does."""
    idle_timeout_s: float = Field(600.0, ge=SHORTEST_S, le=LONGEST_S)
    """The trainer gives up, and says whom it waited for, when no group arrives for this long."""


class ValidationConfig(StrictModel):
    """What the trainer looks at before it trains."""

    tokens_per_step: int = Field(256, ge=0, le=2**30)
    """Tokens whose logprobs are recomputed before a batch is drawn, of trajectories that the present version or the kept one
    sampled; 0: none. Masks, stop tokens, versions and lengths are checked on all."""
    keep_previous: bool = True
    """Keep a copy of the weights of one earlier version (float32, sharded like the model) until tokens that it sampled were
    compared or are too old: in a run that never waits, nearly everything was sampled by an earlier version."""
    tolerance: float = Field(1e-3, gt=0, le=100)
    """Largest |recorded − recomputed| logprob in float32, nats; in bfloat16 the mean may be ten times the noise at load."""
    keep_files: int = Field(100, ge=0, le=MOST)
    """Trajectories that fail are written to run_dir/quarantine, up to this many."""


class CheckpointConfig(StrictModel):
    """When checkpoints are written, how many are kept, and what the intake log keeps beside them."""

    every_steps: int = Field(50, ge=1, le=MOST)
    """Optimizer steps between checkpoints; one more is written at the end. They are written beside training, one at a time."""
    every_s: float | None = Field(None, ge=1, le=LONGEST_S)
    """Seconds between checkpoints, whichever comes first; not set: by steps alone."""
    keep: int = Field(3, ge=1, le=MOST)
    """Newest checkpoints kept. With 1, a damaged one leaves nothing to fall back to."""
    keep_newer_than_s: float = Field(0.0, ge=0, le=1e9)
    """Checkpoints younger than this are kept as well."""
    log_segment_bytes: int = Field(256 * 2**20, ge=4096, le=2**40)
    """Size at which the intake log starts a new file. Files wholly below the oldest kept checkpoint shrink to ids and ends."""


class WeightsConfig(StrictModel):
    """How new versions reach the engines."""

    backend: Literal["gloo", "shm", "nccl", "disk"] = "gloo"
    """Transport of weight pushes: `gloo` (any hosts, CPU memory), `shm` (shared memory of one host), `nccl` (between GPUs),
    `disk` (safetensors in the run directory)."""
    push_every: int = Field(1, ge=1, le=MOST)
    """Optimizer steps between pushes."""
    deadline_s: float = Field(30.0, ge=SHORTEST_S, le=LONGEST_S)
    """A push that is not confirmed by then evicts the engines that are late."""
    wire_dtype: Literal["float32", "bfloat16"] = "float32"
    """dtype on the wire."""
    bucket_bytes: int = Field(64 * 2**20, ge=2**16, le=2**31)
    """Bytes per broadcast."""
    probe_sequences: int = Field(2, ge=1, le=1024)
    """Sequences scored by engine and trainer after each push."""
    probe_tokens: int = Field(128, ge=2, le=LONGEST_TOKENS)
    """Tokens of each of them, at most: the trainer stands still while it scores them."""
    probe_tolerance: float = Field(1e-4, gt=0, le=100)
    """Largest |engine − trainer| logprob accepted on the probe in float32 with kv = recompute; in bfloat16 three times the
    noise measured at load."""
    shm_dir: Path = Field(Path("/dev/shm"), strict=False)
    """With backend = shm: a memory file system with room for two or three versions."""
    canary: bool = True
    """Try every engine once, before its first version, with made-up weights: finds tensors that pushes do not reach."""
    host: str = "127.0.0.1"
    """Address that the trainer's store binds to and engines connect to."""
