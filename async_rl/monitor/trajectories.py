"""`async-rl show`: trajectories of a run out of its intake log, token by token."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from rich.console import Console
from rich.table import Table
from rich.text import Text

from async_rl.algorithms.staleness import GroupVerdict
from async_rl.errors import DataError
from async_rl.monitor.text import number
from async_rl.run_dir.intake_log import LogIndex, read_group, read_log
from async_rl.run_dir.layout import open_run
from async_rl.run_dir.records import GroupUse, StepRecord
from protocol.codec import decode_group
from protocol.messages import Trajectory, TrajectoryGroup

Decode = Callable[[Sequence[int]], str]


@dataclass(frozen=True, slots=True)
class ShownGroup:
    """A group with what became of it; `use` and `step` are None while no step has named it."""

    group: TrajectoryGroup
    use: GroupUse | None
    step: StepRecord | None


def find_groups(run_dir: Path, *, task_id: str | None, step: int | None, limit: int) -> Sequence[ShownGroup]:
    """The group of a task, or groups of the step that starts from policy version `step`, or else the newest ones.

    Raises: RunDirError, IntakeLogError; DataError if the log has no such task or step.
    """
    layout, _ = open_run(run_dir)
    index = read_log(layout.intake_dir)
    if not index.groups:
        raise DataError(f"{layout.intake_dir} has no trajectories yet; the run has not come that far")
    uses = {use.task_id: (use, record) for record in index.steps for use in record.groups}
    shown: list[ShownGroup] = []
    for name in _chosen(index, task_id=task_id, step=step)[:limit]:
        group = decode_group(read_group(layout.intake_dir, name, index.groups[name]))
        use, record = uses.get(name, (None, None))
        shown.append(ShownGroup(group, use, record))
    return shown


def _chosen(index: LogIndex, *, task_id: str | None, step: int | None) -> Sequence[str]:
    if task_id is not None:
        if task_id in index.settled and task_id not in index.groups:
            end = index.settled[task_id][0]
            raise DataError(f"task {task_id!r} ended as {end}; the log was compacted since, and keeps only that of it")
        if task_id not in index.groups:
            raise DataError(f"task {task_id!r} is not in the intake log; its newest task is {list(index.groups)[-1]!r}")
        return [task_id]
    if step is None:
        return list(reversed(index.groups))
    names = [use.task_id for record in index.steps if record.trains and record.version == step for use in record.groups]
    if not names:
        last = max((record.version for record in index.steps if record.trains), default=None)
        first = min((record.version for record in index.steps if record.trains), default=None)
        raise DataError(f"the log has no step from policy version {step}; it has those from {first} to {last}")
    return names


def print_group(shown: ShownGroup, decode: Decode, console: Console, *, members: int) -> None:
    """Print a group's fate and its first `members` trajectories, a row per token."""
    group = shown.group
    end = "waits for a step" if shown.use is None or shown.step is None else f"{shown.use.end} at version {shown.step.version}"
    rewards = ", ".join(_reward(trajectory) for trajectory in group.trajectories)
    console.print(Text.assemble(("task ", "dim"), (group.task_id, "bold"), f"  {end}  ", ("rewards ", "dim"), rewards))
    verdicts = None if shown.use is None else GroupVerdict.from_record(shown.use.verdict).trajectories
    for index, trajectory in enumerate(group.trajectories[:members]):
        verdict = "" if verdicts is None else f", {verdicts[index].verdict}, lag {verdicts[index].lag}"
        console.print(_token_table(trajectory, decode, f"trajectory {index}: reward {_reward(trajectory)}{verdict}"))


def print_trajectories(group: TrajectoryGroup, decode: Decode, console: Console) -> None:
    """Print every trajectory of a group that is in no run: a row per token, the reward and its components."""
    for index, trajectory in enumerate(group.trajectories):
        reward = trajectory.reward
        parts = {} if reward is None else reward.components
        components = "".join(f", {name} {value:g}" for name, value in parts.items())
        turns = f"{len(trajectory.turns)} turn{'s' if len(trajectory.turns) != 1 else ''}, {trajectory.finish_reason}"
        title = f"task {group.task_id}, trajectory {index}: {turns}; reward {_reward(trajectory)}{components}"
        console.print(_token_table(trajectory, decode, title))


def _reward(trajectory: Trajectory) -> str:
    reward = trajectory.reward
    if reward is None:
        return "not scored"
    return f"{reward.value:g}" if reward.value is not None else f"invalid ({reward.invalid_reason})"


def _token_table(trajectory: Trajectory, decode: Decode, title: str) -> Table:
    table = Table(title=title, title_justify="left", title_style="default")
    for name in ("position", "token id", "text", "trained", "behavior logprob", "policy version"):
        table.add_column(name, justify="left" if name == "text" else "right")
    for row in _rows(trajectory, decode):
        table.add_row(*row)
    return table


def _rows(trajectory: Trajectory, decode: Decode) -> Iterator[tuple[str, ...]]:
    versions = {position: span.version for span in trajectory.versions for position in range(span.start, span.end)}
    for position, token in enumerate(trajectory.token_ids.tolist()):
        sampled = position in versions
        yield (
            str(position),
            str(token),
            repr(decode([token]))[1:-1],
            "yes" if trajectory.loss_mask[position] else "no",
            number(float(trajectory.behavior_logprobs[position]), 4) if sampled else "",
            str(versions[position]) if sampled else "",
        )
