"""Trajectories whose records cannot be trusted: counted, said, and written where a person can read them token by token."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np
import numpy.typing as npt

from async_rl.algorithms.records import RecordFault, explain
from async_rl.algorithms.staleness import InvalidReason
from async_rl.config.run import RunConfig
from async_rl.errors import DataError
from async_rl.logs import Event, get_logger
from async_rl.model.tokenizer import load_tokenizer
from async_rl.run_dir.layout import RunLayout
from protocol.messages import Trajectory, TrajectoryGroup

NOT_RECORDS = frozenset({InvalidReason.UNSCORED, InvalidReason.REWARD, InvalidReason.ABORTED})
"""Invalid for reasons that say nothing against the record; they are counted elsewhere."""
SAID_OF_EACH = 5
"""Trajectories per reason that get an event of their own; the others are counted."""

Floats = npt.NDArray[np.float64]


class Quarantine:
    """One per trainer. A full disk loses files, never the run."""

    def __init__(self, config: RunConfig) -> None:
        self._directory = RunLayout(Path(config.run_dir)).quarantine_dir
        self._model = config.model.path
        self._keep = config.validation.keep_files
        self._counts: Counter[str] = Counter()
        self._said: Counter[str] = Counter()
        self._known: set[tuple[str, int]] = set()
        self._decode: Callable[[Sequence[int]], str] | None = None

    def take_counts(self) -> dict[str, int]:
        """Quarantined trajectories per reason since the last call."""
        counts, self._counts = dict(self._counts), Counter()
        return counts

    def add_invalid(self, group: TrajectoryGroup, member: int, reason: InvalidReason) -> None:
        """A step found it invalid. What was added before, or says nothing about its record, is left out."""
        if reason in NOT_RECORDS or (group.task_id, member) in self._known:
            self._known.discard((group.task_id, member))
            return
        trajectory = group.trajectories[member]
        words = explain(trajectory, RecordFault(reason.value)) if reason.value in set(RecordFault) else reason.value
        self._put(group, member, reason, words, None)

    def add(
        self, group: TrajectoryGroup, member: int, reason: InvalidReason, explanation: str, recomputed: Floats | None = None
    ) -> None:
        """A check found it, before any step. recomputed: float64 [T], beside the recorded logprobs in the file."""
        self._known.add((group.task_id, member))
        self._put(group, member, reason, explanation, recomputed)

    def _put(
        self, group: TrajectoryGroup, member: int, reason: InvalidReason, explanation: str, recomputed: Floats | None
    ) -> None:
        self._counts[reason.value] += 1
        self._said[reason.value] += 1
        path = self._write(group, member, reason, explanation, recomputed)
        if self._said[reason.value] <= SAID_OF_EACH:
            get_logger().error(
                Event.GROUP_QUARANTINED,
                task_id=group.task_id,
                member=member,
                reason=reason.value,
                explanation=explanation,
                engine=group.trajectories[member].engine_id,
                file=None if path is None else str(path),
            )

    def _write(
        self, group: TrajectoryGroup, member: int, reason: InvalidReason, explanation: str, recomputed: Floats | None
    ) -> Path | None:
        if sum(self._said.values()) > self._keep:
            return None
        name = re.sub(r"[^A-Za-z0-9._-]+", "-", f"{group.task_id}-{member}")
        path = self._directory / f"{name}.txt"
        text = quarantine_text(group, member, f"{reason.value}: {explanation}", recomputed, self._decoder())
        try:
            self._directory.mkdir(parents=True, exist_ok=True)
            path.write_text(text, encoding="utf-8")
        except OSError:
            return None
        return path

    def _decoder(self) -> Callable[[Sequence[int]], str]:
        if self._decode is None:
            try:
                tokenizer = load_tokenizer(self._model)
                self._decode = lambda ids: str(tokenizer.decode(list(ids)))
            except DataError:
                self._decode = lambda ids: ""
        return self._decode


def quarantine_text(
    group: TrajectoryGroup, member: int, headline: str, recomputed: Floats | None, decode: Callable[[Sequence[int]], str]
) -> str:
    """What the file says: the reason, where it came from, and a row per token."""
    trajectory = group.trajectories[member]
    reward = trajectory.reward
    head = [
        headline,
        f"task {group.task_id}, trajectory {member}, engine {trajectory.engine_id}, worker {trajectory.worker_id}",
        f"temperature {trajectory.sampling.temperature:g}, finished by {trajectory.finish_reason.value}, "
        f"reward {'not scored' if reward is None else reward.value if reward.is_valid else reward.invalid_reason}",
        "",
        f"{'position':>8} {'token':>7} {'text':<14} {'in turn':>7} {'trained':>7} {'version':>7} {'recorded':>10} "
        f"{'recomputed':>10}",
    ]
    return "\n".join([*head, *_token_rows(trajectory, recomputed, decode)]) + "\n"


def _token_rows(trajectory: Trajectory, recomputed: Floats | None, decode: Callable[[Sequence[int]], str]) -> list[str]:
    versions = {position: span.version for span in trajectory.versions for position in range(span.start, span.end)}
    in_turn = {position for turn in trajectory.turns for position in range(turn.start, turn.end)}
    length = min(len(trajectory.token_ids), len(trajectory.loss_mask), len(trajectory.behavior_logprobs))
    rows = []
    for position, token in enumerate(trajectory.token_ids[:length].tolist()):
        text = repr(decode([token]))[1:-1][:14]
        trained = "yes" if trajectory.loss_mask[position] else "no"
        other = "" if recomputed is None or position >= len(recomputed) else f"{recomputed[position]:.4f}"
        rows.append(
            f"{position:>8} {token:>7} {text:<14} {'yes' if position in in_turn else 'no':>7} {trained:>7} "
            f"{versions.get(position, ''):>7} {trajectory.behavior_logprobs[position]:>10.4f} {other:>10}"
        )
    return rows
