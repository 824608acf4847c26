"""One engine, checked alone: started, pushed to, proven and measured. Here the built-in one; the same code checks vLLM."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from pathlib import Path

import pytest
from rich.console import Console
from transformers import PreTrainedModel

from async_rl.config import RunConfig, load_config
from async_rl.errors import ProofFailed, WeightPushError
from async_rl.launch import rollout_check
from async_rl.launch.demo_model import demo_model, demo_tokenizer, save_model
from async_rl.launch.rollout_check import check_rollout, print_check
from async_rl.weights.collective_backend import CollectiveSender
from async_rl.weights.manifest import Probe


@pytest.fixture
def config(tmp_path: Path) -> RunConfig:
    tokenizer = demo_tokenizer()
    save_model(tmp_path / "model", demo_model(tokenizer, seed=0), tokenizer)
    settings = {
        "model.path": tmp_path / "model",
        "run_dir": tmp_path / "run",
        "environment.args.length": 3,
        "rollout.group_size": 2,
        "rollout.max_new_tokens": 4,
        "rollout.max_groups_in_flight": 3,
        "rollout.temperature": 0.8,
    }
    return load_config(None, [f"--{key}={value}" for key, value in settings.items()], {}).config


async def test_an_engine_is_started_pushed_to_proven_and_measured(config: RunConfig) -> None:
    result = await check_rollout(config, measure_s=0.0)
    assert result.push.live
    assert result.push.parity_max_abs is not None
    assert result.push.parity_max_abs <= 1e-4
    assert result.groups == 3
    assert result.tokens_per_s > 0
    console = Console(record=True, width=200)
    print_check(result, console)
    text = console.export_text()
    assert "tokens/s" in text
    assert "raise rollout.max_groups_in_flight" in text  # 6 sequences at a time, of 256


async def test_a_push_that_is_not_proven_ends_the_check_with_its_reason(
    config: RunConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    honest = rollout_check._probe

    def wrong(model: PreTrainedModel, config: RunConfig) -> Probe:
        probe = honest(model, config)
        return replace(probe, logprobs=tuple(logprobs + 1.0 for logprobs in probe.logprobs))

    monkeypatch.setattr(rollout_check, "_probe", wrong)
    with pytest.raises(ProofFailed, match="engine and trainer differ"):
        await check_rollout(config, measure_s=0.0)


async def test_who_cannot_take_part_in_the_push_is_not_waited_for(config: RunConfig, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nobody would report the push: without its publisher, the check would stand still until twice the deadline."""

    def prepare(*_: object) -> None:
        raise WeightPushError("the disk is full")

    monkeypatch.setattr(CollectiveSender, "prepare", prepare)
    with pytest.raises(ExceptionGroup) as caught:
        async with asyncio.timeout(20):
            await check_rollout(config, measure_s=0.0)
    assert caught.group_contains(WeightPushError, match="the disk is full")
