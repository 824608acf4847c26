"""Commands of `async-rl` that say whether a run kept its promises, whether a machine can, and what to do with what failed."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Sequence
from enum import StrEnum
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from async_rl.config import RunConfig, load_config
from async_rl.errors import ConfigError
from async_rl.monitor.text import program
from workers.arguments import overrides_of
from workers.cli_options import Debug, RunDir, say


def audit_command(run_dir: RunDir, debug: Debug = False) -> int:
    """Account for every task of a run: issued, and how each ended. Exit code 1 if one was lost or trained twice."""
    from async_rl.checks.audit import audit as audit_run
    from async_rl.checks.audit import print_audit

    del debug
    found = audit_run(run_dir)
    print_audit(found, Console())
    return 0 if found.is_exact else 1


def validate_command(
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


def replay_command(
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
    say(f"bit-identical to {result.checkpoint}", f"{program()} audit {run_dir}")
    return 0


class DeadAction(StrEnum):
    LIST = "list"
    SHOW = "show"
    REQUEUE = "requeue"
    DROP = "drop"


def dead_command(
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


def doctor_command(
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
