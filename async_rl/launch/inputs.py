"""What a run reads from this machine: model, environment, data. Checked without torch, before anything is made."""

from __future__ import annotations

from pathlib import Path

from async_rl.checks.findings import Finding, fail, ok
from async_rl.config import RunConfig
from async_rl.coordinator.prompts import BUILT_IN_SOURCE
from async_rl.coordinator.rows import require_rows
from async_rl.coordinator.sources import TaskSource, open_source
from async_rl.environments.load import load_environment, require_environment
from async_rl.errors import ConfigError, DataError


def require_inputs(config: RunConfig) -> None:
    """Say at once what a role would say later. Imports nothing of the user's, reads no data.

    Raises: DataError for a model or data that is missing; ConfigError for an unknown environment.
    """
    require_model(config)
    require_environment(config.environment)
    for source in [str(entry["source"]) for entry in config.data.mix] or [config.data.source]:
        if source != BUILT_IN_SOURCE:
            require_rows(Path(source))


def require_model(config: RunConfig) -> None:
    """Raises: DataError if model.path is no model directory."""
    path = config.model.path
    if not (path / "config.json").is_file():
        what = "has no config.json" if path.is_dir() else "does not exist"
        raise DataError(
            f"model.path={path} {what}; give the directory of a Hugging Face causal LM with its tokenizer (--model.path=DIR)"
        )


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
