"""A run that was trained once: trained again from its log, forked, and moved to another place and resumed on more ranks."""

from __future__ import annotations

import hashlib
import json
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from async_rl import RunConfig, run
from async_rl.checks.audit import audit
from async_rl.config import load_config
from async_rl.errors import CheckpointError, ConfigError, IntakeLogError, RunDirError
from async_rl.launch.demo_model import demo_model, demo_tokenizer, save_model
from async_rl.launch.prepare import Fork
from async_rl.run_dir.files import read_json_lines
from async_rl.run_dir.intake_log import IntakeLog, read_log, task_ends
from async_rl.run_dir.layout import open_run
from async_rl.trainer.checkpoint import model_state, open_checkpoint
from async_rl.trainer.replay import replay
from workers.cli import main

STEPS = 6
SETTINGS: dict[str, Any] = {
    "environment.name": "prompt_reward",
    "environment.reward": "parity_reward:score",
    "rollout.group_size": 4,
    "rollout.max_new_tokens": 5,
    "trainer.groups_per_step": 4,
    "trainer.steps_per_batch": 3,
    "trainer.learning_rate": 1e-3,
    "trainer.max_steps": STEPS,
    "checkpoint.every_steps": 3,
    "redis.lease_s": 3.0,
}


def config_of(run: Path, /, **settings: Any) -> RunConfig:
    """The run's own config, with `settings` on top."""
    flags = [f"--{name.replace('__', '.')}={value}" for name, value in settings.items()]
    return load_config(run / "config.toml", flags, {}).config


def digests(directory: Path) -> dict[str, str]:
    files = (path for path in sorted(directory.rglob("*")) if path.is_file())
    return {str(path.relative_to(directory)): hashlib.sha256(path.read_bytes()).hexdigest() for path in files}


REWARD = """
def score(completion, row):
    return sum(map(ord, completion + row["answer"])) % 2  # of an untrained model too, groups have both
"""


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """A finished run of six steps, three to a batch, with checkpoints at 3 and 6, its model and its data in it. Read only."""
    directory = tmp_path_factory.mktemp("trained")
    run_dir, model, rows = directory / "run", directory / "model", directory / "rows.jsonl"
    tokenizer = demo_tokenizer()
    save_model(model, demo_model(tokenizer, seed=0), tokenizer)
    rows.write_text("".join(json.dumps({"prompt": f"{row}>", "answer": str(row)}) + "\n" for row in range(64)))
    (directory / "parity_reward.py").write_text(REWARD)
    settings = {"run_dir": run_dir, "model.path": model, "data.source": rows, **SETTINGS}
    config = load_config(None, [f"--{key}={value}" for key, value in settings.items()], {}).config
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PYTHONPATH", str(directory))
        assert run(config, console=False).exit_code == 0
        written = (run_dir / "config.toml").read_text()
        for inside in (model, rows):
            shutil.move(inside, run_dir / inside.name)  # the model where the demo makes it
            written = written.replace(f'"{inside}"', f'"{run_dir / inside.name}"')
        (run_dir / "config.toml").write_text(written)
        yield run_dir


@pytest.fixture
def copied(trained: Path, tmp_path: Path) -> Path:
    """The same run elsewhere."""
    shutil.copytree(trained, tmp_path / "elsewhere" / "run")
    return tmp_path / "elsewhere" / "run"


def test_a_replay_ends_with_the_checkpoint_s_weights_bit_for_bit(trained: Path) -> None:
    steps: list[tuple[int, int]] = []
    whole = replay(config_of(trained), on_step=lambda done, total: steps.append((done, total)))
    half = replay(config_of(trained), start=3)
    assert (whole.first_version, half.first_version, whole.version, half.version) == (0, 3, STEPS, STEPS)
    assert whole.is_identical
    assert half.is_identical
    assert whole.digest == half.digest
    before = load_file(trained / "model" / "model.safetensors")
    after = model_state(whole.checkpoint)
    assert all(not torch.equal(before[name], after[name]) for name in before)  # or there was nothing to get wrong
    assert steps[-1] == (whole.steps, whole.steps)


def test_a_replay_with_another_learning_rate_is_seen_to_differ(trained: Path) -> None:
    result = replay(config_of(trained, trainer__learning_rate=2e-3))
    assert not result.is_identical
    assert result.max_difference > 0


