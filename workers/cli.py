"""`async-rl`: start runs, look at them, take their results."""

from __future__ import annotations

import asyncio
import os
import shlex
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from enum import StrEnum
from importlib import metadata
from pathlib import Path
from typing import Annotated, Any, NoReturn

import typer
from rich.console import Console
from rich.table import Table
from rich.text import Text

from async_rl.config import RunConfig, check, dump_toml, load_config
from async_rl.errors import ConfigError, ProtocolError, RoleFailed
from async_rl.logs import redact_url
from async_rl.monitor.text import program
from workers.arguments import describe, overrides_of, run_app
from workers.cli_environments import check_rewards_command, try_command

WITH_OVERRIDES = ("run", "try", "demo", "config", "doctor")

app = typer.Typer(
    add_completion=False,
    invoke_without_command=True,
    pretty_exceptions_enable=False,
    help="Asynchronous off-policy RL for language models. Any setting of a config can be set: --section.key=value.",
)

Resume = Annotated[bool, typer.Option("--resume", help="Go on with the run in the run directory.")]
Overwrite = Annotated[bool, typer.Option("--overwrite", help="Replace the run in the run directory.")]
Debug = Annotated[bool, typer.Option("--debug", help="Show tracebacks.")]
RunDir = Annotated[Path, typer.Argument(metavar="RUN", help="The run directory.", show_default=False)]

app.command("check-rewards")(check_rewards_command)
app.command("try")(try_command)


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


def main(argv: Sequence[str] | None = None) -> NoReturn:
    """Entry point of `async-rl`."""
    run_app(app, argv, prog_name="async-rl", overrides_for=WITH_OVERRIDES)


@app.command("run")
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
        _say(f"stopped after {result.steps} steps", go_on)
    else:
        _say(f"done: {result.steps} steps in {result.seconds:.0f} s", f"{program()} export {result.run_dir} --to DIR")
    return result.exit_code


