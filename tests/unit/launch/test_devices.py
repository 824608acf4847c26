"""GPUs of roles on one machine."""

from __future__ import annotations

from pathlib import Path

import pytest

from async_rl.config.rollout import RolloutConfig
from async_rl.config.run import ModelConfig, RunConfig
from async_rl.config.trainer import TrainerConfig
from async_rl.errors import ConfigError
from async_rl.launch.devices import VARIABLE, split_devices, visible_devices
from async_rl.launch.role_table import role_table
from async_rl.run_dir.layout import RunLayout


def config(*, ranks: int, workers: int, trainer: str = "cuda", rollout: str = "cuda") -> RunConfig:
    return RunConfig(
        model=ModelConfig(path=Path("model")),
        trainer=TrainerConfig(world_size=ranks, device=trainer),
        rollout=RolloutConfig(workers=workers, device=rollout),
    )


def test_two_ranks_and_two_workers_of_four_devices_get_two_each_and_none_is_shared(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(VARIABLE, "4,5,6,7")
    roles = role_table(config(ranks=2, workers=2), RunLayout(Path("run")), redis_url="", master_port=1)
    seen = {role.name: role.env.get(VARIABLE) for role in roles}
    assert seen == {"coordinator": None, "trainer-0": "4,5", "trainer-1": "4,5", "rollout-0": "6", "rollout-1": "7"}


def test_uuids_and_spaces_are_kept_apart_as_they_are_named() -> None:
    trainer, workers = split_devices(config(ranks=1, workers=1), {VARIABLE: "GPU-a1, GPU-b2"})
    assert (trainer, workers) == ({VARIABLE: "GPU-a1"}, [{VARIABLE: "GPU-b2"}])


def test_who_computes_on_the_cpu_sees_no_device() -> None:
    trainer, workers = split_devices(config(ranks=1, workers=2, trainer="cpu"), {VARIABLE: "0,1"})
    assert (trainer, workers) == ({VARIABLE: ""}, [{VARIABLE: "0"}, {VARIABLE: "1"}])
    trainer, workers = split_devices(config(ranks=2, workers=1, rollout="cpu"), {VARIABLE: "0,1"})
    assert (trainer, workers) == ({VARIABLE: "0,1"}, [{VARIABLE: ""}])


def test_without_a_gpu_role_nothing_is_touched() -> None:
    assert split_devices(config(ranks=2, workers=2, trainer="cpu", rollout="cpu"), {}) == ({}, [{}, {}])


@pytest.mark.parametrize(
    ("devices", "message"), [("4,5,6", "need 4: they would overlap"), ("4,5,4,6", "twice"), ("", "shows no GPU")]
)
def test_overlap_is_refused(devices: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        split_devices(config(ranks=2, workers=2), {VARIABLE: devices})


def test_without_the_variable_the_driver_is_asked_and_its_absence_means_none(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", "")
    assert visible_devices({}) == []
