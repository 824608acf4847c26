"""Which version is evaluated next: real checkpoints, written out as models that stay."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from async_rl.config import load_config
from async_rl.config.evaluation import EvaluationConfig
from async_rl.errors import RunDirError
from async_rl.launch.demo_model import demo_model, demo_tokenizer, save_model
from async_rl.launch.evaluator import CheckpointVersions, engine_config
from async_rl.run_dir.layout import RunLayout
from async_rl.trainer.checkpoint import save_checkpoint
from async_rl.trainer.policy import load_policy
from async_rl.trainer.step import make_optimizer


@pytest.fixture(scope="module")
def model_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("model") / "tiny"
    tokenizer = demo_tokenizer()
    save_model(path, demo_model(tokenizer, seed=0), tokenizer)
    return path


@pytest.fixture
def layout(tmp_path: Path) -> RunLayout:
    return RunLayout(tmp_path / "run")


SCHEDULE = EvaluationConfig(every_steps=50)


def save(layout: RunLayout, model_dir: Path, *steps: int) -> None:
    policy = load_policy(model_dir)
    optimizer = make_optimizer(policy, learning_rate=1e-3)
    for step in steps:
        with torch.no_grad():
            policy.hf.model.norm.weight.fill_(float(step))
        save_checkpoint(layout.checkpoints_dir, policy, optimizer, step=step)


def versions_of(layout: RunLayout, model_dir: Path, *, first_version: int = 0) -> CheckpointVersions:
    return CheckpointVersions(layout, SCHEDULE, model_dir, first_version=first_version)


def norm_of(model: Path) -> float:
    return float(load_file(model / "model.safetensors")["model.norm.weight"][0])


def test_what_the_run_begins_with_comes_first(layout: RunLayout, model_dir: Path) -> None:
    pinned = versions_of(layout, model_dir).next(None, is_last=False)
    assert pinned is not None
    assert (pinned.version, pinned.model_dir) == (0, model_dir)


def test_a_fork_is_not_evaluated_where_it_began(layout: RunLayout, model_dir: Path) -> None:
    save(layout, model_dir, 60)
    versions = versions_of(layout, model_dir, first_version=60)
    assert versions.next(None, is_last=False) is None
    assert versions.next(None, is_last=True) is None


def test_a_due_version_stays_when_its_checkpoint_is_gone(layout: RunLayout, model_dir: Path) -> None:
    save(layout, model_dir, 30, 50)
    pinned = versions_of(layout, model_dir).next(0, is_last=False)
    assert pinned is not None
    assert pinned.version == 50
    shutil.rmtree(layout.checkpoints_dir)
    assert norm_of(pinned.model_dir) == 50.0
    again = versions_of(layout, model_dir).next(0, is_last=False)  # another process
    assert again == pinned
    versions_of(layout, model_dir).release(pinned)
    assert versions_of(layout, model_dir).next(50, is_last=False) is None
    assert not pinned.directory.exists()


def test_what_is_not_due_waits_for_the_runs_end(layout: RunLayout, model_dir: Path) -> None:
    save(layout, model_dir, 50, 90)
    versions = versions_of(layout, model_dir)
    assert versions.next(50, is_last=False) is None
    last = versions.next(50, is_last=True)
    assert last is not None
    assert last.version == 90
    assert norm_of(last.model_dir) == 90.0


def test_a_damaged_checkpoint_is_passed_over_for_the_one_before(layout: RunLayout, model_dir: Path) -> None:
    save(layout, model_dir, 50, 100)
    damaged = next((layout.checkpoints_dir / "step_00000100").glob("*.distcp"))
    damaged.write_bytes(damaged.read_bytes()[:-1])
    pinned = versions_of(layout, model_dir).next(0, is_last=False)
    assert pinned is not None
    assert pinned.version == 50


def test_an_engine_of_its_own_is_no_workers_server() -> None:
    flags = [
        "--model.path=m",
        "--rollout.engine=vllm-server",
        "--rollout.vllm.servers=['http://a:1']",
        "--evaluation.device=cpu",
    ]
    engine = engine_config(load_config(None, flags, {}).config)
    assert (engine.engine, engine.vllm.servers, engine.device) == ("vllm", [], "cpu")


@pytest.mark.parametrize(
    ("version", "since", "due"), [(49, 0, False), (50, 0, True), (51, 0, True), (99, 51, False), (101, 51, True)]
)
def test_a_multiple_of_the_interval_that_was_passed_is_due(version: int, since: int, due: bool) -> None:
    assert SCHEDULE.is_due(version, since) is due
    assert not EvaluationConfig().is_due(version, since)


def test_a_version_that_cannot_be_written_out_costs_nothing_but_itself(
    layout: RunLayout, model_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    save(layout, model_dir, 50)

    def full(checkpoint: object, to: Path) -> Path:
        raise RunDirError(f"--to {to} cannot be written: No space left on device")

    versions = versions_of(layout, model_dir)
    with monkeypatch.context() as patch:
        patch.setattr("async_rl.launch.evaluator.export_checkpoint", full)
        assert versions.next(0, is_last=True) is None
    again = versions.next(0, is_last=True)  # there is room again
    assert again is not None
    assert again.version == 50
