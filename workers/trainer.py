"""async-rl-trainer: one FSDP2 rank. Alone, or one of N under torchrun."""

from __future__ import annotations

from workers.arguments import RoleArguments, role_main


def main() -> None:
    role_main("trainer", run, plan=plan)


def plan(arguments: RoleArguments) -> dict[str, str]:
    """Checks of --dry-run. Raises: DataError."""
    from async_rl.launch.inputs import require_model  # not for a role that runs: it brings pyarrow

    require_model(arguments.config)
    return {}


def run(arguments: RoleArguments) -> None:
    """Join the ranks, load the policy, train (rank 0) or follow."""
    from workers.trainer_rank import train  # torch and transformers take seconds, which --help and --dry-run do without

    train(arguments)


if __name__ == "__main__":
    main()
