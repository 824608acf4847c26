"""async-rl-evaluation: evaluates the run's versions on held-out prompts beside training."""

from __future__ import annotations

from workers.arguments import RoleArguments, role_main


def main() -> None:
    role_main("evaluation", run, plan=plan)


def plan(arguments: RoleArguments) -> dict[str, str]:
    """What --dry-run says beside the rest. Raises: ConfigError, DataError."""
    from async_rl.environments.load import load_environment
    from async_rl.launch.held_out_tasks import held_out_tasks_of

    tasks = held_out_tasks_of(arguments.config, load_environment(arguments.config.environment))
    return {"held out": ", ".join(f"{len(those)} of {name}" for name, those in tasks.items())}


def run(arguments: RoleArguments) -> None:
    """Evaluate until the run has ended and its last version is evaluated, or SIGTERM comes."""
    from workers.evaluation_engine import evaluate  # torch and transformers take seconds, which --help does without

    evaluate(arguments)


if __name__ == "__main__":
    main()
