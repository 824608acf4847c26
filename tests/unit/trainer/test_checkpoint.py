from __future__ import annotations

import json
import re
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.optim import AdamW

from async_rl.algorithms.losses import ClipRange, LossSettings, decoupled_clip
from async_rl.errors import CheckpointError, RunDirError
from async_rl.model.load import load_causal_lm
from async_rl.model.tokenizer import load_tokenizer
from async_rl.testing.batches import random_samples
from async_rl.testing.full_disk import files_no_larger_than
from async_rl.testing.tiny_models import TinyModel, save_tiny_model
from async_rl.trainer import checkpoint
from async_rl.trainer.checkpoint import (
    COMPLETE,
    META,
    find_latest,
    load_checkpoint,
    open_checkpoint,
    prune_checkpoints,
    save_checkpoint,
)
from async_rl.trainer.distributed import joined_ranks
from async_rl.trainer.export import export_checkpoint, export_hf
from async_rl.trainer.packing import pack
from async_rl.trainer.policy import PolicyModel, PolicyOptions, load_policy
from async_rl.trainer.step import StepSettings, make_optimizer, train_step

SETTINGS = StepSettings(decoupled_clip, LossSettings(ClipRange(0.2, 0.28)))


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tiny_model(tmp_path_factory.mktemp("model"), TinyModel.LLAMA_TIED)


def learner(model: Path) -> tuple[PolicyModel, AdamW]:
    policy = load_policy(model)
    return policy, make_optimizer(policy, learning_rate=1e-3)


def train(policy: PolicyModel, optimizer: AdamW, step: int) -> None:
    samples = random_samples([5, 9, 13, 20], seed=step)
    assert train_step(policy, optimizer, pack(samples, 30), settings=SETTINGS, learning_rate=1e-3 / step).applied


def everything(policy: PolicyModel, optimizer: AdamW) -> dict[str, Tensor]:
    state = {name: tensor.clone() for name, tensor in policy.named_full_tensors()}
    for name, parameter in policy.hf.named_parameters():
        state.update({f"{name}.{key}": value.clone() for key, value in optimizer.state[parameter].items()})
    return state


def assert_equal(one: dict[str, Tensor], other: dict[str, Tensor]) -> None:
    assert one.keys() == other.keys()
    assert [name for name in one if not torch.equal(one[name], other[name])] == []


def test_two_steps_save_load_and_one_more_are_three_steps_bit_for_bit(model: Path, tmp_path: Path) -> None:
    straight, optimizer = learner(model)
    for step in (1, 2):
        train(straight, optimizer, step)
    path = save_checkpoint(
        tmp_path, straight, optimizer, step=2, meta={"log": {"segment": "3-1", "offset": 77}, "cursor": [0, 5]}
    )
    train(straight, optimizer, 3)

    resumed, other = learner(model)
    train(resumed, other, 9)  # whatever it held before
    found = find_latest(tmp_path)
    assert found.latest is not None
    assert (found.latest.path, found.latest.step, found.skipped) == (path, 2, ())
    assert found.latest.meta == {"log": {"segment": "3-1", "offset": 77}, "cursor": [0, 5]}
    load_checkpoint(found.latest, resumed, other)
    train(resumed, other, 3)
    assert_equal(everything(straight, optimizer), everything(resumed, other))


def test_a_checkpoint_before_the_first_step_restores_an_untouched_optimizer(model: Path, tmp_path: Path) -> None:
    policy, optimizer = learner(model)
    path = save_checkpoint(tmp_path, policy, optimizer, step=0)
    expected = everything(policy, optimizer)
    train(policy, optimizer, 1)
    load_checkpoint(open_checkpoint(path), policy, optimizer)
    assert_equal(everything(policy, optimizer), expected)
    assert all(float(value) == 0 for name, value in expected.items() if name.endswith(".step"))


def test_random_state_comes_back(model: Path, tmp_path: Path) -> None:
    policy, optimizer = learner(model)
    path = save_checkpoint(tmp_path, policy, optimizer, step=1)
    expected = torch.rand(4)
    load_checkpoint(open_checkpoint(path), policy, optimizer)
    assert torch.equal(torch.rand(4), expected)


