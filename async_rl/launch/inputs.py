"""What a run reads from this machine: model, environment, data, devices. Checked without torch, before anything is made."""

from __future__ import annotations

import os
import socket
import threading
from collections.abc import Sequence
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from async_rl.checks.findings import Finding, fail, ok
from async_rl.config import RunConfig
from async_rl.coordinator.prompts import BUILT_IN_SOURCE
from async_rl.coordinator.rows import require_rows
from async_rl.coordinator.sources import TaskSource, open_source
from async_rl.environments.load import load_environment, require_environment
from async_rl.errors import ConfigError, DataError
from async_rl.launch.devices import split_devices
from async_rl.launch.user_code import require_user_code

STORE_BACKENDS = ("gloo", "nccl")
"""Of weights.backend: those that meet in a store on weights.host."""
RESOLVE_S = 5.0


def require_inputs(config: RunConfig) -> None:
    """Say at once what a role would say later. What is the user's own is loaded in a process of its own; reads no data.

    Raises: DataError for a model or data that is missing; ConfigError for an unknown environment, GPUs or addresses that this
    machine does not have, or what cannot be imported, built or called.
    """
    require_model(config)
    require_environment(config.environment)
    split_devices(config, os.environ)
    require_hosts(config)
    for source in [str(entry["source"]) for entry in config.data.mix] or [config.data.source]:
        if source != BUILT_IN_SOURCE:
            require_rows(Path(source))
    require_user_code(config)


def require_model(config: RunConfig) -> None:
    """Raises: DataError if model.path is no model directory."""
    path = config.model.path
    if not (path / "config.json").is_file():
        what = "has no config.json" if path.is_dir() else "does not exist"
        raise DataError(
            f"model.path={path} {what}; give the directory of a Hugging Face causal LM with its tokenizer (--model.path=DIR)"
        )


def require_hosts(config: RunConfig) -> None:
    """Raises: ConfigError if an address that this machine is to use has no meaning here."""
    if config.redis.url.startswith(("redis://", "rediss://")):
        host = urlsplit(config.redis.url).hostname or ""
        if not _addresses(host):
            raise ConfigError(f"redis.url names host {host!r}, which this machine cannot resolve; is it spelled right?")
    if config.weights.backend not in STORE_BACKENDS:
        return
    host = config.weights.host
    found = _addresses(host)
    if found is not None and not any(_is_ours(family, address) for family, address in found):
        what = "is no address of this machine" if found else "cannot be resolved"
        raise ConfigError(
            f"weights.host={host!r} {what}: the trainer's store could not listen there; set it to one of this machine's "
            f"addresses, or 127.0.0.1 if all engines run here"
        )


def _addresses(host: str) -> Sequence[tuple[int, Any]] | None:
    """(family, socket address) of a host; none if it cannot be resolved; None if the resolver does not answer in time."""
    found: list[Sequence[tuple[int, Any]]] = []

    def resolve() -> None:
        try:
            answers = socket.getaddrinfo(host, 0, type=socket.SOCK_STREAM) if host else []
        except (OSError, UnicodeError):
            answers = []
        found.append([(int(answer[0]), answer[4]) for answer in answers])

    thread = threading.Thread(target=resolve, name="resolve", daemon=True)  # the call itself takes no deadline
    thread.start()
    thread.join(RESOLVE_S)
    return found[0] if found else None


def _is_ours(family: int, address: Any) -> bool:
    """Whether a socket can be bound to it."""
    with socket.socket(family, socket.SOCK_STREAM) as probe:
        try:
            probe.bind(address)
        except OSError:
            return False
    return True


def check_inputs(config: RunConfig) -> list[Finding]:
    """`require_inputs` as a line of a report."""
    try:
        require_inputs(config)
    except (ConfigError, DataError) as error:
        return [fail("model and data", "missing", str(error))]
    return [ok("model and data", f"{config.model.path}; prompts from {config.data.source}")]


def open_prompts(config: RunConfig, run_id: str = "") -> TaskSource:
    """Import the environment and check every row of the data. Raises: ConfigError, DataError."""
    return open_source(config, run_id, load_environment(config.environment))
