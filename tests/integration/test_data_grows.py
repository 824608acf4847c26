"""A prompt file that changes between two starts of a run, on real command lines."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

from async_rl.testing.tiny_models import save_tiny_model

BOUNDED_S = 120.0


def test_appended_rows_are_said_and_trained_and_removed_ones_refused(tmp_path: Path) -> None:
    save_tiny_model(tmp_path / "model", num_hidden_layers=1)
    (tmp_path / "grown_rewards.py").write_text("def score(completion, row):\n    return float(len(completion) % 3)\n")
    rows = [json.dumps({"prompt": f"{index}>"}) + "\n" for index in range(6)]
    prompts = tmp_path / "prompts.jsonl"
    prompts.write_text("".join(rows[:4]))
    flags = [
        *(f"--run_dir={tmp_path}/run", f"--model.path={tmp_path}/model", f"--data.source={prompts}"),
        *("--environment.name=prompt_reward", "--environment.reward=grown_rewards:score", "--data.shuffle=false"),
        *("--data.data_epochs=1", "--rollout.group_size=2", "--rollout.max_new_tokens=4", "--trainer.groups_per_step=2"),
    ]
    (tmp_path / "empty.toml").write_text("")

    def async_rl(*arguments: str) -> subprocess.CompletedProcess[str]:
        command = [sys.executable, "-m", "workers.cli", *arguments]
        env = {**os.environ, "PYTHONPATH": str(tmp_path), "OMP_NUM_THREADS": "1"}
        return subprocess.run(command, capture_output=True, text=True, timeout=BOUNDED_S, check=False, env=env, cwd=tmp_path)

    first = async_rl("run", "empty.toml", *flags, "--trainer.max_steps=9")
    assert first.returncode == 0, first.stdout + first.stderr
    prompts.write_text("".join(rows[:3]))
    refused = async_rl("run", "empty.toml", *flags, "--resume")
    assert refused.returncode == 3
    assert "has 3 rows, and had 4 when the run was last started" in refused.stderr
    assert refused.stderr.count("\n") == 1
    prompts.write_text("".join(rows))
    grown = async_rl("run", "empty.toml", *flags, "--trainer.max_steps=9", "--resume")
    assert grown.returncode == 0, grown.stdout + grown.stderr
    assert "2 rows appended, 4 → 6" in grown.stdout
    assert "2 rows were appended; they are used from data epoch 0 on" in grown.stdout
    audit = async_rl("audit", f"{tmp_path}/run")
    assert audit.returncode == 0
    counts = {line.rsplit(maxsplit=1)[0].strip(): line.split()[-1] for line in audit.stdout.splitlines() if line.strip()}
    assert (counts["issued"], counts["trained"], counts["lost"], counts["trained twice"]) == ("6", "6", "0", "0")
