"""A delivery's message, if it is what the queue says it is."""

from __future__ import annotations

from protocol.codec import decode_group, decode_task
from protocol.errors import CodecError
from protocol.messages import PromptTask, TrajectoryGroup
from protocol.streams import Delivery


def task_of(delivery: Delivery) -> PromptTask:
    """The delivered task. Raises: CodecError if it cannot be read, or names another task than its entry."""
    task = decode_task(delivery.payload)
    _require_same(task.task_id, delivery)
    return task


def group_of(delivery: Delivery) -> TrajectoryGroup:
    """The delivered group. Raises: CodecError if it cannot be read, or names another task than its entry."""
    group = decode_group(delivery.payload)
    _require_same(group.task_id, delivery)
    return group


def _require_same(named: str, delivery: Delivery) -> None:
    """A frame that names another task would end that one, and leave its own outstanding for ever."""
    if named != delivery.task_id:
        entry = f"of task {delivery.task_id!r}" if delivery.task_id else "none of ours"
        raise CodecError(f"the frame names task {named!r}, but its entry {delivery.entry_id} is {entry}")
