"""Which processes a run needs."""

from __future__ import annotations

from pathlib import Path

from async_rl.config import RunConfig
from async_rl.config.rollout import RewardConfig, RolloutConfig
from async_rl.config.run import ModelConfig
from async_rl.config.trainer import TrainerConfig
from async_rl.launch.role_table import REDIS_URL_VARIABLE, free_port, role_table
from async_rl.run_dir.layout import RunLayout

URL = "redis://user:hunter2@queue.example:6379/0"


def config(**sections: object) -> RunConfig:
    return RunConfig(model=ModelConfig(path=Path("/models/tiny")), **sections)  # type: ignore[arg-type]  # sections by name


def names(run: RunConfig) -> list[str]:
    return [role.name for role in role_table(run, RunLayout(Path("runs/x")), redis_url=URL, master_port=1)]


def test_a_plain_run_has_one_process_of_each_role() -> None:
    assert names(config()) == ["coordinator", "trainer", "rollout-0"]


def test_rollout_workers_reward_workers_and_ranks_are_numbered() -> None:
    run = config(
        rollout=RolloutConfig(workers=2),
        reward=RewardConfig(placement="workers", workers=2),
        trainer=TrainerConfig(world_size=2),
    )
    assert names(run) == ["coordinator", "trainer-0", "trainer-1", "rollout-0", "rollout-1", "reward-0", "reward-1"]


def test_no_rollout_worker_is_started_when_they_are_started_elsewhere() -> None:
    assert names(config(rollout=RolloutConfig(workers=0))) == ["coordinator", "trainer"]


def test_the_run_is_over_with_the_trainers_ranks_only() -> None:
    table = role_table(config(trainer=TrainerConfig(world_size=2)), RunLayout(Path("runs/x")), redis_url=URL, master_port=1)
    assert [role.name for role in table if role.leads] == ["trainer-0", "trainer-1"]


def test_ranks_get_the_rendezvous_and_their_number() -> None:
    table = role_table(config(trainer=TrainerConfig(world_size=2)), RunLayout(Path("runs/x")), redis_url=URL, master_port=4567)
    second = next(role for role in table if role.name == "trainer-1")
    assert {name: second.env[name] for name in ("RANK", "LOCAL_RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")} == {
        "RANK": "1",
        "LOCAL_RANK": "1",
        "WORLD_SIZE": "2",
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": "4567",
    }


def test_threads_are_the_configs_and_waiting_ones_sleep() -> None:
    run = config(rollout=RolloutConfig(num_threads=3), trainer=TrainerConfig(num_threads=2))
    threads = {
        role.name: (role.env["OMP_NUM_THREADS"], role.env["OMP_WAIT_POLICY"])
        for role in role_table(run, RunLayout(Path("runs/x")), redis_url=URL, master_port=1)
    }
    assert threads == {"coordinator": ("1", "PASSIVE"), "trainer": ("2", "PASSIVE"), "rollout-0": ("3", "PASSIVE")}


def test_the_servers_address_goes_by_environment_and_not_by_command_line() -> None:
    for role in role_table(config(), RunLayout(Path("runs/x")), redis_url=URL, master_port=1):
        assert role.env[REDIS_URL_VARIABLE] == URL
        assert "hunter2" not in " ".join(role.command)


def test_ports_of_launchers_that_start_together_differ() -> None:
    ports = {free_port() for _ in range(8)}
    assert len(ports) > 1
    assert all(1024 <= port < 65536 for port in ports)
