from __future__ import annotations

import math
from typing import Any, get_args, get_origin

import pytest
from pydantic import ValidationError

from async_rl.config import RunConfig, check
from async_rl.config.fields import leaf_fields
from async_rl.errors import ConfigError


def config(**sections: dict[str, Any]) -> RunConfig:
    return RunConfig.model_validate({"model": {"path": "/m"}, **sections})


def test_defaults_pass():
    check(config())


@pytest.mark.parametrize("advantage", ["reinforce_pp", "gae"])
def test_an_estimator_that_needs_no_siblings_may_have_groups_of_one(advantage):
    check(config(rollout={"group_size": 1}, algorithm={"advantage": advantage}))


def test_a_critic_may_be_set_where_there_is_one():
    check(config(algorithm={"advantage": "gae"}, critic={"gae_lambda": 1.0, "value_clip": None}))


@pytest.mark.parametrize(
    ("loss", "clip", "aggregation"),
    [
        ("decoupled_clip", (0.2, 0.28), "token_mean"),
        ("gspo", (3e-4, 4e-4), "sequence_mean_of_means"),
        ("gmpo", (0.4, 0.4), "sequence_mean_of_means"),
        ("cispo", (1.0, 4.0), "token_mean"),
    ],
)
def test_each_loss_brings_the_defaults_of_its_paper(loss, clip, aggregation):
    algorithm = config(algorithm={"loss": loss}).algorithm
    assert (algorithm.clip, algorithm.aggregation_name) == (clip, aggregation)
    assert config(algorithm={"loss": loss, "clip_high": 0.5}).algorithm.clip == (clip[0], 0.5)