def test_a_sharded_bfloat16_rank_saves_its_float32_weights_even_right_after_scoring(model: Path, tmp_path: Path) -> None:
    with joined_ranks() as ranks:
        policy = load_policy(model, options=PolicyOptions(dtype=torch.bfloat16), mesh=ranks.mesh)
        optimizer = make_optimizer(policy, learning_rate=1e-3)
        train(policy, optimizer, 1)
        policy.score([[3, 4, 5]], temperature=1.0)
        save_checkpoint(tmp_path, policy, optimizer, step=1)
        expected = {name: tensor.clone() for name, tensor in policy.named_full_tensors()}
        found = find_latest(tmp_path).latest
        assert found is not None
        load_checkpoint(found, policy, optimizer)
        train(policy, optimizer, 2)
    plain, other = learner(model)
    load_checkpoint(found, plain, other)
    assert_equal(dict(plain.named_full_tensors()), expected)
    assert {tensor.dtype for tensor in everything(plain, other).values()} == {torch.float32}


@pytest.fixture
def two(model: Path, tmp_path: Path) -> Path:
    """A directory with checkpoints of steps 1 and 2."""
    policy, optimizer = learner(model)
    for step in (1, 2):
        train(policy, optimizer, step)
        save_checkpoint(tmp_path, policy, optimizer, step=step)
    return tmp_path


def data_file(checkpoint: Path) -> Path:
    return next(iter(checkpoint.glob("*.distcp")))


def truncate(path: Path) -> None:
    data_file(path).write_bytes(data_file(path).read_bytes()[:-1])


