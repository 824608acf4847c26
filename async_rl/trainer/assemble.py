"""A learner out of a config: what a trainer rank and a replay do alike."""

from __future__ import annotations

from dataclasses import replace

import torch

from async_rl.config.run import RunConfig
from async_rl.trainer.critic import Critic
from async_rl.trainer.distributed import Ranks
from async_rl.trainer.learner import Learner
from async_rl.trainer.policy import PolicyOptions, load_policy
from async_rl.trainer.value_model import load_value_model


def make_learner(config: RunConfig, ranks: Ranks) -> Learner:
    """Load the policy of model.path, with the reference and the critic that the config asks for, sharded over `ranks`.

    Every rank calls it. Raises: ConfigError, DataError.
    """
    trainer = config.trainer
    torch.set_num_threads(trainer.num_threads)
    torch.use_deterministic_algorithms(trainer.device == "cpu")
    options = PolicyOptions(
        dtype=getattr(torch, trainer.dtype),
        chunk_tokens=trainer.logprob_chunk_tokens,
        activation_checkpointing=trainer.activation_checkpointing,
        cpu_offload=trainer.cpu_offload,
        measure_rounding=rounds(config),
        canary_dtype=getattr(torch, config.weights.wire_dtype) if config.weights.canary else None,
    )
    reference = None
    if config.algorithm.kl_coef > 0:
        path = config.algorithm.reference or config.model.path
        reference = load_policy(path, options=replace(options, measure_rounding=False, canary_dtype=None), mesh=ranks.mesh)
        reference.requires_grad_(False)
    critic = None
    if config.algorithm.advantage == "gae":
        path = config.critic.path or config.model.path
        critic = Critic(load_value_model(path, options=options, mesh=ranks.mesh), config)
    policy = load_policy(config.model.path, options=options, mesh=ranks.mesh)
    return Learner(config, policy, ranks, reference=reference, critic=critic)


def rounds(config: RunConfig) -> bool:
    """Whether trainer, wire or engine rounds to bfloat16, so that engine and trainer cannot agree to float32's precision."""
    return "bfloat16" in {config.trainer.dtype, config.weights.wire_dtype, config.rollout.dtype}
