"""What cannot work across sections is refused before anything starts, every problem at once. Torch-free."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import TypeAlias
from urllib.parse import urlsplit

from async_rl.config import source_checks
from async_rl.config.algorithm import (
    ADVANTAGE_NAMES,
    LOSS_NAMES,
    NEEDS_NO_GROUP,
    SEQUENCE_LOSSES,
    AlgorithmConfig,
    CriticConfig,
)
from async_rl.config.run import RunConfig
from async_rl.errors import ConfigError

Check: TypeAlias = Callable[[RunConfig], Iterator[str]]


def check(config: RunConfig) -> None:
    """Raises: ConfigError naming field, value, bound and remedy of everything in `config` that cannot work."""
    problems = [problem for rule in CHECKS for problem in rule(config)]
    if len(problems) == 1:
        raise ConfigError(problems[0])
    if problems:
        raise ConfigError(f"{len(problems)} settings that cannot work:\n" + "\n".join(f"  {problem}" for problem in problems))


def _truncated_sampling(config: RunConfig) -> Iterator[str]:
    """Behavior logprobs of a truncated distribution need the support that each token was sampled from; none is stored."""
    why = "the trainer would need the stored support of every token to compute the same probabilities"
    if config.rollout.top_p < 1:
        yield f"rollout.top_p={config.rollout.top_p} is below 1.0: {why}; set rollout.top_p=1.0"
    if config.rollout.top_k > 0:
        yield f"rollout.top_k={config.rollout.top_k} is above 0: {why}; set rollout.top_k=0"


def _group_size(config: RunConfig) -> Iterator[str]:
    size, estimator = config.rollout.group_size, config.algorithm.advantage
    if size < 2 and estimator in ADVANTAGE_NAMES and estimator not in NEEDS_NO_GROUP:
        yield (
            f"rollout.group_size={size} is below 2 with algorithm.advantage={estimator!r}: a group-relative estimator compares "
            f"the members of a group, and the advantage of a group of one is always 0; set rollout.group_size=2 or more"
        )


def _objective_names(config: RunConfig) -> Iterator[str]:
    algorithm = config.algorithm
    for key, name, known in (
        ("algorithm.loss", algorithm.loss, LOSS_NAMES),
        ("algorithm.advantage", algorithm.advantage, ADVANTAGE_NAMES),
    ):
        if name not in known and not all(name.partition(":")[::2]):
            yield f"{key}={name!r} is unknown; use one of {', '.join(known)}, or module:function of your own"
    if algorithm.loss_args and algorithm.loss in LOSS_NAMES:
        yield f"algorithm.loss_args has no effect with the built-in algorithm.loss={algorithm.loss!r}; remove it"
    if algorithm.advantage_args and algorithm.advantage in ADVANTAGE_NAMES:
        yield f"algorithm.advantage_args has no effect with the built-in algorithm.advantage={algorithm.advantage!r}; remove it"


def _ratios(config: RunConfig) -> Iterator[str]:
    algorithm = config.algorithm
    anchors = {"decoupled_clip": "proximal", "clipped_surrogate": "behavior"}
    own = anchors.get(algorithm.loss)
    if own is not None and algorithm.anchor not in (None, own):
        other = next(name for name, anchor in anchors.items() if anchor == algorithm.anchor)
        yield (
            f"algorithm.anchor={algorithm.anchor!r} contradicts algorithm.loss={algorithm.loss!r}, which clips against the "
            f"{own} policy; set algorithm.loss={other!r}"
        )
    if algorithm.loss == "policy_gradient" and algorithm.anchor is not None:
        yield "algorithm.anchor has no effect with algorithm.loss='policy_gradient', which clips nothing; remove it"
    if algorithm.importance == "none" and (algorithm.loss == "decoupled_clip" or algorithm.anchor == "proximal"):
        yield (
            "algorithm.importance='none' with ratios against the proximal policy corrects nothing for who sampled; set "
            "algorithm.importance='truncate', or a loss whose ratios are against the behavior policy"
        )
    if algorithm.dual_clip is not None and algorithm.loss not in ("decoupled_clip", "clipped_surrogate", "gspo"):
        yield f"algorithm.dual_clip has no effect with algorithm.loss={algorithm.loss!r}; remove it"
    if algorithm.importance_floor > 0 and algorithm.importance != "mask":
        yield "algorithm.importance_floor has no effect without algorithm.importance='mask'; remove it"
    if not algorithm.weighs:
        for name in ("importance", "importance_level", "importance_cap"):
            if getattr(algorithm, name) != AlgorithmConfig.model_fields[name].default:
                yield (
                    f"algorithm.{name}={getattr(algorithm, name)!r} has no effect with algorithm.loss={algorithm.loss!r}, "
                    "which has no importance weight; set algorithm.loss='decoupled_clip', or remove it"
                )
    if algorithm.clip[0] >= 1 and algorithm.loss in ("decoupled_clip", "clipped_surrogate"):
        yield f"algorithm.clip_low={algorithm.clip[0]} leaves algorithm.loss={algorithm.loss!r} no lower bound; set it below 1"


def _aggregation(config: RunConfig) -> Iterator[str]:
    algorithm = config.algorithm
    if (algorithm.aggregation == "constant") != (algorithm.aggregation_constant is not None):
        yield (
            f"algorithm.aggregation={algorithm.aggregation!r} and algorithm.aggregation_constant="
            f"{algorithm.aggregation_constant} go together: 'constant' needs a constant, and no other uses it"
        )


def _reference(config: RunConfig) -> Iterator[str]:
    algorithm = config.algorithm
    if algorithm.reference is not None and algorithm.kl_coef == 0:
        yield f"algorithm.reference={str(algorithm.reference)!r} has no effect with algorithm.kl_coef=0; set kl_coef above 0"
    if algorithm.kl_coef > 0 and algorithm.kl_in == "loss" and algorithm.kl_estimator == "k1" and algorithm.kl_form == "plain":
        yield (
            "algorithm.kl_estimator='k1' as a plain loss has an expected gradient of zero: it trains nothing; set "
            "algorithm.kl_form='unbiased' or algorithm.kl_in='reward'"
        )


def _turn_credit(config: RunConfig) -> Iterator[str]:
    algorithm = config.algorithm
    if algorithm.credit == "turns" and algorithm.advantage not in ("grpo", "dr_grpo"):
        yield (
            f"algorithm.credit='turns' with algorithm.advantage={algorithm.advantage!r}, which knows whole trajectories only; "
            "set algorithm.advantage to grpo or dr_grpo, or algorithm.credit='trajectory'"
        )
    if algorithm.credit != "turns" and algorithm.turn_discount != 1.0:
        yield f"algorithm.turn_discount={algorithm.turn_discount} has no effect with algorithm.credit='trajectory'; remove it"


def _critic(config: RunConfig) -> Iterator[str]:
    advantage, loss = config.algorithm.advantage, config.algorithm.loss
    if advantage != "gae":
        for name, default in CriticConfig():
            if getattr(config.critic, name) != default:
                yield (
                    f"critic.{name}={getattr(config.critic, name)!s} has no effect with algorithm.advantage={advantage!r}, "
                    "which has no critic; set algorithm.advantage='gae', or remove it"
                )
    elif loss in SEQUENCE_LOSSES:
        yield (
            f"algorithm.loss={loss!r} has one ratio for a whole sequence, and algorithm.advantage='gae' credits each token: "
            "their gradient would be no policy gradient; use a loss per token such as algorithm.loss='decoupled_clip'"
        )


def _reward_shape(config: RunConfig) -> Iterator[str]:
    buffer, longest = config.algorithm.overlong_buffer, config.rollout.max_new_tokens
    if buffer > longest:
        yield (
            f"algorithm.overlong_buffer={buffer} exceeds rollout.max_new_tokens={longest}: every answer would be penalised; "
            f"set it to {longest} or less"
        )
    if config.algorithm.dynamic_sampling and config.rollout.group_size < 2:
        yield "algorithm.dynamic_sampling drops every group of one, whose rewards cannot differ; raise rollout.group_size"


def _lag_of_one_batch(config: RunConfig) -> Iterator[str]:
    """The last of m steps from one drawn batch is m − 1 steps further than the first, on weights up to push_every − 1 old."""
    push_every, steps, max_lag = config.weights.push_every, config.trainer.steps_per_batch, config.staleness.max_lag
    needed = push_every + steps - 2
    if needed <= max_lag:
        return
    if steps == 1:
        yield (
            f"weights.push_every={push_every} exceeds staleness.max_lag + 1 = {max_lag + 1}: engines would fall behind by "
            f"{needed} steps between two pushes; raise staleness.max_lag to {needed} or push more often"
        )
    elif push_every == 1:
        yield (
            f"trainer.steps_per_batch={steps} exceeds staleness.max_lag + 1 = {max_lag + 1}: the last step of a drawn batch "
            f"trains data that is {needed} steps old; raise staleness.max_lag to {needed} or set "
            f"trainer.steps_per_batch={max_lag + 1}"
        )
    else:
        yield (
            f"weights.push_every={push_every} and trainer.steps_per_batch={steps} need staleness.max_lag >= push_every + "
            f"steps_per_batch - 2 = {needed}, but it is {max_lag}; raise staleness.max_lag to {needed}, push more often or "
            f"take fewer steps from a batch"
        )


def _context(config: RunConfig) -> Iterator[str]:
    context, new = config.rollout.max_context, config.rollout.max_new_tokens
    if context is not None and new >= context:
        yield (
            f"rollout.max_new_tokens={new} leaves no room for a prompt in rollout.max_context={context}; "
            f"set rollout.max_new_tokens below {context} or raise rollout.max_context"
        )


def _engine_capacity(config: RunConfig) -> Iterator[str]:
    """All members of a group are sampled under one lease: a group that cannot run at once would outlive it half-sampled."""
    size, running = config.rollout.group_size, config.rollout.max_running
    if size > running:
        yield (
            f"rollout.group_size={size} exceeds rollout.max_running={running}: a whole group must fit into the engine; "
            f"raise rollout.max_running to {size} or lower rollout.group_size"
        )


def _rewards(config: RunConfig) -> Iterator[str]:
    name, reward = config.environment.name, config.environment.reward
    if name == "prompt_reward" and reward is None:
        yield (
            "environment.reward is not set with environment.name='prompt_reward': nothing would score the completions; "
            "set environment.reward to module:function"
        )
    if name == "sort_digits" and reward is not None:
        yield (
            f"environment.reward={reward!r} has no effect with environment.name='sort_digits', which scores by itself; "
            f"remove it or set environment.name='prompt_reward'"
        )
    for key, value in (("environment.reward", reward), ("environment.name", name if ":" in name else None)):
        if value is not None and not all(value.partition(":")[::2]):
            yield f"{key}={value!r} is no module:name reference; write it as package.module:name"


def _schedule(config: RunConfig) -> Iterator[str]:
    warmup, steps = config.trainer.warmup_steps, config.trainer.max_steps
    if warmup > 0 and warmup >= steps:
        yield (
            f"trainer.warmup_steps={warmup} is not below trainer.max_steps={steps}: the learning rate would never reach its "
            f"peak; lower trainer.warmup_steps or raise trainer.max_steps"
        )


def _betas(config: RunConfig) -> Iterator[str]:
    for index, beta in enumerate(config.trainer.betas):
        if not 0 <= beta < 1:
            yield f"trainer.betas[{index}]={beta} is no decay rate of AdamW; it must be at least 0 and below 1"


def _redis(config: RunConfig) -> Iterator[str]:
    schemes = ("redis://", "rediss://", "unix://")
    if config.redis.url != "embedded" and not config.redis.url.startswith(schemes):
        shown = config.redis.url.partition("@")[2] or config.redis.url
        yield f"redis.url={shown!r} is no address of a server; use 'embedded' or one that starts with {', '.join(schemes)}"
    if "?" in config.redis.url and "password=" in config.redis.url.partition("?")[2]:
        yield "redis.url has its password behind the '?', where other logs show it; write user:password@ before the host"
    elif (problem := _bad_place(config.redis.url)) is not None:
        yield f"redis.url {problem}; write redis://host:port/number"
    redis = config.redis
    files = {"ca_file": redis.ca_file, "cert_file": redis.cert_file, "key_file": redis.key_file}
    for name, path in files.items():
        if path is not None and not redis.url.startswith("rediss://"):
            yield f"redis.{name}={str(path)!r} has no effect without TLS; use a rediss:// address, or remove it"
        elif path is not None and not path.is_file():
            yield f"redis.{name}={str(path)!r} is no file; give a PEM file"
    if (redis.cert_file is None) != (redis.key_file is None):
        given, missing = ("cert_file", "key_file") if redis.key_file is None else ("key_file", "cert_file")
        yield f"redis.{given} is set and redis.{missing} is not: a certificate and its key go together; set both, or none"


def _bad_place(url: str) -> str | None:
    """What is wrong with the host or port of an address; None for one that has neither."""
    if not url.startswith(("redis://", "rediss://")):
        return None
    try:
        parts = urlsplit(url)
        port = parts.port
    except ValueError as error:
        return f"cannot be read: {str(error).lower()}"
    if not parts.hostname:
        return "names no host"
    return "has port 0" if port == 0 else None


def _waits(config: RunConfig) -> Iterator[str]:
    """Two waits of which one bounds the other."""
    launch = config.launch
    if launch.backoff_s > launch.max_backoff_s:
        yield (
            f"launch.backoff_s={launch.backoff_s:g} is above launch.max_backoff_s={launch.max_backoff_s:g}: the first wait "
            f"before a restart cannot be longer than the longest; lower one or raise the other"
        )


def _world_size(config: RunConfig) -> Iterator[str]:
    size, groups = config.trainer.world_size, config.trainer.groups_per_step
    trajectories = groups * config.rollout.group_size
    if size > trajectories:
        yield (
            f"trainer.world_size={size} exceeds the {trajectories} trajectories of a step (trainer.groups_per_step={groups} × "
            f"rollout.group_size={config.rollout.group_size}): some ranks would never have work; lower trainer.world_size"
        )


def _vllm(config: RunConfig) -> Iterator[str]:
    rollout = config.rollout
    servers, workers = rollout.vllm.servers, rollout.workers
    if servers and rollout.engine != "vllm-server":
        yield (
            f"rollout.vllm.servers has {len(servers)} addresses, which rollout.engine={rollout.engine!r} does not use; set "
            "rollout.engine='vllm-server' or remove them"
        )
    elif servers and workers > len(servers):
        yield (
            f"rollout.workers={workers} exceeds the {len(servers)} addresses of rollout.vllm.servers: a server takes its "
            f"weights from one worker; set rollout.workers={len(servers)} or name more servers"
        )
    for address in servers:
        if not address.startswith(("http://", "https://")):
            yield f"rollout.vllm.servers holds {address!r}, no address of a server; write it as http://host:port"
    if rollout.engine != "torch" and rollout.temperature < 0.01:
        yield (
            f"rollout.temperature={rollout.temperature} is below 0.01 with rollout.engine={rollout.engine!r}: vLLM would "
            "sample at 0.01; raise it, or set rollout.engine='torch'"
        )
    if len(set(servers)) < len(servers):
        yield "rollout.vllm.servers names a server twice: a server takes its weights from one worker; name each once"


def _shard_size(config: RunConfig) -> Iterator[str]:
    shard, size = config.trainer.shard_size, config.trainer.world_size
    if shard is not None and size % shard:
        fitting = [str(n) for n in range(1, size + 1) if size % n == 0]
        yield (
            f"trainer.shard_size={shard} does not divide trainer.world_size={size}: copies of the model would be of unequal "
            f"size; set it to {' or '.join(fitting)}"
        )


def _nccl(config: RunConfig) -> Iterator[str]:
    devices = {"trainer.device": config.trainer.device, "rollout.device": config.rollout.device}
    if config.weights.backend != "nccl":
        return
    for key, device in devices.items():
        if not device.startswith("cuda"):
            yield f"weights.backend='nccl' moves weights between GPUs, but {key}={device!r}; set it to 'cuda' or use 'gloo'"


CHECKS: Sequence[Check] = (
    _truncated_sampling,
    _group_size,
    _objective_names,
    _ratios,
    _aggregation,
    _reference,
    _turn_credit,
    _critic,
    _reward_shape,
    _lag_of_one_batch,
    _context,
    _engine_capacity,
    _rewards,
    source_checks.data,
    source_checks.mix,
    source_checks.evaluation,
    _schedule,
    _betas,
    _redis,
    _waits,
    _world_size,
    _vllm,
    _shard_size,
    _nccl,
)