def flip_a_bit(path: Path) -> None:
    data = bytearray(data_file(path).read_bytes())
    data[len(data) // 2] ^= 1
    data_file(path).write_bytes(data)


def remove_meta(path: Path) -> None:
    (path / META).unlink()


def remove_marker(path: Path) -> None:
    (path / COMPLETE).unlink()


def cut_marker(path: Path) -> None:
    (path / COMPLETE).write_text((path / COMPLETE).read_text()[:40])


def leave_unrenamed(path: Path) -> None:
    path.rename(path.with_suffix(".tmp"))


def another_format(path: Path) -> None:
    marker = json.loads((path / COMPLETE).read_text())
    (path / COMPLETE).write_text(json.dumps({**marker, "format": 99}))


@pytest.mark.parametrize(
    ("damage", "reason"),
    [
        (truncate, r"distcp has \d+ bytes, \d+ were written"),
        (flip_a_bit, "does not match its hash"),
        (remove_meta, r"meta\.json is missing"),
        (remove_marker, r"no readable complete\.json"),
        (cut_marker, r"no readable complete\.json"),
        (leave_unrenamed, "never completed"),
        (another_format, "format=99, this version reads 1"),
    ],
)
def test_what_is_not_complete_is_passed_over_with_the_reason(damage: Callable[[Path], None], reason: str, two: Path) -> None:
    damage(two / "step_00000002")
    found = find_latest(two)
    assert found.latest is not None
    assert found.latest.step == 1
    (skipped,) = found.skipped
    assert skipped.path.name.startswith("step_00000002")
    assert re.search(reason, skipped.reason)


def test_an_empty_or_missing_directory_has_no_checkpoint(tmp_path: Path) -> None:
    assert find_latest(tmp_path).latest is None
    assert find_latest(tmp_path / "missing").latest is None


def test_a_disk_that_fills_leaves_the_previous_checkpoint_and_nothing_else(model: Path, two: Path) -> None:
    policy, optimizer = learner(model)
    train(policy, optimizer, 1)
    with (
        files_no_larger_than(100_000),
        pytest.raises(CheckpointError, match=r"step_00000003\.e000000\.tmp cannot be written \(\d+ bytes"),
    ):
        save_checkpoint(two, policy, optimizer, step=3)
    assert sorted(path.name for path in two.iterdir()) == ["step_00000001", "step_00000002"]
    found = find_latest(two)
    assert found.latest is not None
    assert (found.latest.step, found.skipped) == (2, ())


class Killed(BaseException):
    """The end of the process at this line: nothing handles it, nothing is cleaned up."""


BETWEEN_THE_WRITES = [
    pytest.param("_prepare", 1, id="the directory is there"),
    pytest.param("dcp_save", 1, id="tensors are written"),
    pytest.param("_copy_model_files", 1, id="config and tokenizer are written"),
    pytest.param("_write", 1, id="meta is written"),
    pytest.param("fsync_directory", 1, id="the first file is durable"),
    pytest.param("_write", 2, id="it is marked complete and not renamed"),
]


@pytest.mark.parametrize(("after", "call"), BETWEEN_THE_WRITES)
def test_one_that_was_killed_between_two_writes_is_no_checkpoint_and_the_next_try_makes_it_one(
    model: Path, two: Path, monkeypatch: pytest.MonkeyPatch, after: str, call: int
) -> None:
    policy, optimizer = learner(model)
    train(policy, optimizer, 1)
    function, calls = getattr(checkpoint, after), 0

    def killed(*arguments: Any, **named: Any) -> Any:
        nonlocal calls
        result = function(*arguments, **named)
        calls += 1
        if calls == call:
            raise Killed
        return result

    with monkeypatch.context() as patch:
        patch.setattr(checkpoint, after, killed)
        with pytest.raises(Killed):
            save_checkpoint(two, policy, optimizer, step=3)
    found = find_latest(two)
    assert found.latest is not None
    assert found.latest.step == 2
    assert ["never completed" in skipped.reason for skipped in found.skipped] == [True]
    save_checkpoint(two, policy, optimizer, step=3, meta={"again": True})
    found = find_latest(two)
    assert found.latest is not None
    assert (found.latest.step, found.latest.meta, found.skipped) == (3, {"again": True}, ())


def test_a_directory_that_cannot_be_made_is_named(model: Path, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    policy, optimizer = learner(model)
    with pytest.raises(CheckpointError, match=r"file/step_00000001\.e000000\.tmp cannot be written"):
        save_checkpoint(tmp_path / "file", policy, optimizer, step=1)


def test_saving_a_step_again_replaces_it(model: Path, two: Path) -> None:
    policy, optimizer = learner(model)
    save_checkpoint(two, policy, optimizer, step=2, meta={"again": True})
    found = find_latest(two)
    assert found.latest is not None
    assert (found.latest.step, found.latest.meta, found.skipped) == (2, {"again": True}, ())


def test_pruning_keeps_the_newest_and_removes_older_leftovers(two: Path) -> None:
    shutil.copytree(two / "step_00000002", two / "step_00000005")
    (two / "step_00000001.e000001.tmp").mkdir()
    (two / "step_00000007.e000001.tmp").mkdir()  # being written
    prune_checkpoints(two, keep=2)
    assert sorted(path.name for path in two.iterdir()) == ["step_00000002", "step_00000005", "step_00000007.e000001.tmp"]


def test_a_checkpoint_of_another_model_is_refused_before_anything_is_loaded(two: Path, tmp_path: Path) -> None:
    checkpoint = open_checkpoint(two / "step_00000002")
    for name, overrides in (("deeper", {"num_hidden_layers": 4}), ("wider", {"intermediate_size": 200})):
        policy, optimizer = learner(save_tiny_model(tmp_path / name, TinyModel.LLAMA_TIED, **overrides))
        before = everything(policy, optimizer)
        with pytest.raises(CheckpointError, match=r"another model|mlp"):
            load_checkpoint(checkpoint, policy, optimizer)
        after = everything(policy, optimizer)
        assert_equal({name: before[name] for name in before}, {name: after[name] for name in before})


@pytest.mark.parametrize("kind", [TinyModel.LLAMA, TinyModel.LLAMA_TIED, TinyModel.GPT2])
def test_an_export_loads_bit_for_bit_with_its_tokenizer(kind: TinyModel, tmp_path: Path) -> None:
    policy, optimizer = learner(save_tiny_model(tmp_path / "base", kind))
    train(policy, optimizer, 1)
    save_checkpoint(tmp_path / "run" / "checkpoints", policy, optimizer, step=1)
    shutil.rmtree(tmp_path / "base")  # a checkpoint exports on its own
    directory = export_hf(tmp_path / "run", tmp_path / "out")
    loaded = load_causal_lm(directory).state_dict()
    trained = policy.hf.state_dict()
    assert_equal(dict(loaded), dict(trained))
    assert load_tokenizer(directory)("12>")["input_ids"] == [4, 5, 13]
    assert not any(path.suffix in {".bin", ".pt"} for path in directory.iterdir())


def test_export_refuses_what_it_would_overwrite_and_a_run_without_checkpoint(two: Path, tmp_path: Path) -> None:
    (tmp_path / "taken").mkdir()
    (tmp_path / "taken" / "file").write_text("mine")
    with pytest.raises(RunDirError, match="not an empty directory"):
        export_checkpoint(open_checkpoint(two / "step_00000002"), tmp_path / "taken")
    assert [path.name for path in (tmp_path / "taken").iterdir()] == ["file"]
    with pytest.raises(CheckpointError, match="no complete checkpoint"):
        export_hf(tmp_path / "no_run", tmp_path / "out")
