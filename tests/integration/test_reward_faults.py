"""Rewards that raise, hang, are no number, or kill their process, in a whole run: as if those rows had not been there."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

import numpy as np
import pytest

from async_rl import run
from async_rl.algorithms.advantages import ADVANTAGES, credit_groups, group_rewards
from async_rl.algorithms.credit import AdvantageSettings, RewardGroup
from async_rl.algorithms.staleness import GroupVerdict
from async_rl.checks.audit import audit
from async_rl.config import load_config
from async_rl.launch.demo_model import demo_model, demo_tokenizer, save_model
from async_rl.monitor.trajectories import ShownGroup, find_groups
from async_rl.run_dir.files import read_json_lines
from async_rl.run_dir.layout import RunLayout

FAULTS = '''
import os, signal, time, zlib

def verify(completion, row):
    """The row says which fault two of five completions meet, by their text; the others are scored by it too."""
    number = zlib.crc32(completion.encode())
    if number % 5 > 1:
        return (number % 7) / 7
    kind = row["kind"]
    if kind == 0:
        raise ZeroDivisionError("a verifier that raises")
    if kind == 1:
        return float("nan")
    if kind == 2:
        os.kill(os.getpid(), signal.SIGKILL)
    time.sleep(60)
'''
KINDS = {"ZeroDivisionError", "NotFinite", "crash", "timeout"}


def test_faults_of_rewards_leave_baseline_and_loss_as_if_those_rows_were_not_there(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "faulty_rewards.py").write_text(FAULTS)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    monkeypatch.syspath_prepend(str(tmp_path))
    (tmp_path / "rows.jsonl").write_text(
        "".join(f'{{"prompt": "{number}>", "kind": {number % 4}}}\n' for number in range(100, 140))
    )
    save_model(tmp_path / "model", demo_model(demo_tokenizer(), seed=0), demo_tokenizer())
    settings = {
        "run_dir": tmp_path / "run", "model.path": tmp_path / "model", "data.source": tmp_path / "rows.jsonl",
        "environment.name": "prompt_reward", "environment.reward": "faulty_rewards:verify", "reward.placement": "workers",
        "reward.timeout_s": 0.3, "rollout.group_size": 5, "rollout.max_new_tokens": 5, "trainer.groups_per_step": 4,
        "trainer.max_steps": 2, "redis.lease_s": 3.0, "data.shuffle": "false",
    }  # fmt: skip
    config = load_config(None, [f"--{key}={value}" for key, value in settings.items()], {}).config
    assert run(config, console=False).exit_code == 0
    assert audit(config.run_dir).is_exact
    lines = list(read_json_lines(config.run_dir / "metrics.jsonl"))
    assert [line["step"] for line in lines] == [1, 2]
    named = sum((Counter(line["rewards_invalid"]) for line in lines), Counter[str]())
    assert set(named) == KINDS
    trained = [shown for shown in find_groups(config.run_dir, task_id=None, step=None, limit=100) if shown.use is not None]
    assert len(trained) >= 8
    for shown in trained:
        faults_are_as_if_not_there(shown)
    last = list(read_json_lines(RunLayout(config.run_dir).worker_metrics_jsonl("reward-0")))[-1]
    assert set(last["invalid"]) == KINDS
    assert last["latency_invalid"]["timeout"]["p50_s"] >= 0.25


def faults_are_as_if_not_there(shown: ShownGroup) -> None:
    """Every estimator credits the scored members as it would in a group without the others, which get nothing."""
    assert shown.use is not None
    rewards, valid = group_rewards(shown.group, GroupVerdict.from_record(shown.use.verdict))
    scored = [trajectory.reward is not None and trajectory.reward.is_valid for trajectory in shown.group.trajectories]
    assert valid.tolist() == scored
    whole, without = RewardGroup.of(rewards, valid), RewardGroup.of(rewards[valid])
    if valid.sum() < 2:
        return
    for estimator in ADVANTAGES.values():
        ((credited,), (expected,)) = (credit_groups([one], estimator, AdvantageSettings()) for one in (whole, without))
        np.testing.assert_array_equal(credited[valid], expected)
        assert not credited[~valid].any()
