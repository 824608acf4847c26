"""The compose file as Docker Compose itself reads it (`config` needs no daemon), and its commands as the roles read them."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import tomllib
from pathlib import Path
from typing import Any

import pytest

from async_rl.config import check, load_config
from async_rl.config.fields import leaf_fields
from async_rl.config.run import RunConfig
from async_rl.config.text import environment_settings
from async_rl.testing.tiny_models import save_tiny_model

ROOT = Path(__file__).parents[3]
FILE = ROOT / "deploy/compose.yaml"
COMPOSE = Path(sys.executable).with_name("docker-compose")
ROLES = {"coordinator", "rollout", "reward", "trainer"}


def compose(*arguments: str, **env: str) -> subprocess.CompletedProcess[str]:
    command = [str(COMPOSE), "-f", str(FILE), *arguments]
    clean = {"PATH": os.environ["PATH"], "HOME": os.environ.get("HOME", "/"), **env}
    return subprocess.run(command, capture_output=True, text=True, timeout=60, check=False, env=clean)


@pytest.fixture(scope="module")
def services(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    model = save_tiny_model(tmp_path_factory.mktemp("model") / "tiny")
    done = compose("--profile", "*", "config", "--format", "json", REDIS_PASSWORD="hunter2", MODEL_DIR=str(model))
    assert done.returncode == 0, done.stderr
    assert "warn" not in done.stderr.lower()
    found: dict[str, Any] = json.loads(done.stdout)["services"]
    return found


def test_compose_accepts_the_file_and_finds_every_role(services):
    assert set(services) == ROLES | {"redis"}


def test_reward_workers_are_a_profile(services):
    done = compose("config", "--services", REDIS_PASSWORD="x", MODEL_DIR="/m")
    assert set(done.stdout.split()) == ROLES - {"reward"} | {"redis"}


@pytest.mark.parametrize("missing", ["REDIS_PASSWORD", "MODEL_DIR"])
def test_missing_secret_or_model_is_refused_by_name(missing):
    env = {"REDIS_PASSWORD": "x", "MODEL_DIR": "/m"}
    del env[missing]
    done = compose("config", **env)
    assert done.returncode != 0
    assert f"set {missing}" in done.stderr


def test_nothing_is_published_beyond_loopback(services):
    ports = [port for service in services.values() for port in service.get("ports", ())]
    assert ports
    assert {port["host_ip"] for port in ports} == {"127.0.0.1"}


def test_password_is_in_no_command_and_not_in_the_file(services):
    assert "hunter2" not in json.dumps([service.get("command") for service in services.values()])
    assert "hunter2" not in FILE.read_text()
    assert services["trainer"]["environment"]["ASYNC_RL_REDIS__URL"] == "redis://:hunter2@redis:6379/0"


def test_server_keeps_every_acknowledged_write_and_evicts_nothing(services):
    command = " ".join(services["redis"]["command"])
    assert "--appendonly yes --appendfsync always" in command
    assert "--maxmemory-policy noeviction" in command


def test_roles_share_the_run_volume_and_wait_for_what_they_need(services):
    for role in ROLES:
        volumes = {volume["target"]: volume for volume in services[role]["volumes"]}
        assert volumes["/runs"]["source"] == "runs"
        assert volumes["/model"]["read_only"]
        needs = services[role]["depends_on"]
        assert all(need["condition"] == "service_healthy" for need in needs.values())
        assert all("healthcheck" in services[need] for need in needs)
        assert services[role]["cap_drop"] == ["ALL"]


def test_every_setting_in_the_environment_is_a_key_of_the_config(services):
    for role in ROLES:
        assert {key for key, _, _ in environment_settings(services[role]["environment"])} <= set(leaf_fields(RunConfig))


@pytest.mark.parametrize("role", sorted(ROLES))
def test_command_of_a_role_is_one_that_its_program_accepts(services, role):
    program, *arguments = services[role]["command"]
    module, function = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["scripts"][program].split(":")
    bound = {volume["target"]: volume["source"] for volume in services[role]["volumes"]}
    words = [bound.get(word, word) for word in arguments]
    words.append(f"--model.path={bound['/model']}")
    code = f"import sys; from {module} import {function}; sys.argv[1:] = {[*words, '--dry-run']!r}; {function}()"
    env = {**os.environ, **services[role]["environment"]}
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=100, check=False, env=env)
    assert done.returncode == 0, done.stderr
    assert re.search(rf"role +{role}", done.stdout)
    assert "redis://:***@redis:6379/0" in done.stdout


@pytest.mark.parametrize("path", sorted((ROOT / "deploy/configs").glob("*.toml")), ids=lambda path: path.name)
def test_shipped_configs_load_and_can_work(path):
    check(load_config(path, ["--model.path=/m"], {}).config)


def test_health_of_the_coordinator_looks_where_the_config_puts_the_run(services):
    run_dir = load_config(ROOT / "deploy/configs/compose.toml", [], {}).config.run_dir
    assert f"{run_dir}/run.json" in services["coordinator"]["healthcheck"]["test"][-1]


def test_image_copies_every_package_and_takes_its_base_as_an_argument():
    lines = (ROOT / "deploy/Dockerfile").read_text().splitlines()
    packages = {
        name.rstrip("*")
        for name in tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["setuptools"]["packages"]["find"]["include"]
    }
    assert {f"COPY {package} {package}" for package in packages} <= set(lines)
    assert next(line for line in lines if line.startswith("ARG")).startswith("ARG BASE_IMAGE=")
    assert "FROM ${BASE_IMAGE}" in lines
    assert any(line.startswith("USER ") for line in lines)
