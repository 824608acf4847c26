"""A run of every role with a critic: stopped and resumed, then trained again from its log: both models bit for bit."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from async_rl import RunConfig, run
from async_rl.checks.audit import audit
from async_rl.config import load_config
from async_rl.launch.demo_model import demo_model, demo_tokenizer, save_model
from async_rl.run_dir.files import read_json_lines
from async_rl.trainer.checkpoint import CRITIC, MODEL, model_state
from async_rl.trainer.replay import replay

REWARD = """
def score(completion, row):
    return sum(map(ord, completion + row["answer"])) % 2  # of an untrained model too, answers have both
"""
SETTINGS = {
    "environment.name": "prompt_reward",
    "environment.reward": "parity_reward:score",
    "rollout.group_size": 1,
    "rollout.max_new_tokens": 5,
    "algorithm.advantage": "gae",
    "critic.learning_rate": 1e-3,
    "critic.updates_per_step": 2,
    "trainer.groups_per_step": 8,
    "trainer.steps_per_batch": 2,
    "trainer.learning_rate": 1e-3,
    "checkpoint.every_steps": 2,
    "redis.lease_s": 3.0,
}


def config_of(directory: Path, max_steps: int) -> RunConfig:
    tokenizer = demo_tokenizer()
    model, rows = directory / "model", directory / "rows.jsonl"
    if not model.exists():
        save_model(model, demo_model(tokenizer, seed=0), tokenizer)
        rows.write_text("".join(json.dumps({"prompt": f"{row}>", "answer": str(row)}) + "\n" for row in range(64)))
        (directory / "parity_reward.py").write_text(REWARD)
    paths = {"run_dir": directory / "run", "model.path": model, "data.source": rows, "trainer.max_steps": max_steps}
    return load_config(None, [f"--{key}={value}" for key, value in {**paths, **SETTINGS}.items()], {}).config


def test_a_resumed_run_with_groups_of_one_replays_bit_for_bit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    config = config_of(tmp_path, 2)
    assert run(config, console=False).exit_code == 0
    assert replay(config).is_identical
    config = config_of(tmp_path, 4)
    assert run(config, resume=True, console=False).exit_code == 0
    assert audit(config.run_dir).is_exact
    lines = list(read_json_lines(config.run_dir / "metrics.jsonl"))
    assert [line["step"] for line in lines] == [1, 2, 3, 4]
    assert all(line["value_loss"] > 0 and line["critic_updates"] == 2 for line in lines)
    assert lines[0]["explained_variance"] == 0.0  # it knew nothing
    assert lines[2]["explained_variance"] != 0.0
    resumed = replay(config, start=2)  # the log below is compacted
    assert resumed.is_identical
    saved = model_state(resumed.checkpoint, CRITIC + MODEL)
    assert saved["head.weight"].any()
    before = model_state(config.run_dir / "checkpoints" / "step_00000002", CRITIC + MODEL)
    assert all(not torch.equal(saved[name], before[name]) for name in saved)
