"""Commands of `async-rl` that look at a run, end it, or take something from it."""

from __future__ import annotations

import asyncio
import os
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from async_rl.errors import ConfigError
from async_rl.monitor.text import program
from workers.cli_options import Debug, RunDir, say


def status_command(run_dir: RunDir, debug: Debug = False) -> None:
    """Show a run as it stands: state, steps, queue, engines and versions, last metrics, checkpoints. Works on dead runs."""
    from async_rl.launch.look import look
    from async_rl.monitor.status import print_status

    del debug
    print_status(asyncio.run(look(run_dir, dict(os.environ))), Console())


def show_command(
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


def weights_command(
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


def stop_command(
    run_dir: RunDir,
    timeout_s: Annotated[float | None, typer.Option(help="Seconds to wait; default: launch.stop_s and a margin.")] = None,
    debug: Debug = False,
) -> int:
    """End a run that goes on, cleanly: its supervisor, or the roles that were started by hand on this host."""
    from async_rl.launch.stop import stop_run

    del debug
    stopped = stop_run(run_dir, os.environ, timeout_s=timeout_s)
    if stopped.supervisor is not None:
        say(f"stopped (process {stopped.supervisor})", f"{program()} run {run_dir}/config.toml --resume")
    for worker in stopped.roles:
        print(f"stopped {worker.worker_id} (process {worker.info['pid']})")
    for worker in stopped.elsewhere:
        print(f"still running: {worker.worker_id} on {worker.info.get('host', 'an unknown host')}: send it SIGTERM there")
    if not stopped.anything:
        print("nothing of this run is running")
    return 1 if stopped.elsewhere else 0


def clean_command(
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


def export_command(
    run_dir: RunDir,
    to: Annotated[Path, typer.Option("--to", help="Directory to write.", show_default=False)],
    step: Annotated[int | None, typer.Option(help="Checkpoint to export; default: the newest.", show_default=False)] = None,
    debug: Debug = False,
) -> None:
    """Write a checkpoint as a Hugging Face model directory (safetensors and tokenizer)."""
    from async_rl.launch.export import export_run

    del debug
    export_run(run_dir, to, step=step)
    say(f"exported to {to}", f'transformers.AutoModelForCausalLM.from_pretrained("{to}")')