@pytest.mark.parametrize(
    ("sections", "parts"),
    [
        ({"rollout": {"top_p": 0.9}}, ["rollout.top_p=0.9", "below 1.0", "stored support", "top_p=1.0"]),
        ({"rollout": {"top_k": 20}}, ["rollout.top_k=20", "above 0", "stored support", "top_k=0"]),
        ({"trainer": {"world_size": 6, "shard_size": 4}}, ["shard_size=4", "world_size=6", "1 or 2 or 3 or 6"]),
        ({"weights": {"backend": "nccl"}, "trainer": {"device": "cuda"}}, ["backend='nccl'", "rollout.device='cpu'", "gloo"]),
        ({"rollout": {"group_size": 1}}, ["rollout.group_size=1", "'grpo'", "always 0", "group_size=2"]),
        (
            {"rollout": {"group_size": 1}, "algorithm": {"advantage": "rloo"}},
            ["rollout.group_size=1", "'rloo'", "group-relative"],
        ),
        ({"algorithm": {"loss": "ppo2"}}, ["algorithm.loss='ppo2' is unknown", "clipped_surrogate", "module:function"]),
        ({"algorithm": {"advantage": "gae2"}}, ["algorithm.advantage='gae2' is unknown", "rloo"]),
        ({"algorithm": {"loss_args": {"a": 1}}}, ["algorithm.loss_args", "built-in"]),
        ({"critic": {"gae_lambda": 0.9}}, ["critic.gae_lambda=0.9 has no effect", "'grpo'", "set algorithm.advantage='gae'"]),
        ({"algorithm": {"advantage": "gae", "loss": "gspo"}}, ["algorithm.loss='gspo'", "each token", "'decoupled_clip'"]),
        (
            {"algorithm": {"loss": "decoupled_clip", "anchor": "behavior"}},
            ["algorithm.anchor='behavior' contradicts", "proximal policy", "algorithm.loss='clipped_surrogate'"],
        ),
        (
            {"algorithm": {"loss": "decoupled_clip", "importance": "none"}},
            ["algorithm.importance='none'", "who sampled", "'truncate'"],
        ),
        (
            {"algorithm": {"importance_level": "sequence"}},
            ["algorithm.importance_level='sequence' has no effect", "'clipped_surrogate'", "algorithm.loss='decoupled_clip'"],
        ),
        ({"algorithm": {"loss": "gspo", "importance": "mask"}}, ["algorithm.importance='mask' has no effect", "'gspo'"]),
        ({"algorithm": {"loss": "cispo", "dual_clip": 3.0}}, ["algorithm.dual_clip has no effect", "'cispo'"]),
        (
            {"algorithm": {"loss": "decoupled_clip", "importance_floor": 0.5}},
            ["importance_floor has no effect", "importance='mask'"],
        ),
        ({"algorithm": {"clip_low": 1.0}}, ["algorithm.clip_low=1.0", "no lower bound"]),
        ({"algorithm": {"aggregation": "constant"}}, ["aggregation='constant'", "needs a constant"]),
        ({"algorithm": {"reference": "/m"}}, ["algorithm.reference='/m'", "kl_coef"]),
        (
            {"algorithm": {"kl_coef": 0.1, "kl_estimator": "k1", "kl_form": "plain"}},
            ["algorithm.kl_estimator='k1'", "trains nothing", "kl_form='unbiased'"],
        ),
        ({"algorithm": {"overlong_buffer": 65}, "rollout": {"max_new_tokens": 64}}, ["overlong_buffer=65", "set it to 64"]),
        (
            {"algorithm": {"dynamic_sampling": True, "advantage": "reinforce_pp"}, "rollout": {"group_size": 1}},
            ["algorithm.dynamic_sampling", "cannot differ"],
        ),
        ({"rollout": {"max_context": 64, "max_new_tokens": 64}}, ["max_new_tokens=64", "max_context=64", "below 64"]),
        ({"rollout": {"group_size": 8, "max_running": 4}}, ["group_size=8", "max_running=4", "raise rollout.max_running to 8"]),
        (
            {"environment": {"name": "prompt_reward"}, "data": {"source": "x.jsonl"}},
            ["environment.reward is not set", "module:function"],
        ),
        ({"environment": {"name": "prompt_reward", "reward": "m:f"}}, ["data.source='environment'", ".jsonl"]),
        ({"environment": {"reward": "m:f"}}, ["environment.reward='m:f'", "sort_digits"]),
        (
            {"environment": {"name": "prompt_reward", "reward": "mf"}, "data": {"source": "x.jsonl"}},
            ["environment.reward='mf'", "module:name"],
        ),
        ({"environment": {"name": "m:"}}, ["environment.name='m:'", "module:name"]),
        ({"trainer": {"warmup_steps": 10, "max_steps": 10}}, ["warmup_steps=10", "max_steps=10"]),
        ({"trainer": {"betas": (0.9, 1.0)}}, ["trainer.betas[1]=1.0", "below 1"]),
        ({"trainer": {"betas": (-0.1, 0.9)}}, ["trainer.betas[0]=-0.1", "at least 0"]),
        ({"redis": {"url": "http://host"}}, ["redis.url", "redis://", "embedded"]),
        ({"redis": {"url": "redis://h?password=s"}}, ["redis.url", "before the host"]),
        ({"redis": {"url": "redis://h", "ca_file": "/ca.pem"}}, ["redis.ca_file='/ca.pem'", "without TLS", "rediss://"]),
        ({"redis": {"url": "rediss://h", "ca_file": "/none.pem"}}, ["redis.ca_file='/none.pem' is no file"]),
        ({"redis": {"url": "rediss://h", "cert_file": __file__}}, ["redis.cert_file is set", "redis.key_file is not"]),
        ({"redis": {"url": "rediss://h", "key_file": __file__}}, ["redis.key_file is set", "redis.cert_file is not"]),
        ({"redis": {"url": "redis://:6379/0"}}, ["redis.url names no host", "redis://host:port/number"]),
        ({"redis": {"url": "redis://h:99999/0"}}, ["redis.url cannot be read: port out of range"]),
        ({"redis": {"url": "redis://h:x/0"}}, ["redis.url cannot be read: port could not be cast"]),
        ({"launch": {"backoff_s": 60.0}}, ["launch.backoff_s=60", "launch.max_backoff_s=30", "raise the other"]),
        (
            {"data": {"mix": [{"source": "a.jsonl", "weight": math.nan}]}, "environment": {"name": "verify"}},
            ["data.mix[0].weight=nan", "finite"],
        ),
        ({"trainer": {"world_size": 9, "groups_per_step": 1}}, ["world_size=9", "8 trajectories"]),
        ({"rollout": {"vllm": {"servers": ["http://a"]}}}, ["rollout.vllm.servers has 1", "'torch'", "vllm-server"]),
        (
            {"rollout": {"engine": "vllm-server", "workers": 2, "vllm": {"servers": ["http://a"]}}},
            ["rollout.workers=2", "exceeds the 1 addresses", "rollout.workers=1"],
        ),
        (
            {"rollout": {"engine": "vllm-server", "vllm": {"servers": ["a:1"]}}},
            ["rollout.vllm.servers holds 'a:1'", "http://host:port"],
        ),
        (
            {"rollout": {"engine": "vllm-server", "vllm": {"servers": ["http://a", "http://a"]}}},
            ["rollout.vllm.servers names a server twice"],
        ),
        ({"rollout": {"engine": "vllm", "temperature": 0.001}}, ["rollout.temperature=0.001", "below 0.01", "'torch'"]),
    ],
)
def test_what_cannot_work_is_refused_with_field_value_bound_and_remedy(sections, parts):
    with pytest.raises(ConfigError) as error:
        check(config(**sections))
    message = str(error.value)
    assert "\n" not in message
    for part in parts:
        assert part in message


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("redis.lease_s", 1e-9),
        ("redis.lease_s", 1e12),
        ("redis.timeout_s", 0.0),
        ("redis.retry_s", -1.0),
        ("redis.max_message_bytes", 2**40),
        ("launch.stop_s", math.nan),
        ("launch.backoff_s", math.inf),
        ("reward.timeout_s", 1e-6),
        ("reward.workers", 10**7),
        ("rollout.temperature", 1e-9),
        ("rollout.temperature", 1e9),
        ("rollout.workers", -1),
        ("rollout.max_new_tokens", 10**12),
        ("rollout.device", "gpu"),
        ("rollout.device", "cuda:x"),
        ("trainer.device", ""),
        ("trainer.learning_rate", 10.0),
        ("trainer.learning_rate", -1e-5),
        ("trainer.max_steps", 10**30),
        ("trainer.weight_decay", 100.0),
        ("trainer.num_threads", 10**6),
        ("checkpoint.every_s", 1e-9),
        ("staleness.max_lag", 10**20),
        ("weights.deadline_s", 1e-9),
        ("algorithm.kl_coef", 1e9),
        ("algorithm.advantage_eps", 1e9),
        ("validation.tolerance", math.inf),
    ],
)
def test_absurd_values_are_out_of_bounds(key, value):
    section, _, name = key.partition(".")
    with pytest.raises(ValidationError) as error:
        config(**{section: {name: value}})
    assert [item["loc"] for item in error.value.errors()] == [(section, name)]


