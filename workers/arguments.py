"""What every command line of ours does alike: config and dotted overrides, `--dry-run`, one line per error, exit codes."""

from __future__ import annotations

import errno
import os
import secrets
import sys
import time
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated, Any, NoReturn

import typer

from async_rl import logs
from async_rl.config import Origin, RunConfig, check, load_config
from async_rl.config.text import environment_variable
from async_rl.errors import AsyncRLError, ConfigError, ProtocolError, RunDirError, exit_code
from async_rl.launch.prepare import write_config
from async_rl.logs import Event, redact_url
from async_rl.run_dir.layout import RunLayout, create_run, open_run

INTERRUPTED = 130
REDIS_URL_VARIABLE = environment_variable("redis.url")


@dataclass(frozen=True, slots=True)
class RoleArguments:
    """What a role process was started with. `config` is loaded and checked; logging is configured when `run` is called."""

    role: str
    config: RunConfig
    origins: Mapping[str, Origin]
    run_id: str
    """Empty with --dry-run, which opens no run."""
    worker_id: str
    """Unique per process unless --worker-id was given: a worker that restarts is another worker."""
    index: int
    debug: bool

    @property
    def layout(self) -> RunLayout:
        return RunLayout(self.config.run_dir)


def role_main(
    role: str,
    run: Callable[[RoleArguments], None],
    argv: Sequence[str] | None = None,
    *,
    plan: Callable[[RoleArguments], Mapping[str, str]] = lambda _: {},
) -> NoReturn:
    """The whole `main()` of a role. Exits.

    Parse, load and check; with --dry-run print what would run (`plan` adds lines). Else open the run directory, configure
    logging and call `run`. The coordinator makes a run directory that is missing; the other roles wait for it, as long as
    redis.retry_s: outside the local launcher nobody says in which order roles start.
    """

    def command(
        context: typer.Context,
        config: Annotated[
            Path | None, typer.Argument(help="TOML file; default: that of --run-dir.", show_default=False)
        ] = None,
        run_dir: Annotated[Path | None, typer.Option(help="Same as --run_dir=DIR.", show_default=False)] = None,
        worker_id: Annotated[str | None, typer.Option(help="Name of this worker in the queue.", show_default=False)] = None,
        index: Annotated[int, typer.Option(min=0, help="Number of this process among those of its role.")] = 0,
        dry_run: Annotated[bool, typer.Option("--dry-run", help="Load and check the config, print what would run.")] = False,
        debug: Annotated[bool, typer.Option("--debug", help="Show tracebacks.")] = False,
    ) -> None:
        arguments = _role_arguments(
            role, config, run_dir=run_dir, overrides=overrides_of(context), worker_id=worker_id, index=index, debug=debug
        )
        if dry_run:
            _print_plan(arguments, plan(arguments))
        else:
            _run_logged(_attached(arguments), run)

    command.__doc__ = f"Run one {role} process. Any setting of the config can be set: --section.key=value."
    app = typer.Typer(add_completion=False, pretty_exceptions_enable=False)
    app.command()(command)
    run_app(app, argv, prog_name=f"async-rl-{role}")


def run_app(
    app: typer.Typer, argv: Sequence[str] | None = None, *, prog_name: str, overrides_for: Collection[str] | None = None
) -> NoReturn:
    """Run a Typer app whose commands take dotted overrides (`overrides_of(context)`), and exit with the right code.

    overrides_for: subcommands that take overrides; the others refuse options that they do not know. None: every command.
    """
    argv = sys.argv[1:] if argv is None else list(argv)
    with cli_errors(debug="--debug" in argv):
        command = typer.main.get_command(app)
        subcommand = next((argument for argument in argv if not argument.startswith("-")), None)
        own, overrides = list(argv), list[str]()
        if overrides_for is None or subcommand in overrides_for:
            own, overrides = split_overrides(argv, _options(command))
        result = command.main(args=own, prog_name=prog_name, standalone_mode=False, obj=overrides)
        raise SystemExit(result if isinstance(result, int) else 0)
    raise AssertionError("unreachable: cli_errors exits")


def overrides_of(context: typer.Context) -> Sequence[str]:
    """The dotted overrides of this command line, for `load_config`."""
    return list(context.obj or ())


def split_overrides(argv: Sequence[str], own_options: Collection[str]) -> tuple[list[str], list[str]]:
    """Separate a command's own arguments from overrides: every `--name` that is not an option of its own, with its value.

    After a lone `--` nothing is an override.
    """
    own: list[str] = []
    overrides: list[str] = []
    position = 0
    while position < len(argv):
        argument = argv[position]
        position += 1
        if argument == "--":
            own.extend(argv[position - 1 :])
            break
        if not argument.startswith("--") or argument.partition("=")[0] in own_options:
            own.append(argument)
            continue
        overrides.append(argument)
        if "=" not in argument and position < len(argv) and not argv[position].startswith("--"):
            overrides.append(argv[position])
            position += 1
    return own, overrides


@contextmanager
def cli_errors(*, debug: bool | None = None) -> Iterator[None]:
    """End the process as a command should: `error: …` on stderr and an exit code, no traceback (unless `debug`).

    Usable as a decorator. debug None: whether --debug is on the command line. A bug of ours goes to the log with its traceback.
    """
    show_traceback = "--debug" in sys.argv if debug is None else debug
    try:
        yield
    except (SystemExit, GeneratorExit):
        raise
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
        raise SystemExit(INTERRUPTED) from None
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # nobody reads: let the interpreter's last flush pass
        raise SystemExit(1) from None
    except BaseException as error:
        if show_traceback:
            sys.excepthook(type(error), error, error.__traceback__)
        message, code = describe(error)
        with suppress(OSError):  # stderr may be a file on the disk that is full: the exit code still says it
            print(f"error: {message}", file=sys.stderr, flush=True)
        raise SystemExit(code) from None


