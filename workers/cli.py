"""`async-rl`: start runs, look at them, take their results."""

from __future__ import annotations

import os
import shlex
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from importlib import metadata
from pathlib import Path
from typing import Annotated, Any, NoReturn

import typer
from rich.console import Console
from rich.table import Table
from rich.text import Text

from async_rl.config import RunConfig, check, dump_toml, load_config
from async_rl.config.fields import leaf_fields
from async_rl.config.text import environment_variable
from async_rl.errors import ConfigError, ProtocolError, RoleFailed
from async_rl.logs import redact_url
from async_rl.monitor.text import program
from workers.arguments import describe, overrides_of, run_app
from workers.cli_checks import audit_command, dead_command, doctor_command, replay_command, validate_command
from workers.cli_environments import check_rewards_command, try_command
from workers.cli_options import Debug, say
from workers.cli_runs import clean_command, export_command, show_command, status_command, stop_command, weights_command

WITH_OVERRIDES = ("run", "try", "demo", "config", "doctor")

app = typer.Typer(
    add_completion=False,
    invoke_without_command=True,
    pretty_exceptions_enable=False,
    help="Asynchronous off-policy RL for language models. Any setting of a config can be set: --section.key=value.",
)

Resume = Annotated[bool, typer.Option("--resume", help="Go on with the run in the run directory.")]
Overwrite = Annotated[bool, typer.Option("--overwrite", help="Replace the run in the run directory.")]


@app.callback()
def top(
    context: typer.Context, version: Annotated[bool, typer.Option("--version", help="Print the version and end.")] = False
) -> None:
    if version:
        print(f"async-rl {metadata.version('async-rl')}")
        raise typer.Exit
    if context.invoked_subcommand is None:
        print(context.get_help())
        raise typer.Exit


def run_command(
    context: typer.Context,
    config: Annotated[Path, typer.Argument(metavar="CONFIG", help="TOML file.", show_default=False)],
    resume: Resume = False,
    overwrite: Overwrite = False,
    fork: Annotated[
        str | None,
        typer.Option(metavar="RUN@STEP", help="Begin a new run from a checkpoint of another one.", show_default=False),
    ] = None,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Check the config, print what would run.")] = False,
    debug: Debug = False,
) -> int:
    """Train: start every role on this machine and again when it dies; stop all at the end, on Ctrl-C or a lasting failure."""
    from async_rl.launch.inputs import open_prompts, require_inputs
    from async_rl.launch.local import RunEnd, run
    from async_rl.launch.prepare import Fork

    _one_of(resume, overwrite)
    origin = None if fork is None else Fork.parse(fork)
    if resume and origin is not None:
        raise ConfigError("--resume and --fork exclude each other: go on with a run, or begin a new one from its checkpoint")
    settings = _load(config, overrides_of(context))
    if dry_run:
        require_inputs(settings)
        open_prompts(settings)
        _print_plan(settings)
        return 0
    go_on = f"{program()} run {settings.run_dir}/config.toml --resume"
    with _going_on(go_on, debug=debug):
        result = run(settings, resume=resume, overwrite=overwrite, fork=origin)
    if result.end is RunEnd.INTERRUPTED:
        say(f"stopped after {result.steps} steps", go_on)
    else:
        say(f"done: {result.steps} steps in {result.seconds:.0f} s", f"{program()} export {result.run_dir} --to DIR")
    return result.exit_code


def demo_command(
    context: typer.Context,
    config: Annotated[
        Path | None, typer.Argument(metavar="[CONFIG]", help="TOML file; default: sort_digits.", show_default=False)
    ] = None,
    resume: Resume = False,
    overwrite: Overwrite = False,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Check the config, print what would run.")] = False,
    debug: Debug = False,
) -> int:
    """Learn to sort digits in minutes on two CPU cores; a report at the end. Change it: --run_dir=DIR --section.key=value."""
    from async_rl.launch.demo import demo_config, run_demo
    from async_rl.launch.local import RunEnd

    _one_of(resume, overwrite)
    settings = demo_config(overrides_of(context), path=config, resume=resume)
    check(settings)
    if dry_run:
        _print_plan(settings)
        return 0
    go_on = shlex.join([program(), "demo", *([str(config)] if config else []), *overrides_of(context), "--resume"])
    with _going_on(go_on, debug=debug):
        result = run_demo(settings, resume=resume, overwrite=overwrite).run
    if result.end is RunEnd.INTERRUPTED:
        say(f"stopped after {result.steps} steps", go_on)
    return result.exit_code


