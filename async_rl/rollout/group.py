"""One task into one trajectory group: sample, act in the environment, stamp, score. Token in, token out."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import TypeAlias

from msgspec.structs import replace

from async_rl.environments.base import Environment, Episode
from async_rl.environments.session import Opening, Reply, SampledTurn, SessionEnvironment
from async_rl.errors import DataError
from async_rl.rollout.chat import Chat, Tokenizer
from async_rl.rollout.draft import Draft
from async_rl.rollout.engine import Completion, Sampler
from async_rl.rollout.partners import (
    Partner,
    PartnerFailed,
    PlainPartner,
    Score,
    ScoreSession,
    open_session,
    with_turn_rewards,
)
from protocol.messages import FinishReason, PromptTask, Reward, SamplingParams, Trajectory, TrajectoryGroup
from protocol.seeds import trajectory_seed, turn_seed


@dataclass(frozen=True, slots=True)
class RolloutLimits:
    """Bounds of a trajectory."""

    max_turns: int
    max_context: int
    max_new_tokens: int
    max_sampled: int | None = None
    """Sampled tokens of all turns together."""
    max_s: float | None = None
    """Seconds after which no further turn begins."""


ScoreGroup: TypeAlias = Callable[[Sequence[Episode], Sequence[Reward]], Awaitable[Sequence[Reward]]]


@dataclass(slots=True)
class _Member:
    """One trajectory of a group on its way."""

    index: int
    draft: Draft
    partner: Partner | None = None  # None: it could not begin
    reward: Reward | None = None
    reward_s: float = 0.0
    is_scored: bool = False  # by the environment: not where it failed, nor where sampling was aborted

    @property
    def opening(self) -> Opening:
        assert self.partner is not None
        return self.partner.opening


class GroupRollout:
    """Turns tasks into groups with one engine, one tokenizer and one environment.

    score: scores a finished episode here; None leaves the group unscored, for reward workers. score_group: then scores those
    members together. score_session: scores an episode of a session, which is always scored here. observe_timeout_s: an
    environment that takes longer to answer a turn has failed; what it fails at ends as invalid, and the group goes on.
    """

    def __init__(
        self,
        engine: Sampler,
        tokenizer: Tokenizer,
        environment: Environment,
        limits: RolloutLimits,
        *,
        worker_id: str,
        stop_token_ids: Sequence[int],
        score: Score | None,
        score_group: ScoreGroup | None = None,
        score_session: ScoreSession | None = None,
        observe_timeout_s: float | None = None,
        skip_long_prompts: bool = False,
        clock: Callable[[], float] = time.time,
    ) -> None:
        self._engine = engine
        self._tokenizer = tokenizer
        self._chat = Chat(tokenizer, stop_token_ids)
        self._environment = environment
        self._limits = limits
        self._worker_id = worker_id
        self._stop_token_ids = tuple(stop_token_ids)
        self._score = score
        self._score_group = score_group
        self._score_session = score_session
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
        members = await self._open(task)
        try:
            await self._first_turns(task, [member for member in members if member.partner is not None])
            await self._score_together(task, members)
        finally:
            for member in members:
                if member.partner is not None:
                    with suppress(Exception):  # the episode is over, whatever its session says to that
                        await member.partner.close()
        trajectories = [self._sealed(member) for member in members]
        return TrajectoryGroup(task, tuple(trajectories), started_version, self._clock())

    def encode_prompt(self, task: PromptTask) -> list[int]:
        """Ids of the task's own prompt, with the special tokens that the model expects, once. Raises: DataError."""
        return self._encode(task, Opening(task.prompt))

    def _encode(self, task: PromptTask, opening: Opening) -> list[int]:
        try:
            return self._chat.opening_ids(opening.prompt, opening.tools)
        except DataError as error:
            raise DataError(f"task {task.task_id}: {error}") from error

    # -- beginning ---------------------------------------------------------------------------------------------------
    async def _open(self, task: PromptTask) -> list[_Member]:
        """Every member with its prompt, which all share unless their sessions begin differently."""
        members = [_Member(index, Draft([], self._sampling(task, index), self._clock())) for index in range(task.group_size)]
        await asyncio.gather(*(self._meet(task, member) for member in members))
        encoded: list[tuple[Opening, list[int]]] = []
        for member in members:
            if member.partner is None:
                continue
            ids = next((ids for opening, ids in encoded if opening == member.opening), None)
            if ids is None:
                ids = self._encode(task, member.opening)
                encoded.append((member.opening, ids))
            member.draft.begin(ids)
        return members

    async def _meet(self, task: PromptTask, member: _Member) -> None:
        environment, seed = self._environment, member.draft.sampling.seed
        if not isinstance(environment, SessionEnvironment):
            member.partner = PlainPartner(environment, Opening(task.prompt), self._score, self._observe_timeout_s)
            return
        assert self._score_session is not None
        try:
            member.partner = await open_session(
                environment, task, member.index, seed, self._score_session, self._observe_timeout_s
            )
        except PartnerFailed as error:
            member.draft.begin(self.encode_prompt(task))
            member.reward = Reward.invalid(str(error), error.error_type)

    async def _first_turns(self, task: PromptTask, members: Sequence[_Member]) -> None:
        """Sample and play, members with one prompt from one call of the engine."""
        by_prompt: dict[tuple[int, ...], list[_Member]] = {}
        for member in members:
            if self._has_room(task, member.draft.token_ids):
                by_prompt.setdefault(tuple(member.draft.token_ids), []).append(member)
            else:
                member.reward = Reward.invalid("the prompt leaves no room in the context", "long_prompt")
        await asyncio.gather(*(self._play_all(task, prompt, those) for prompt, those in by_prompt.items()))

    async def _play_all(self, task: PromptTask, prompt_ids: Sequence[int], members: Sequence[_Member]) -> None:
        completions = await self._engine.generate(list(prompt_ids), [self._turn_sampling(member.draft) for member in members])
        plays = (self._play(task, member, first) for member, first in zip(members, completions, strict=True))
        await asyncio.gather(*plays)

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

    def _turn_sampling(self, draft: Draft) -> SamplingParams:
        sampling = draft.sampling
        room = self._limits.max_context - len(draft.token_ids)
        if self._limits.max_sampled is not None:
            room = min(room, self._limits.max_sampled - draft.num_sampled)
        return replace(
            sampling,
            max_new_tokens=min(sampling.max_new_tokens, room),
            seed=turn_seed(sampling.seed, len(draft.turns)),
        )

    # -- playing -----------------------------------------------------------------------------------------------------
    async def _play(self, task: PromptTask, member: _Member, completion: Completion) -> None:
        """Turn by turn until the environment has nothing more to say, or a limit is reached."""
        draft, partner = member.draft, member.partner
        assert partner is not None
        while True:
            draft.add_turn(completion, self._tokenizer.decode(completion.token_ids.tolist(), skip_special_tokens=True))
            if completion.finish_reason is FinishReason.ABORTED:
                return
            try:
                goes_on = await self._answered(task, member)
            except PartnerFailed as error:
                member.reward = Reward.invalid(str(error), error.error_type)
                return
            if not goes_on:
                break
            (completion,) = await self._engine.generate(draft.token_ids, [self._turn_sampling(draft)])
        started = self._clock()
        reward = await partner.score(draft.episode(task, member.index))
        member.is_scored = reward is not None
        member.reward, member.reward_s = with_turn_rewards(reward, draft.turn_rewards), self._clock() - started

    async def _answered(self, task: PromptTask, member: _Member) -> bool:
        """Append what the environment says to the last turn. False: the trajectory is over. Raises: PartnerFailed."""
        draft, partner = member.draft, member.partner
        assert partner is not None
        last = draft.turns[-1]
        if len(draft.turns) >= self._limits.max_turns or last.finish_reason is FinishReason.LENGTH:
            return False
        started = self._clock()
        reply = await partner.reply(self._sampled_turn(draft, partner.opening), draft.episode(task, member.index))
        draft.environment_s += self._clock() - started
        draft.turn_rewards.append(reply.reward or 0.0)
        if reply.said is None or self._is_spent(draft):
            return False
        return self._append(draft, reply, partner.opening)

    def _append(self, draft: Draft, reply: Reply, opening: Opening) -> bool:
        """Put the reply's ids behind what was sampled, never trained. False if it leaves no room for a turn."""
        assert reply.said is not None
        ids = self._chat.reply_ids(reply.said, last_id=draft.token_ids[-1], tools=opening.tools)
        if len(draft.token_ids) + len(ids) >= self._limits.max_context:
            return False
        text = reply.said if isinstance(reply.said, str) else self._tokenizer.decode(ids, skip_special_tokens=True)
        draft.add_observation(text, ids)
        return True

    def _is_spent(self, draft: Draft) -> bool:
        """Whether the budget of tokens or time lets no further turn begin."""
        limits = self._limits
        if limits.max_sampled is not None and draft.num_sampled >= limits.max_sampled:
            return True
        return limits.max_s is not None and self._clock() - draft.started_at_s >= limits.max_s

    def _sampled_turn(self, draft: Draft, opening: Opening) -> SampledTurn:
        text = draft.texts[-1]
        raw = self._tokenizer.decode(list(text.token_ids), skip_special_tokens=False)
        calls = self._chat.tool_calls(raw) if opening.tools else ()
        return SampledTurn(text.text, raw, text.finish_reason, text.token_ids, calls)

    # -- ending ------------------------------------------------------------------------------------------------------
    async def _score_together(self, task: PromptTask, members: Sequence[_Member]) -> None:
        """Rewards that depend on the whole group, in place of those of the members that were scored alone."""
        scored = [member for member in members if member.is_scored]
        if self._score_group is None or not scored:
            return
        alone = [member.reward for member in scored if member.reward is not None]
        episodes = [member.draft.episode(task, member.index) for member in scored]
        for member, reward in zip(scored, await self._score_group(episodes, alone), strict=True):
            member.reward = reward

    def _sealed(self, member: _Member) -> Trajectory:
        return member.draft.seal(
            member.reward,
            now_s=self._clock(),
            reward_s=member.reward_s,
            worker_id=self._worker_id,
            engine_id=self._engine.engine_id,
        )