def test_replay_on_the_command_line_changes_nothing(trained: Path, capsys: pytest.CaptureFixture[str]) -> None:
    before = digests(trained)
    with pytest.raises(SystemExit) as ended:
        main(["replay", str(trained), "--from", "3"])
    output = capsys.readouterr().out
    assert ended.value.code == 0
    assert "version 3 to 6" in output
    assert "bit-identical" in output
    assert "next: " in output
    assert digests(trained) == before


def test_a_compacted_log_names_its_earliest_start(copied: Path) -> None:
    records = open_checkpoint(copied / "checkpoints" / "step_00000006").meta["records_applied"]
    writer = IntakeLog.open(copied / "intake", epoch=9)
    writer.settle(records)
    assert writer.compact(records) is not None  # as if the checkpoint of step 3 were gone
    writer.close()
    for start, begin in ((None, "the beginning"), (3, "step 3")):
        with pytest.raises(IntakeLogError, match=rf"cannot be replayed from {begin}: .*the earliest start is --from 6"):
            replay(config_of(copied), start=start)
    with pytest.raises(CheckpointError, match="has no checkpoint of step 5; it has 3, 6"):
        replay(config_of(copied), start=5)


def test_a_fork_goes_on_from_the_checkpoint_and_leaves_its_origin_alone(trained: Path, tmp_path: Path) -> None:
    before = digests(trained)
    settings = config_of(trained, run_dir=tmp_path / "fork", trainer__learning_rate=5e-4)
    assert run(settings, fork=Fork(trained, 3), console=False).exit_code == 0
    assert digests(trained) == before
    _, old = open_run(trained)
    layout, new = open_run(tmp_path / "fork")
    assert new.run_id != old.run_id
    assert (new.forked_from, new.first_version) == (f"{old.run_id}@3", 3)
    assert [line["step"] for line in read_json_lines(layout.metrics_jsonl)] == [4, 5, 6]
    origin = open_checkpoint(trained / "checkpoints" / "step_00000003")
    first = open_checkpoint(layout.checkpoints_dir / "step_00000003")
    assert first.meta["first_cursor"] == first.meta["cursor"] == origin.meta["cursor"] > 0
    ledger = audit(layout.root)
    assert ledger.is_exact
    assert ledger.ends["trained"] == 12  # 3 steps of 4 groups
    applied = read_log(trained / "intake").steps[: origin.meta["records_applied"]]
    trained_before = {use.task_id for record in applied for use in record.groups}
    assert len(trained_before) == 12
    assert not trained_before & task_ends(read_log(layout.intake_dir)).keys()  # the prompts go on where the origin's cursor was
    assert replay(settings).is_identical


def test_what_cannot_be_forked_is_refused_before_anything_is_made(trained: Path, tmp_path: Path) -> None:
    new = tmp_path / "new"
    for text in ("somewhere", "@3", "somewhere@", "somewhere@last"):
        with pytest.raises(ConfigError, match="is not RUN@STEP"):
            Fork.parse(text)
    assert Fork.parse("runs/me@home@30") == Fork(Path("runs/me@home"), 30)
    with pytest.raises(ConfigError, match="max_steps=6 is not above the step 6"):
        run(config_of(trained, run_dir=new), fork=Fork(trained, 6), console=False)
    with pytest.raises(CheckpointError, match="has no checkpoint of step 5; it has 3, 6"):
        run(config_of(trained, run_dir=new), fork=Fork(trained, 5), console=False)
    with pytest.raises(RunDirError, match="is the run to fork from"):
        run(config_of(trained), fork=Fork(trained, 3), console=False)
    assert not new.exists()


def test_a_moved_run_resumes_where_it_lies_now_on_two_ranks(trained: Path, copied: Path) -> None:
    before = digests(trained)
    moved = config_of(copied, trainer__max_steps=STEPS + 2, trainer__world_size=2)
    assert (moved.run_dir, moved.model.path) == (copied, copied / "model")
    assert moved.data.source == str(copied / "rows.jsonl")
    assert run(moved, resume=True, console=False).exit_code == 0
    assert [line["step"] for line in read_json_lines(copied / "metrics.jsonl")] == list(range(1, STEPS + 3))
    assert audit(copied).is_exact
    assert digests(trained) == before
