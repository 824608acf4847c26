"""async-rl-rollout: one rollout worker with one engine."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated, NoReturn

import typer

from async_rl.config import check, load_config
from workers.arguments import RoleArguments, overrides_of, role_main, run_app


def main() -> None:
    if "--check" in sys.argv[1:]:
        _check_main()
    role_main("rollout", run, plan=plan)


def _check_main() -> NoReturn:
    """`async-rl-rollout --check CONFIG`: needs no run and no server."""

    def command(
        context: typer.Context,
        config: Annotated[Path, typer.Argument(help="TOML file.")],
        check_engine: Annotated[bool, typer.Option("--check", help="Start the engine, push, prove and measure.")] = False,
        debug: Annotated[bool, typer.Option("--debug", help="Show tracebacks.")] = False,
    ) -> None:
        """Start the config's engine, push its model once, prove it, and print tokens/s and what to change."""
        from async_rl.launch.inputs import require_model

        loaded = load_config(config, overrides_of(context)).config
        check(loaded)
        require_model(loaded)
        from async_rl.launch.rollout_check import run_check

        run_check(loaded)

    app = typer.Typer(add_completion=False, pretty_exceptions_enable=False)
    app.command()(command)
    run_app(app, prog_name="async-rl-rollout")


def plan(arguments: RoleArguments) -> dict[str, str]:
    """Checks of --dry-run. Raises: DataError."""
    from async_rl.launch.inputs import require_model  # not for a role that runs: it brings pyarrow

    require_model(arguments.config)
    return {}


def run(arguments: RoleArguments) -> None:
    """Start the engine and serve tasks until the run has ended or SIGTERM asks to drain."""
    from workers.rollout_engine import serve  # torch and transformers take seconds, which --help and --dry-run do without

    serve(arguments)


if __name__ == "__main__":
    main()
