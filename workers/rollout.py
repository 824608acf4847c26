"""async-rl-rollout: one rollout worker with one engine."""

from __future__ import annotations

from workers.arguments import RoleArguments, role_main


def main() -> None:
    role_main("rollout", run, plan=plan)


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