def test_every_number_has_a_lower_and_an_upper_bound():
    for key, field in leaf_fields(RunConfig).items():
        numeric = {int, float} & {field.annotation, *get_args(field.annotation)}
        if not numeric or get_origin(field.annotation) in (tuple, list, dict):
            continue
        kinds = {type(bound).__name__ for bound in field.metadata}
        assert kinds & {"Ge", "Gt"}, key
        assert kinds & {"Le", "Lt"}, key


@pytest.mark.parametrize(
    ("push_every", "steps_per_batch", "max_lag", "allowed"),
    [
        (1, 1, 0, True),  # 1 + 1 - 2 = 0
        (2, 1, 0, False),
        (1, 2, 0, False),
        (2, 1, 1, True),
        (1, 2, 1, True),
        (2, 2, 1, False),  # 2 + 2 - 2 = 2
        (2, 2, 2, True),
        (5, 1, 4, True),
        (6, 1, 4, False),
        (1, 5, 4, True),
        (1, 6, 4, False),
        (4, 3, 4, False),  # 4 + 3 - 2 = 5
        (4, 2, 4, True),
    ],
)
def test_steps_of_one_batch_between_two_pushes_stay_within_max_lag(push_every, steps_per_batch, max_lag, allowed):
    tried = config(
        weights={"push_every": push_every}, trainer={"steps_per_batch": steps_per_batch}, staleness={"max_lag": max_lag}
    )
    if allowed:
        check(tried)
        return
    with pytest.raises(ConfigError, match=rf"raise staleness\.max_lag to {push_every + steps_per_batch - 2}"):
        check(tried)


def test_two_steps_per_batch_at_lag_0_name_the_lag_of_the_second_step():
    with pytest.raises(ConfigError, match=r"trainer\.steps_per_batch=2 exceeds staleness\.max_lag \+ 1 = 1.*1 steps old"):
        check(config(trainer={"steps_per_batch": 2}, staleness={"max_lag": 0}))


def test_pushing_too_rarely_is_named_by_the_push():
    with pytest.raises(ConfigError, match=r"weights\.push_every=3 exceeds staleness\.max_lag \+ 1 = 2"):
        check(config(weights={"push_every": 3}, staleness={"max_lag": 1}))


def test_all_problems_are_listed_and_no_password_is():
    with pytest.raises(ConfigError) as error:
        check(config(rollout={"top_p": 0.5, "top_k": 3}, redis={"url": "http://user:hunter2@host"}))
    lines = str(error.value).splitlines()
    assert lines[0] == "3 settings that cannot work:"
    assert len(lines) == 4
    assert "hunter2" not in str(error.value)
