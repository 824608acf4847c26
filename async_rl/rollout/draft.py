"""A trajectory while it grows: every id, and for every sampled one its logprob and versions."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

from async_rl.environments.base import Episode, TurnText
from async_rl.rollout.engine import Completion
from protocol.messages import FinishReason, PromptTask, Reward, SamplingParams, Timings, Trajectory, Turn
from protocol.versions import VersionSpan, spans_from_tokens


@dataclass(slots=True)
class Draft:
    """A trajectory while it grows."""

    token_ids: list[int]
    sampling: SamplingParams
    started_at_s: float
    mask: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    spans: list[VersionSpan] = field(default_factory=list)
    turns: list[Turn] = field(default_factory=list)
    texts: list[TurnText] = field(default_factory=list)
    observations: list[str] = field(default_factory=list)
    turn_rewards: list[float] = field(default_factory=list)
    queued_s: float = 0.0
    generate_s: float = 0.0
    environment_s: float = 0.0

    def begin(self, prompt_ids: Sequence[int]) -> None:
        """Give it its prompt."""
        self.token_ids = list(prompt_ids)
        self.mask = [0] * len(prompt_ids)
        self.logprobs = [0.0] * len(prompt_ids)

    @property
    def num_sampled(self) -> int:
        return sum(turn.end - turn.start for turn in self.turns)

    def add_turn(self, completion: Completion, text: str) -> None:
        start = len(self.token_ids)
        count = len(completion.token_ids)
        self.token_ids.extend(completion.token_ids.tolist())
        self.mask.extend([1] * count)
        self.logprobs.extend(completion.logprobs.tolist())
        self.spans.extend(_turn_spans(start, completion))
        self.turns.append(Turn(start, start + count, completion.finish_reason))
        self.texts.append(TurnText(text, completion.finish_reason, tuple(completion.token_ids.tolist())))
        self.queued_s += completion.queued_s
        self.generate_s += completion.generate_s

    def episode(self, task: PromptTask, index: int) -> Episode:
        return Episode(task, index, tuple(self.texts), tuple(self.observations))

    def add_observation(self, text: str, token_ids: Sequence[int]) -> None:
        self.token_ids.extend(token_ids)
        self.mask.extend([0] * len(token_ids))
        self.logprobs.extend([0.0] * len(token_ids))
        self.observations.append(text)

    def seal(self, reward: Reward | None, *, now_s: float, reward_s: float, worker_id: str, engine_id: str) -> Trajectory:
        """The finished record. Without a turn it is cut by its prompt; aborted if its last turn was."""
        return Trajectory(
            token_ids=np.array(self.token_ids, dtype=np.int32),
            loss_mask=np.array(self.mask, dtype=np.uint8),
            behavior_logprobs=np.array(self.logprobs, dtype=np.float32),
            versions=tuple(self.spans),
            sampling=self.sampling,
            turns=tuple(self.turns),
            finish_reason=self.turns[-1].finish_reason if self.turns else FinishReason.LENGTH,
            timings=Timings(
                started_at_s=self.started_at_s,
                finished_at_s=now_s,
                queued_s=self.queued_s,
                generate_s=self.generate_s,
                environment_s=self.environment_s,
                reward_s=reward_s,
            ),
            worker_id=worker_id,
            engine_id=engine_id,
            reward=reward,
        )


def _turn_spans(start: int, completion: Completion) -> tuple[VersionSpan, ...]:
    versions, kv_versions = completion.versions, completion.kv_versions
    count = len(versions)
    if count and versions[0] == versions[-1] and kv_versions[0] == kv_versions[-1]:  # both never decrease in a turn
        return (VersionSpan(start, start + count, int(versions[0]), int(kv_versions[0])),)
    return spans_from_tokens(range(start, start + count), versions.tolist(), kv_versions.tolist())