def config_command(
    context: typer.Context,
    config: Annotated[Path, typer.Argument(metavar="CONFIG|RUN", help="TOML file or run directory.", show_default=False)],
    toml: Annotated[bool, typer.Option("--toml", help="Print TOML that can be loaded again (passwords hidden).")] = False,
    debug: Debug = False,
) -> None:
    """Show the resolved config of a file or of a run, and where each value came from."""
    from async_rl.run_dir.layout import RunLayout

    del debug
    path, env = config, dict(os.environ)
    if config.is_dir():  # what a run runs with is resolved: the environment no longer counts
        path, env = RunLayout(config).config_toml, {}
    loaded = load_config(path, overrides_of(context), env, to_show=not toml)
    check(loaded.config)
    if toml:
        sys.stdout.write(dump_toml(loaded.config, redact=True))
        return
    table = Table(box=None, padding=(0, 2, 0, 0))
    table.add_column("setting", no_wrap=True)
    table.add_column("value", overflow="fold")
    table.add_column("from", style="dim", overflow="fold")
    for key in leaf_fields(RunConfig):
        if key not in loaded.origins:
            table.add_row(
                Text(key, "bold red"), Text("not set", "bold red"), f"needed: --{key}=… or {environment_variable(key)}"
            )
    for key, origin in loaded.origins.items():
        style = "" if origin.kind == "default" else "bold"
        table.add_row(Text(key, style), Text(_shown(loaded.config, key), style), redact_url(str(origin)))
    Console().print(table)


def _load(path: Path, overrides: Sequence[str]) -> RunConfig:
    settings = load_config(path, overrides).config
    check(settings)
    return settings


def _one_of(resume: bool, overwrite: bool) -> None:
    if resume and overwrite:
        raise ConfigError("--resume and --overwrite exclude each other: go on with the run, or replace it")


def _shown(config: RunConfig, key: str) -> str:
    from async_rl.config.dump import toml_value
    from async_rl.logs import redact

    value: Any = config
    for name in key.split("."):
        value = value[name] if isinstance(value, dict) else getattr(value, name)
    return "not set" if value is None else toml_value(redact(value, key), key)


def _print_plan(config: RunConfig) -> None:
    from async_rl.launch.role_table import role_table
    from async_rl.run_dir.layout import RunLayout

    roles = role_table(config, RunLayout(config.run_dir), redis_url="", master_port=0)
    server = "an embedded Redis server" if config.redis.url == "embedded" else "the Redis server of redis.url"
    print(f"config is valid; this would run in {config.run_dir}, with {server}:")
    for role in roles:
        print(f"  {role.name:<12} {' '.join(role.command[1:])}")


@contextmanager
def _going_on(command: str, *, debug: bool) -> Iterator[None]:
    """A run that failed on its way can be resumed: say how, below the error."""
    try:
        yield
    except (RoleFailed, ProtocolError) as error:
        if debug:
            raise
        message, code = describe(error)
        print(f"error: {message}", file=sys.stderr)
        print(f"next: mend the cause, then {command}", file=sys.stderr)
        raise SystemExit(code) from None


COMMANDS: Mapping[str, Callable[..., int | None]] = {
    "run": run_command,
    "demo": demo_command,
    "config": config_command,
    "status": status_command,
    "show": show_command,
    "weights": weights_command,
    "stop": stop_command,
    "clean": clean_command,
    "export": export_command,
    "audit": audit_command,
    "validate": validate_command,
    "replay": replay_command,
    "doctor": doctor_command,
    "dead": dead_command,
    "try": try_command,
    "check-rewards": check_rewards_command,
}
"""In the order of the help."""
for name, command in COMMANDS.items():
    app.command(name)(command)


def main(argv: Sequence[str] | None = None) -> NoReturn:
    """Entry point of `async-rl`. The user's own modules are found in the working directory too, as roles find them."""
    if (here := str(Path.cwd())) not in sys.path:
        sys.path.insert(0, here)
    run_app(app, argv, prog_name="async-rl", overrides_for=WITH_OVERRIDES)


if __name__ == "__main__":
    main()
