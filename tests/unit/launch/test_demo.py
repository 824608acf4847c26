"""The demo around its run: config, model, evaluation, figures."""

from __future__ import annotations

import io
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from rich.console import Console

from async_rl.config import check
from async_rl.errors import ConfigError
from async_rl.evaluation.held_out import EvaluationPlan, SampleCompletion
from async_rl.launch import demo
from async_rl.launch.evaluate import evaluate_model
from async_rl.launch.prepare import prepare
from async_rl.launch.warmup import WarmupPlan
from async_rl.monitor.figures import RunFigures
from async_rl.run_dir.layout import RunLayout, create_run

KEYS = [
    "accuracy_start",
    "accuracy_end",
    "train_seconds",
    "steps",
    "lag_mean",
    "lag_max",
    "dropped_share",
    "push_p50_s",
    "trainer_idle_share",
    "rollout_idle_share",
    "parity_max_abs",
    "parity_tokens",
    "tokens_trained_per_s",
]


def quiet() -> Console:
    return Console(file=io.StringIO(), width=100)


def test_the_model_is_made_in_the_run_directory_unless_one_is_named(tmp_path: Path) -> None:
    made = demo.demo_config([f"--run_dir={tmp_path}/d", "--trainer.max_steps=3"])
    assert made.model.path == tmp_path / "d" / "model"
    assert made.trainer.max_steps == 3
    assert demo.demo_config([f"--model.path={tmp_path}/mine"]).model.path == tmp_path / "mine"
    check(made)


def test_a_resumed_demo_keeps_the_settings_that_it_was_started_with(tmp_path: Path) -> None:
    first = demo.demo_config([f"--run_dir={tmp_path}/d", "--environment.args.length=3", "--seed=4"])
    prepare(first, resume=False, overwrite=False)
    assert demo.demo_config([f"--run_dir={tmp_path}/d"], resume=True) == first
    further = demo.demo_config([f"--run_dir={tmp_path}/d", "--trainer.max_steps=9"], resume=True)
    assert (further.trainer.max_steps, further.environment.args, further.seed) == (9, {"length": 3}, 4)


def test_a_task_without_prompts_of_its_own_is_refused_before_anything_is_written(tmp_path: Path) -> None:
    config = demo.demo_config(
        [
            f"--run_dir={tmp_path}/d",
            "--environment.name=prompt_reward",
            "--environment.reward=operator:eq",
            "--data.source=x.jsonl",
            "--environment.args={}",
        ]
    )
    with pytest.raises(ConfigError, match="brings no prompts of its own"):
        demo.run_demo(config, console=quiet())
    assert not (tmp_path / "d").exists()


def test_the_model_is_made_once_from_the_seed_and_evaluated_like_a_rollout(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    torch.set_num_threads(1)
    monkeypatch.setattr(demo, "WarmupPlan", lambda seed: WarmupPlan(steps=60, batch_size=32, seed=seed))
    config = demo.demo_config([f"--run_dir={tmp_path}/d", "--environment.args.length=2"])
    layout, _ = create_run(config.run_dir)
    demo.make_model(config, layout, quiet())
    weights = (layout.model_dir / "model.safetensors").read_bytes()
    demo.make_model(config, layout, quiet())
    assert (layout.model_dir / "model.safetensors").read_bytes() == weights

    result = evaluate_model(config, layout.model_dir, EvaluationPlan(num_prompts=10, max_new_tokens=6, num_samples=10))
    assert result.num_prompts == 10
    assert result.mean_reward > 0.3  # sorting two digits is easy
    for sample in result.samples:
        digits = sample.prompt.removesuffix(">")
        assert sample.reward == float(sample.completion == "".join(sorted(digits)))
    assert (
        evaluate_model(config, layout.model_dir, EvaluationPlan(num_prompts=10, max_new_tokens=6)).samples == result.samples[:8]
    )


def test_summary_has_the_documented_keys() -> None:
    figures = RunFigures(800, 100.0, 1.0, 3, 0.0, 0.0, 0.04, 0.1, 0.2, 1e-6, 500, 2000.0, {1: 5}, 801)
    summary = demo.summary_figures(figures, accuracy_start=0.4, accuracy_end=0.95)
    assert list(summary) == KEYS
    assert (summary["accuracy_start"], summary["steps"], summary["parity_tokens"]) == (0.4, 800, 500)
    assert demo.summary_figures(replace(figures, lag_mean=None), accuracy_start=0, accuracy_end=0)["lag_mean"] is None


def test_answers_are_paired_by_prompt() -> None:
    before = [SampleCompletion("21>", "2", 0.0), SampleCompletion("31>", "13", 1.0)]
    after = [SampleCompletion("31>", "13", 1.0), SampleCompletion("99>", "99", 1.0), SampleCompletion("21>", "12", 1.0)]
    paired = demo._paired(before, after)
    assert [(sample.prompt, sample.before, sample.after) for sample in paired] == [("31>", "13", "13"), ("21>", "2", "12")]


def test_the_next_commands_name_this_run(tmp_path: Path) -> None:
    config = demo.demo_config([f"--run_dir={tmp_path}/d"])
    commands = [command for command, _ in demo.next_commands(config, RunLayout(config.run_dir))]
    assert all(str(tmp_path / "d") in command for command in commands)
    assert any("--resume" in command and "--trainer.max_steps=1600" in command for command in commands)


@pytest.mark.parametrize(("length", "other"), [(6, 5), (5, 6), (7, 5)])
def test_another_length_is_suggested_than_the_one_just_trained(tmp_path: Path, length: int, other: int) -> None:
    config = demo.demo_config([f"--run_dir={tmp_path}/d", f"--environment.args.length={length}"])
    commands = [command for command, _ in demo.next_commands(config, RunLayout(config.run_dir))]
    assert [command for command in commands if command.endswith(f"d-{other} --environment.args.length={other}")]
    assert not any(f"length={length}" in command for command in commands)
