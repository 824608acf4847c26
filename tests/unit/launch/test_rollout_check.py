"""One engine, checked alone: started, pushed to, proven and measured. Here the built-in one; the same code checks vLLM."""

from __future__ import annotations

from pathlib import Path

import pytest
from rich.console import Console

from async_rl.config import RunConfig, load_config
from async_rl.launch.demo_model import demo_model, demo_tokenizer, save_model
from async_rl.launch.rollout_check import check_rollout, print_check


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
