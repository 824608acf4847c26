"""Commands of `async-rl` for who builds a reward or an environment: no run is needed."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console

from async_rl.config import check, load_config
from async_rl.errors import ConfigError
from workers.arguments import overrides_of

Debug = Annotated[bool, typer.Option("--debug", help="Show tracebacks.")]


def check_rewards_command(
    rows: Annotated[Path, typer.Argument(metavar="FILE", help="JSONL rows: answer, gold, expected.", show_default=False)],
    verifier: Annotated[str, typer.Option(help="A verifier by name, or module:function.")] = "math",
    arg: Annotated[list[str] | None, typer.Option(help="Argument of the verifier, name=value (a TOML value).")] = None,
    debug: Debug = False,
) -> int:
    """Run a verifier over rows whose right score is known; show where it disagrees. Exit code 1 if it does."""
    from async_rl.config.text import toml_literal
    from async_rl.launch.check_rewards import check_rewards, print_checked

    del debug
    args: dict[str, Any] = {}
    for pair in arg or []:
        name, separator, text = pair.partition("=")
        if not separator:
            raise ConfigError(f"--arg {pair!r}: needs name=value")
        args[name] = toml_literal(text)
    checked = check_rewards(rows, verifier, args)
    print_checked(checked, Console())
    return 0 if all(row.agrees for row in checked) else 1


def try_command(
    context: typer.Context,
    config: Annotated[Path, typer.Argument(metavar="CONFIG", help="TOML file.", show_default=False)],
    script: Annotated[
        Path | None, typer.Option(help="File with what the policy says, a line a turn.", show_default=False)
    ] = None,
    address: Annotated[
        str | None, typer.Option(help="OpenAI-compatible server that acts, e.g. http://host/v1.", show_default=False)
    ] = None,
    served_model: Annotated[str, typer.Option(help="Name of the model at the address.")] = "",
    row: Annotated[int, typer.Option(min=0, help="First row to play.")] = 0,
    rows: Annotated[int, typer.Option(min=1, help="Rows to play.")] = 1,
    members: Annotated[int, typer.Option(min=1, help="Trajectories of each row.")] = 1,
    debug: Debug = False,
) -> None:
    """Play an environment without a trainer, with the config's model, a script or a server; show every token and the reward."""
    from async_rl.launch.try_environment import Policy, print_tried, try_environment

    del debug
    if script is not None and address is not None:
        raise ConfigError("--script and --address exclude each other: one policy acts")
    settings = load_config(config, overrides_of(context)).config
    check(settings)
    groups = try_environment(settings, Policy(script, address, served_model), first_row=row, rows=rows, members=members)
    print_tried(groups, settings, Console())
