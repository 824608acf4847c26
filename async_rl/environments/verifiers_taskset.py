"""Tasksets of the library `verifiers` (0.4), as they are: their prompts, rewards, metrics and stop conditions.

A completion becomes a `Trace` with the messages of the conversation, and the task scores it. What needs a runtime (a container,
tool servers) is refused: those tasks run in their own harness. Source of the interface: `verifiers.v1` 0.4.0.
"""

from __future__ import annotations

import inspect
import math
from collections.abc import Iterator, Mapping, Sequence
from itertools import islice
from typing import Any

from async_rl.environments.base import Episode, Row
from async_rl.environments.calls import call
from async_rl.environments.objects import load_object
from async_rl.errors import ConfigError
from protocol.messages import ChatMessage, Reward


class VerifiersTaskset:
    """taskset: `module:Class` of a `verifiers.v1.Taskset`; config: fields of its config. num_tasks bounds an infinite one.

    held_out: that many tasks from the end are kept for evaluation. The reward is the weighted sum of the task's rewards, each a
    component; its metrics are components named `metric.NAME`. A reward that was not computed makes the whole invalid.
    """

    def __init__(
        self, taskset: str, *, config: Mapping[str, Any] | None = None, num_tasks: int | None = None, held_out: int = 0
    ) -> None:
        kind: Any = load_object(taskset, field="environment.args.taskset", kind="Class")
        try:
            from verifiers.v1 import Taskset, TasksetConfig
            from verifiers.v1.utils.generic import concrete_type
        except ImportError as error:
            raise ConfigError(f"environment verifiers needs {error.name}: pip install 'async-rl[environments]'") from error
        if Taskset not in getattr(kind, "__mro__", ()):
            raise ConfigError(f"environment.args.taskset={taskset!r} is no verifiers.v1.Taskset")
        settings = (concrete_type(kind, TasksetConfig, origin=Taskset) or TasksetConfig)(**(config or {}))
        tasks = kind(settings)
        if num_tasks is None and not tasks.bounded:
            raise ConfigError(f"environment.args.num_tasks is not set, and {taskset!r} never ends; set how many tasks to read")
        self._tasks = list(tasks if num_tasks is None else islice(tasks, num_tasks))
        if kind.toolsets(settings) or any(type(task).toolsets(task.config) for task in self._tasks[:1]):
            raise ConfigError(f"environment.args.taskset={taskset!r} brings tool servers, which run in its own harness only")
        if not 0 <= held_out < len(self._tasks):
            raise ConfigError(f"environment.args.held_out={held_out} must be from 0 to {len(self._tasks) - 1}, below all tasks")
        self._num_held_out = held_out

    # -- Environment ---------------------------------------------------------------------------------------------
    async def observe(self, episode: Episode) -> str | None:
        """One turn: without tools or a simulated user, the agent's first reply ends its episode."""
        return None

    async def score(self, episode: Episode) -> Reward:
        task = self._tasks[int(str(episode.task.columns["task"]))]
        trace = _trace(task, episode)
        await _stop(task, trace)
        await task.score(trace)
        missing = [name for name, reward in trace.rewards.items() if reward is None]
        if missing:
            return Reward.invalid(f"the task did not compute {', '.join(missing)}", "not_scored")
        components = {name: float(reward.score) for name, reward in trace.rewards.items()}
        components |= {f"metric.{name}": float(value) for name, value in trace.metrics.items() if _is_number(value)}
        return Reward(float(trace.reward), components)

    # -- RowSource -----------------------------------------------------------------------------------------------
    def num_rows(self) -> int:
        return len(self._tasks) - self._num_held_out

    def row(self, index: int) -> Row:
        if not 0 <= index < self.num_rows():
            raise IndexError(f"task {index} is outside 0 .. {self.num_rows() - 1}")
        return self._make(index)

    def held_out_rows(self, count: int) -> Sequence[Row]:
        return [self._make(self.num_rows() + index) for index in range(min(count, self._num_held_out))]

    def warmup_pairs(self, count: int, seed: int) -> Iterator[tuple[str, str]]:
        """None: a taskset knows how to judge answers, not how to give them."""
        return iter(())

    def _make(self, index: int) -> Row:
        return Row(prompt=_prompt(self._tasks[index]), columns={"task": index})


def _prompt(task: Any) -> tuple[ChatMessage, ...]:
    data = task.data
    if data.prompt is None:
        raise ConfigError(f"task {data.idx} has no prompt: a simulated user opens it, which needs verifiers' own harness")
    said = [{"role": "user", "content": data.prompt}] if isinstance(data.prompt, str) else _plain(data.prompt)
    system = [] if data.system_prompt is None else [{"role": "system", "content": data.system_prompt}]
    return (*system, *said)


def _plain(messages: Sequence[Any]) -> list[ChatMessage]:
    return [message.model_dump(exclude_none=True) for message in messages]


def _trace(task: Any, episode: Episode) -> Any:
    """The conversation as verifiers records it."""
    from pydantic import TypeAdapter
    from verifiers.v1.configs.agent import AgentConfig
    from verifiers.v1.graph import MessageNode
    from verifiers.v1.trace import AgentInfo, Trace, TraceTask
    from verifiers.v1.types import AssistantMessage, Messages

    trace: Any = Trace(task=TraceTask(type=type(task).__name__, data=task.data), agent=AgentInfo(config=AgentConfig()))
    said = TypeAdapter(Messages).validate_python([dict(message) for message in _prompt(task)])
    said += [AssistantMessage(content=turn.text) for turn in episode.turns]
    first_sampled = len(said) - len(episode.turns)
    for index, message in enumerate(said):
        parent = index - 1 if index else None
        trace.nodes.append(MessageNode(message=message, parent=parent, sampled=index >= first_sampled))
    return trace


async def _stop(task: Any, trace: Any) -> None:
    """The task's stop conditions that look at the trace, in its order; the first that holds names how it ended."""
    for hook in task.hooks("stop"):
        if list(inspect.signature(hook).parameters) == ["trace"] and await call(hook, trace):
            trace.stop(hook.__name__)
            return
    trace.stop("agent_completed")


def _is_number(value: object) -> bool:
    return isinstance(value, int | float) and math.isfinite(value)