def describe(error: BaseException) -> tuple[str, int]:
    """One line (or one per problem) for people, and the exit code."""
    error = main_cause(error)
    if isinstance(error, AsyncRLError | ProtocolError):
        return str(error) or type(error).__name__, exit_code(error)
    usage = getattr(error, "format_message", None)  # a usage error of click, wherever typer keeps its copy
    if callable(usage):
        return f"{' '.join(str(usage()).split())} (see --help)", int(getattr(error, "exit_code", 2))
    if isinstance(error, OSError) and error.errno in {errno.ENOSPC, errno.EDQUOT, errno.EFBIG}:
        where = f" while writing {error.filename}" if error.filename else ""
        return f"the disk is full{where}: free space, then continue with --resume", RunDirError.exit_code
    text = " ".join(str(error).split())
    return f"unexpected {type(error).__name__}: {text} (traceback with --debug)", exit_code(error)


def main_cause(error: BaseException) -> BaseException:
    """Of an exception group, the error that explains it best: the first of ours, else the first."""
    if not isinstance(error, BaseExceptionGroup):
        return error
    leaves = [main_cause(inner) for inner in error.exceptions]
    return next((leaf for leaf in leaves if isinstance(leaf, AsyncRLError | ProtocolError)), leaves[0])


def _role_arguments(
    role: str,
    path: Path | None,
    *,
    run_dir: Path | None,
    overrides: Sequence[str],
    worker_id: str | None,
    index: int,
    debug: bool,
) -> RoleArguments:
    if path is None:
        if run_dir is None:
            raise ConfigError("CONFIG is missing: name a TOML file, or a run directory with --run-dir")
        path = RunLayout(run_dir).config_toml
    env: Mapping[str, str] = os.environ
    if path.name == RunLayout(path.parent).config_toml.name and RunLayout(path.parent).run_json.exists():
        # A run's own config.toml is resolved: flags of the run beat the environment, which must not come back on top here, save
        # for the server's address: its password is never written, so the supervisor hands it over by environment.
        env = {name: value for name, value in os.environ.items() if name == REDIS_URL_VARIABLE}
        run_dir = run_dir or path.parent
    if run_dir is not None:
        overrides = [f"--run_dir={run_dir}", *overrides]
    loaded = load_config(path, overrides, env)
    check(loaded.config)
    name = worker_id or f"{role}-{index}-{secrets.token_hex(3)}"
    return RoleArguments(role, loaded.config, loaded.origins, "", name, index, debug)


def _attached(arguments: RoleArguments, sleep: Callable[[float], None] = time.sleep) -> RoleArguments:
    """Open the run, or make it (coordinator), or wait until somebody did. Raises: RunDirError."""
    layout = arguments.layout
    if arguments.role == "coordinator" and not layout.run_json.exists():
        create_run(layout.root)
        write_config(arguments.config, layout)
    deadline = time.monotonic() + arguments.config.redis.retry_s
    while not layout.run_json.exists() and time.monotonic() < deadline:
        sleep(0.2)
    _, identity = open_run(layout.root)
    return replace(arguments, run_id=identity.run_id)


def _run_logged(arguments: RoleArguments, run: Callable[[RoleArguments], None]) -> None:
    alone = arguments.role == "coordinator" or (arguments.role == "trainer" and arguments.config.trainer.world_size == 1)
    logs.configure(
        role=arguments.role,
        worker_id=arguments.worker_id,
        run_id=arguments.run_id,
        run_dir=arguments.layout.root,
        index=None if alone else arguments.index,
        level=arguments.config.logging.level,
    )
    log = logs.get_logger()
    log.info(Event.ROLE_STARTED, pid=os.getpid(), index=arguments.index)
    try:
        run(arguments)
    except Exception as error:
        cause = main_cause(error)
        expected = isinstance(cause, AsyncRLError | ProtocolError)
        log.error(Event.ROLE_FAILED, error=describe(cause)[0], exc_info=False if expected else error)
        raise
    log.info(Event.ROLE_ENDED)


def _print_plan(arguments: RoleArguments, more: Mapping[str, str]) -> None:
    config = arguments.config
    embedded = f"embedded (a server of the run's own, data in {RunLayout(config.run_dir).redis_dir})"
    lines = {
        "role": f"{arguments.role} {arguments.index}",
        "worker": arguments.worker_id,
        "run_dir": str(config.run_dir),
        "model": str(config.model.path),
        "environment": config.environment.name,
        "redis": embedded if config.redis.url == "embedded" else redact_url(config.redis.url),
        **more,
    }
    width = max(map(len, lines))
    print("The config is valid. This would run:")
    for name, value in lines.items():
        print(f"  {name:<{width}}  {value}")


def _options(command: Any) -> frozenset[str]:
    """Every option of a command and of its subcommands, and --help."""
    names = {"--help"}
    for parameter in getattr(command, "params", ()):
        names.update(getattr(parameter, "opts", ()), getattr(parameter, "secondary_opts", ()))
    for subcommand in getattr(command, "commands", {}).values():
        names |= _options(subcommand)
    return frozenset(names)
