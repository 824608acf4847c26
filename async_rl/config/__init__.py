"""The strict config of a run: models, loading with origins, cross-section checks, the reference page. Torch-free."""

from __future__ import annotations

from async_rl.config.checks import check
from async_rl.config.dump import dump_toml
from async_rl.config.load import Origin, Resolved, load_config
from async_rl.config.run import RunConfig

__all__ = ["Origin", "Resolved", "RunConfig", "check", "dump_toml", "load_config"]