@app.command()
def demo(
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
        _say(f"stopped after {result.steps} steps", go_on)
    return result.exit_code


@app.command()
def status(run_dir: RunDir, debug: Debug = False) -> None:
    """Show a run as it stands: state, steps, queue, engines and versions, last metrics, checkpoints. Works on dead runs."""
    from async_rl.launch.look import look
    from async_rl.monitor.status import print_status

    del debug
    print_status(asyncio.run(look(run_dir, dict(os.environ))), Console())


@app.command()
def stop(
    run_dir: RunDir,
    timeout_s: Annotated[float | None, typer.Option(help="Seconds to wait; default: launch.stop_s and a margin.")] = None,
    debug: Debug = False,
) -> int:
    """End a run that goes on, cleanly: its supervisor, or the roles that were started by hand on this host."""
    from async_rl.launch.stop import stop_run

    del debug
    stopped = stop_run(run_dir, os.environ, timeout_s=timeout_s)
    if stopped.supervisor is not None:
        _say(f"stopped (process {stopped.supervisor})", f"{program()} run {run_dir}/config.toml --resume")
    for worker in stopped.roles:
        print(f"stopped {worker.worker_id} (process {worker.info['pid']})")
    for worker in stopped.elsewhere:
        print(f"still running: {worker.worker_id} on {worker.info.get('host', 'an unknown host')}: send it SIGTERM there")
    if not stopped.anything:
        print("nothing of this run is running")
    return 1 if stopped.elsewhere else 0


@app.command()
def clean(
    run_dir: RunDir,
    everything: Annotated[bool, typer.Option("--all", help="Remove the whole run directory.")] = False,
    yes: Annotated[bool, typer.Option("--yes", help="Confirm --all.")] = False,
    debug: Debug = False,
) -> None:
    """Remove what a dead run left behind: sockets, half-written files, weights in transit. Refused while it is alive."""
    from async_rl.launch.clean import clean_run

    del debug
    if everything and not yes:
        raise ConfigError(f"--all removes {run_dir} with its checkpoints and its intake log; confirm with --yes")
    removed = clean_run(run_dir, os.environ, everything=everything)
    for path in removed:
        print(f"removed {path}")
    if not removed:
        print("nothing to remove")


@app.command()
def show(
    run_dir: RunDir,
    task: Annotated[str | None, typer.Option(help="Id of the task to show.", show_default=False)] = None,
    step: Annotated[
        int | None, typer.Option(help="Show what the step from this policy version trained.", show_default=False)
    ] = None,
    limit: Annotated[int, typer.Option(min=1, help="Groups to show.")] = 1,
    members: Annotated[int, typer.Option(min=1, help="Trajectories to show of each group.")] = 1,
    debug: Debug = False,
) -> None:
    """Show trajectories of a run: every token with its logprob and policy version, and the reward."""
    from async_rl.launch.look import config_of_run
    from async_rl.model.tokenizer import load_tokenizer
    from async_rl.monitor.trajectories import find_groups, print_group

    del debug
    settings = config_of_run(run_dir)
    groups = find_groups(run_dir, task_id=task, step=step, limit=limit)
    tokenizer = load_tokenizer(settings.model.path)
    for group in groups:
        print_group(group, lambda ids: str(tokenizer.decode(list(ids))), Console(), members=members)


@app.command()
def validate(
    run_dir: RunDir,
    tokens: Annotated[int, typer.Option(min=0, help="Tokens to recompute of each version at hand.")] = 4096,
    debug: Debug = False,
) -> int:
    """Look again at what a run trained: masks, stop tokens, versions, rewards, advantages, logprobs recomputed. 1: faults."""
    from async_rl.checks.validate import print_report
    from async_rl.launch.validate import validate_run

    del debug
    report = validate_run(run_dir, tokens=tokens)
    print_report(report, Console())
    if not report.holds:
        print(f"trajectories that failed are in {run_dir}/quarantine, token by token")
    return 0 if report.holds else 1


@app.command("config")
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
    loaded = load_config(path, overrides_of(context), env)
    check(loaded.config)
    if toml:
        sys.stdout.write(dump_toml(loaded.config, redact=True))
        return
    table = Table(box=None, padding=(0, 2, 0, 0))
    table.add_column("setting", no_wrap=True)
    table.add_column("value", overflow="fold")
    table.add_column("from", style="dim", overflow="fold")
    for key, origin in loaded.origins.items():
        style = "" if origin.kind == "default" else "bold"
        table.add_row(Text(key, style), Text(_shown(loaded.config, key), style), redact_url(str(origin)))
    Console().print(table)


@app.command()
def export(
    run_dir: RunDir,
    to: Annotated[Path, typer.Option("--to", help="Directory to write.", show_default=False)],
    step: Annotated[int | None, typer.Option(help="Checkpoint to export; default: the newest.", show_default=False)] = None,
    debug: Debug = False,
) -> None:
    """Write a checkpoint as a Hugging Face model directory (safetensors and tokenizer)."""
    from async_rl.launch.export import export_run

    del debug
    export_run(run_dir, to, step=step)
    _say(f"exported to {to}", f'transformers.AutoModelForCausalLM.from_pretrained("{to}")')


@app.command()
def replay(
    run_dir: RunDir,
    start: Annotated[
        int | None, typer.Option("--from", help="Checkpoint to begin from; default: the beginning.", show_default=False)
    ] = None,
    debug: Debug = False,
) -> int:
    """Train a run again from its intake log, in memory, and compare with its newest checkpoint. Exit code 1 if they differ."""
    from async_rl.launch.look import config_of_run
    from async_rl.launch.replay import replay_with_progress

    del debug
    result = replay_with_progress(config_of_run(run_dir), start=start)
    print(f"trained {result.steps} step records again: version {result.first_version} to {result.version}")
    print(f"weights xxh3-128 {result.digest}")
    if not result.is_identical:
        print(f"NOT identical to {result.checkpoint}: largest difference {result.max_difference:.3g}")
        print("next: the run may have had another build, number of threads or of ranks, or settings that a resume changed")
        return 1
    _say(f"bit-identical to {result.checkpoint}", f"{program()} audit {run_dir}")
    return 0


@app.command()
def weights(
    run_dir: RunDir,
    limit: Annotated[int, typer.Option(min=1, help="Newest pushes to show.")] = 20,
    debug: Debug = False,
) -> None:
    """Show the weight pushes of a run: bytes, seconds of each phase, GB/s, share of memcpy, who serves, who failed and why."""
    from async_rl.monitor.weights import WIDE, print_pushes, pushes_of
    from async_rl.run_dir.layout import open_run

    del debug
    layout, _ = open_run(run_dir)
    print_pushes(pushes_of(layout), Console(width=WIDE), limit=limit)


@app.command()
def audit(run_dir: RunDir, debug: Debug = False) -> int:
    """Account for every task of a run: issued, and how each ended. Exit code 1 if one was lost or trained twice."""
    from async_rl.checks.audit import audit as audit_run
    from async_rl.checks.audit import print_audit

    del debug
    found = audit_run(run_dir)
    print_audit(found, Console())
    return 0 if found.is_exact else 1


class DeadAction(StrEnum):
    LIST = "list"
    SHOW = "show"
    REQUEUE = "requeue"
    DROP = "drop"


@app.command()
def dead(
    run_dir: RunDir,
    action: Annotated[DeadAction, typer.Argument(help="What to do.")] = DeadAction.LIST,
    entries: Annotated[
        list[str] | None, typer.Argument(metavar="ENTRY", help="Ids from the list, or 'all'.", show_default=False)
    ] = None,
    debug: Debug = False,
) -> None:
    """Tasks that could not be done: list them, show one as far as it can be read, give it another chance, or drop it."""
    del debug
    asyncio.run(_dead(run_dir, action, entries or []))


async def _dead(run_dir: Path, action: DeadAction, names: Sequence[str]) -> None:
    from async_rl.launch.dead import dead_letters
    from async_rl.monitor.dead import print_dead, print_dead_entry

    if action is not DeadAction.LIST and not names:
        raise ConfigError(f"{action.value} needs an ENTRY: name one or more from the list, or 'all'")
    console = Console()
    async with dead_letters(run_dir, os.environ) as letters:
        if action is DeadAction.LIST:
            print_dead(await letters.entries(), console)
            return
        for name in [entry.entry_id for entry in await letters.entries()] if list(names) == ["all"] else names:
            if action is DeadAction.SHOW:
                print_dead_entry(await letters.entry(name), console)
            elif action is DeadAction.REQUEUE:
                console.print(f"{name}: task {await letters.requeue(name)} is in the queue", markup=False)
            else:
                await letters.drop(name)
                console.print(f"{name}: dropped", markup=False)


@app.command()
def doctor(
    context: typer.Context,
    target: Annotated[
        Path | None,
        typer.Argument(
            metavar="[CONFIG|RUN]", help="TOML file or run directory; default: settings as they are.", show_default=False
        ),
    ] = None,
    debug: Debug = False,
) -> int:
    """Check server, disk, network and libraries for a run, and say what to change. Exit code 1 if a run would fail."""
    from async_rl.checks.doctor import check_machine, is_broken, print_findings
    from async_rl.checks.server import check_server
    from async_rl.launch.inputs import check_inputs
    from async_rl.launch.servers import server_like

    del debug
    settings = _examined(target, overrides_of(context))
    findings = check_machine(settings)
    if target is not None:
        findings += check_inputs(settings)
    with server_like(settings.redis, settings.run_dir) as url:
        findings += asyncio.run(check_server(settings.redis, url))
    print_findings(findings, Console())
    return int(is_broken(findings))


def _examined(target: Path | None, overrides: Sequence[str]) -> RunConfig:
    """The config to examine: of a run, of a file, or the defaults with environment and flags."""
    from async_rl.launch.look import config_of_run

    if target is None:
        return load_config(None, [f"--model.path={Path.cwd()}", *overrides]).config
    return config_of_run(target, dict(os.environ)) if target.is_dir() else load_config(target, overrides).config


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


def _say(what: str, then: str) -> None:
    print(what)
    print(f"next: {then}")


if __name__ == "__main__":
    main()
