"""One task into one trajectory group: sample, act in the environment, stamp, score. Token in, token out."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field
from typing import Protocol, TypeAlias

import numpy as np
from msgspec.structs import replace

from async_rl.environments.base import Environment, Episode, TurnText
from async_rl.environments.calls import call
from async_rl.errors import DataError
from async_rl.rollout.engine import Completion, RolloutEngine
from protocol.messages import (
    FinishReason,
    PromptTask,
    Reward,
    SamplingParams,
    Timings,
    Trajectory,
    TrajectoryGroup,
    Turn,
)
from protocol.seeds import trajectory_seed, turn_seed
from protocol.versions import VersionSpan, spans_from_tokens


class Tokenizer(Protocol):
    """What is needed of a Hugging Face tokenizer."""

    @property
    def eos_token_id(self) -> int | None: ...

    def encode(self, text: str, *, add_special_tokens: bool) -> list[int]: ...

    def decode(self, token_ids: Sequence[int], *, skip_special_tokens: bool) -> str: ...

    def apply_chat_template(self, messages: Sequence[object], *, add_generation_prompt: bool, tokenize: bool) -> str: ...


@dataclass(frozen=True, slots=True)
class RolloutLimits:
    """Bounds of a trajectory."""

    max_turns: int
    max_context: int
    max_new_tokens: int


@dataclass(slots=True)
class _Draft:
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
    is_scored: bool = False  # by the environment: not where it failed, nor where sampling was aborted
    queued_s: float = 0.0
    generate_s: float = 0.0
    environment_s: float = 0.0

    def __post_init__(self) -> None:
        self.mask = [0] * len(self.token_ids)
        self.logprobs = [0.0] * len(self.token_ids)

    def add_turn(self, completion: Completion, text: str) -> None:
        start = len(self.token_ids)
        count = len(completion.token_ids)
        self.token_ids.extend(completion.token_ids.tolist())
        self.mask.extend([1] * count)
        self.logprobs.extend(completion.logprobs.tolist())
        self.spans.extend(_turn_spans(start, completion))
        self.turns.append(Turn(start, start + count, completion.finish_reason))
        self.texts.append(TurnText(text, completion.finish_reason, count))
        self.queued_s += completion.queued_s
        self.generate_s += completion.generate_s

    def episode(self, task: PromptTask, index: int) -> Episode:
        return Episode(task, index, tuple(self.texts), tuple(self.observations))

    def add_observation(self, text: str, token_ids: Sequence[int]) -> None:
        self.token_ids.extend(token_ids)
        self.mask.extend([0] * len(token_ids))
        self.logprobs.extend([0.0] * len(token_ids))
        self.observations.append(text)


class _ObserveFailed(Exception):
    """The environment could not answer a turn."""

    def __init__(self, reason: str, error_type: str) -> None:
        super().__init__(reason)
        self.error_type = error_type


def _turn_spans(start: int, completion: Completion) -> tuple[VersionSpan, ...]:
    versions, kv_versions = completion.versions, completion.kv_versions
    count = len(versions)
    if count and versions[0] == versions[-1] and kv_versions[0] == kv_versions[-1]:  # both never decrease in a turn
        return (VersionSpan(start, start + count, int(versions[0]), int(kv_versions[0])),)
    return spans_from_tokens(range(start, start + count), versions.tolist(), kv_versions.tolist())


_LONGEST_REASON = 500
Score: TypeAlias = Callable[[Episode], Awaitable[Reward]]
ScoreGroup: TypeAlias = Callable[[Sequence[Episode], Sequence[Reward]], Awaitable[Sequence[Reward]]]


class GroupRollout:
    """Turns tasks into groups with one engine, one tokenizer and one environment.

    score: scores a finished episode here; None leaves the group unscored, for reward workers. score_group: then scores those
    members together. observe_timeout_s: an environment that takes longer to answer a turn has failed; what it fails at ends as
    invalid, and the group goes on.
    """

    def __init__(
        self,
        engine: RolloutEngine,
        tokenizer: Tokenizer,
        environment: Environment,
        limits: RolloutLimits,
        *,
        worker_id: str,
        stop_token_ids: Sequence[int],
        score: Score | None,
        score_group: ScoreGroup | None = None,
        observe_timeout_s: float | None = None,
        skip_long_prompts: bool = False,
        clock: Callable[[], float] = time.time,
    ) -> None:
        self._engine = engine
        self._tokenizer = tokenizer
        self._environment = environment
        self._limits = limits
        self._worker_id = worker_id
        self._stop_token_ids = tuple(stop_token_ids)
        self._score = score
        self._score_group = score_group
        self._observe_timeout_s = observe_timeout_s
        self._skip_long_prompts = skip_long_prompts
        self._clock = clock
        self._last_served = 0

    @property
    def version(self) -> int:
        """What is served now; between a swap and its proof, what was served last: a task begun then samples what comes."""
        serving = self._engine.serving_version
        if serving is not None:
            self._last_served = serving
        return self._last_served

    async def run(self, task: PromptTask) -> TrajectoryGroup:
        """Sample the task's group. Raises: DataError for a prompt without room (unless skipped); EngineError."""
        started_version = self.version
        prompt_ids = self.encode_prompt(task)
        drafts = [_Draft(list(prompt_ids), self._sampling(task, index), self._clock()) for index in range(task.group_size)]
        if self._has_room(task, prompt_ids):
            completions = await self._engine.generate(prompt_ids, [self._turn_sampling(draft) for draft in drafts])
            alone = await asyncio.gather(
                *(self._play(task, index, draft, completions[index]) for index, draft in enumerate(drafts))
            )
            trajectories = await self._scored_together(task, drafts, alone)
        else:
            trajectories = [self._seal(draft, FinishReason.LENGTH, None, 0.0) for draft in drafts]
        return TrajectoryGroup(task, tuple(trajectories), started_version, self._clock())

    def encode_prompt(self, task: PromptTask) -> list[int]:
        """Prompt ids. Text gets the tokenizer's special tokens; a chat template brings its own, so none are added twice."""
        if isinstance(task.prompt, str):
            return self._tokenizer.encode(task.prompt, add_special_tokens=True)
        try:
            text = self._tokenizer.apply_chat_template(list(task.prompt), add_generation_prompt=True, tokenize=False)
        except Exception as error:  # no template, or one that cannot render these messages: its own kinds of errors
            raise DataError(
                f"task {task.task_id}: the tokenizer's chat template cannot render the prompt ({type(error).__name__}: "
                f"{' '.join(str(error).split())}); give text prompts, or a model with a template that can"
            ) from error
        return self._tokenizer.encode(text, add_special_tokens=False)

    def _has_room(self, task: PromptTask, prompt_ids: Sequence[int]) -> bool:
        if not prompt_ids:
            raise DataError(f"task {task.task_id}: the prompt has no tokens; remove the row or give it a prompt")
        if len(prompt_ids) < self._limits.max_context:
            return True
        if self._skip_long_prompts:
            return False
        raise DataError(
            f"task {task.task_id}: the prompt has {len(prompt_ids)} tokens, and the context holds {self._limits.max_context} "
            f"with at least one to sample; shorten it, raise rollout.max_context, or set data.on_long_prompt = 'skip'"
        )

    def _sampling(self, task: PromptTask, index: int) -> SamplingParams:
        return SamplingParams(
            temperature=task.temperature,
            max_new_tokens=min(task.max_new_tokens, self._limits.max_new_tokens),
            seed=trajectory_seed(task.seed, index),
            stop_token_ids=self._stop_token_ids,
        )

    def _turn_sampling(self, draft: _Draft) -> SamplingParams:
        room = self._limits.max_context - len(draft.token_ids)
        sampling = draft.sampling
        return replace(
            sampling,
            max_new_tokens=min(sampling.max_new_tokens, room),
            seed=turn_seed(sampling.seed, len(draft.turns)),
        )

    async def _play(self, task: PromptTask, index: int, draft: _Draft, completion: Completion) -> Trajectory:
        """Turn by turn until the environment has nothing more to say, or a limit is reached."""
        while True:
            draft.add_turn(completion, self._tokenizer.decode(completion.token_ids.tolist(), skip_special_tokens=True))
            if completion.finish_reason is FinishReason.ABORTED:
                return self._seal(draft, FinishReason.ABORTED, None, 0.0)
            try:
                goes_on = await self._observe(task, index, draft)
            except _ObserveFailed as error:
                return self._seal(draft, draft.turns[-1].finish_reason, Reward.invalid(str(error), error.error_type), 0.0)
            if not goes_on:
                break
            (completion,) = await self._engine.generate(draft.token_ids, [self._turn_sampling(draft)])
        started = self._clock()
        draft.is_scored = self._score is not None
        reward = None if self._score is None else await self._score(draft.episode(task, index))
        return self._seal(draft, draft.turns[-1].finish_reason, reward, self._clock() - started)

    async def _scored_together(
        self, task: PromptTask, drafts: Sequence[_Draft], trajectories: Sequence[Trajectory]
    ) -> list[Trajectory]:
        """Rewards that depend on the whole group, in place of those of the members that were scored alone."""
        members = [index for index, draft in enumerate(drafts) if draft.is_scored]
        if self._score_group is None or not members:
            return list(trajectories)
        alone = [reward for index in members if (reward := trajectories[index].reward) is not None]
        together = await self._score_group([drafts[index].episode(task, index) for index in members], alone)
        rewards = dict(zip(members, together, strict=True))
        return [
            replace(trajectory, reward=rewards[index]) if index in rewards else trajectory
            for index, trajectory in enumerate(trajectories)
        ]

    async def _observe(self, task: PromptTask, index: int, draft: _Draft) -> bool:
        """Append the environment's answer to the last turn. False: the trajectory is over. Raises: _ObserveFailed."""
        if len(draft.turns) >= self._limits.max_turns or draft.turns[-1].finish_reason is FinishReason.LENGTH:
            return False
        started = self._clock()
        text = await self._answer(draft.episode(task, index))
        draft.environment_s += self._clock() - started
        if text is None:
            return False
        token_ids = self._tokenizer.encode(text, add_special_tokens=False)
        if len(draft.token_ids) + len(token_ids) >= self._limits.max_context:
            return False
        draft.add_observation(text, token_ids)
        return True

    async def _answer(self, episode: Episode) -> str | None:
        """What the environment says to the last turn. Its failure is not the worker's, nor a reward of 0."""
        scope = asyncio.timeout(self._observe_timeout_s)
        try:
            async with scope:
                text = await call(self._environment.observe, episode)
        except TimeoutError as error:
            if scope.expired():
                raise _ObserveFailed(f"no answer within reward.timeout_s={self._observe_timeout_s:g}", "timeout") from error
            raise _ObserveFailed(f"observe raised TimeoutError: {error}", "TimeoutError") from error
        except (Exception, SystemExit) as error:  # an environment must not end its worker
            name = type(error).__name__
            raise _ObserveFailed(f"observe raised {name}: {error}"[:_LONGEST_REASON], name) from error
        if text is not None and not isinstance(text, str):
            raise _ObserveFailed(f"observe returned {type(text).__name__} {text!r:.200}; it must be text or None", "NotText")
        return text

    def _seal(self, draft: _Draft, finish: FinishReason, reward: Reward | None, reward_s: float) -> Trajectory:
        if not draft.turns and reward is None:
            reward = Reward.invalid("the prompt leaves no room in the context", "long_prompt")
        return Trajectory(
            token_ids=np.array(draft.token_ids, dtype=np.int32),
            loss_mask=np.array(draft.mask, dtype=np.uint8),
            behavior_logprobs=np.array(draft.logprobs, dtype=np.float32),
            versions=tuple(draft.spans),
            sampling=draft.sampling,
            turns=tuple(draft.turns),
            finish_reason=finish,
            timings=Timings(
                started_at_s=draft.started_at_s,
                finished_at_s=self._clock(),
                queued_s=draft.queued_s,
                generate_s=draft.generate_s,
                environment_s=draft.environment_s,
                reward_s=reward_s,
            ),
            worker_id=self._worker_id,
            engine_id=self._engine.engine_id,
            reward=reward,
        )
