"""Which GPUs each role of this machine sees: CUDA_VISIBLE_DEVICES, split so that no two roles share one."""

from __future__ import annotations

import subprocess
from collections.abc import Mapping, Sequence

from async_rl.config.run import RunConfig
from async_rl.errors import ConfigError

VARIABLE = "CUDA_VISIBLE_DEVICES"
NVIDIA_SMI = ("nvidia-smi", "--query-gpu=index", "--format=csv,noheader")
ASK_S = 20.0


def split_devices(config: RunConfig, env: Mapping[str, str]) -> tuple[Mapping[str, str], Sequence[Mapping[str, str]]]:
    """Return the variables of the trainer's ranks, and of each rollout worker.

    The first devices are the ranks' (all see all of theirs, LOCAL_RANK chooses), the next ones the workers', one each. Whoever
    computes on the CPU sees none. If nobody asks for a GPU, nothing is set.
    Raises: ConfigError if there are fewer devices than roles, or one is named twice: roles would share it.
    """
    ranks = config.trainer.world_size if config.trainer.device.startswith("cuda") else 0
    workers = config.rollout.workers if config.rollout.device.startswith("cuda") else 0
    if not ranks + workers:
        return {}, [{}] * config.rollout.workers
    visible = visible_devices(env)
    if not visible:
        asked = [f"trainer.device={config.trainer.device!r}"] if ranks else []
        asked += [f"rollout.device={config.rollout.device!r}"] if workers else []
        source = f"{VARIABLE} is empty" if VARIABLE in env else "the driver lists none (nvidia-smi)"
        raise ConfigError(f"{' and '.join(asked)}, but this machine shows no GPU: {source}; set cpu, or make one visible")
    if len(set(visible)) < len(visible):
        raise ConfigError(f"{VARIABLE}={','.join(visible)} names a device twice: two roles would share it; name each one once")
    if len(visible) < ranks + workers:
        raise ConfigError(
            f"{VARIABLE}={','.join(visible) or '(none)'} has {len(visible)} devices, but {ranks} trainer ranks "
            f"(trainer.world_size) and {workers} rollout workers (rollout.workers) need {ranks + workers}: they would overlap; "
            f"lower one of the two, or make more devices visible"
        )
    trainer = {VARIABLE: ",".join(visible[:ranks])}
    rest = visible[ranks:]
    return trainer, [{VARIABLE: rest[index] if workers else ""} for index in range(config.rollout.workers)]


def evaluation_device(config: RunConfig, env: Mapping[str, str]) -> Mapping[str, str]:
    """The variables of the evaluation: the first device that no rank and no rollout worker has; none on a CPU.

    Raises: ConfigError if there is none left.
    """
    if not (config.evaluation.device or config.rollout.device).startswith("cuda"):
        on_gpus = config.trainer.device.startswith("cuda") or config.rollout.device.startswith("cuda")
        return {VARIABLE: ""} if on_gpus else {}
    ranks = config.trainer.world_size if config.trainer.device.startswith("cuda") else 0
    workers = config.rollout.workers if config.rollout.device.startswith("cuda") else 0
    visible = visible_devices(env)
    if len(visible) <= ranks + workers:
        raise ConfigError(
            f"{VARIABLE}={','.join(visible) or '(none)'} has {len(visible)} devices: trainer ranks and rollout workers take "
            f"{ranks + workers}, and none is left for the evaluation; set evaluation.device='cpu', or make one more visible"
        )
    return {VARIABLE: visible[ranks + workers]}


def visible_devices(env: Mapping[str, str]) -> Sequence[str]:
    """The devices that this process may hand out: what the variable says, else what the driver lists."""
    if VARIABLE in env:
        return [name.strip() for name in env[VARIABLE].split(",") if name.strip()]
    try:
        answer = subprocess.run(NVIDIA_SMI, capture_output=True, text=True, timeout=ASK_S, check=True)
    except (OSError, subprocess.SubprocessError):
        return []
    return answer.stdout.split()
