"""What held-out evaluation beside training is made of: checkpoints as pinned models, an engine of its own, the environment."""

from __future__ import annotations

import shutil
from collections.abc import AsyncIterator, Callable
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from functools import partial
from pathlib import Path
from typing import cast

from async_rl.config.evaluation import EvaluationConfig
from async_rl.config.rollout import RolloutConfig
from async_rl.config.run import RunConfig
from async_rl.environments.base import Environment, GroupScorer
from async_rl.errors import CheckpointError, RunDirError
from async_rl.evaluation.beside import PinnedVersion, Sampling
from async_rl.logs import Event, get_logger
from async_rl.model.tokenizer import load_tokenizer, stop_token_ids
from async_rl.reward.score import score_episode, score_group
from async_rl.rollout.chat import Tokenizer
from async_rl.rollout.engines import make_engine
from async_rl.rollout.group import GroupRollout, RolloutLimits
from async_rl.run_dir.layout import RunLayout
from async_rl.trainer.checkpoint import completed, open_checkpoint
from async_rl.trainer.export import export_checkpoint

MODEL = "model"


class CheckpointVersions:
    """Versions that checkpoints hold; and version 0, which is the run's model.

    A version is pinned by writing it out as a model directory, whole or not at all: the trainer may remove its checkpoint.
    first_version: what the run began from, evaluated from model_dir if it is 0.
    """

    def __init__(self, layout: RunLayout, schedule: EvaluationConfig, model_dir: Path, *, first_version: int) -> None:
        self._layout, self._schedule = layout, schedule
        self._model_dir, self._first_version = model_dir, first_version
        self._ignored: set[Path] = set()
        self._log = get_logger()

    def next(self, newest_done: int | None, *, is_last: bool) -> PinnedVersion | None:
        """See evaluation.beside.Versions. A checkpoint that cannot be written out is passed over, and costs the run nothing."""
        left = self._left_pinned(newest_done)
        if left is not None:
            return left
        if newest_done is None and self._first_version == 0:
            return self._begin(0, self._model_dir)
        since = self._first_version if newest_done is None else newest_done
        for path in completed(self._layout.checkpoints_dir):
            version = int(path.name.removeprefix("step_"))
            if version <= since or not (is_last or self._schedule.is_due(version, since)):
                break
            try:
                return self._pin(path, version)
            except (CheckpointError, RunDirError, OSError) as error:  # damaged, removed meanwhile, or no room: the one before
                self._say_ignored(path, error)
        return None

    def release(self, pinned: PinnedVersion) -> None:
        shutil.rmtree(pinned.directory, ignore_errors=True)

    def _left_pinned(self, newest_done: int | None) -> PinnedVersion | None:
        """What an evaluator that ended had begun; what it had finished is removed."""
        for directory in sorted(self._layout.evaluation_dir.glob("version_*"), reverse=True):
            version = int(directory.name.removeprefix("version_"))
            model = self._model_dir if version == 0 else directory / MODEL
            if (newest_done is None or version > newest_done) and model.is_dir():
                return PinnedVersion(version, model, directory)
            shutil.rmtree(directory, ignore_errors=True)
        return None

    def _pin(self, path: Path, version: int) -> PinnedVersion:
        checkpoint = open_checkpoint(path)
        pinned = self._begin(version, self._directory(version) / MODEL)
        export_checkpoint(checkpoint, pinned.model_dir)
        return pinned

    def _say_ignored(self, path: Path, error: Exception) -> None:
        """Once: it is tried again at the next look."""
        if path not in self._ignored:
            self._ignored.add(path)
            self._log.warning(Event.CHECKPOINT_IGNORED, path=str(path), reason=str(error))

    def _begin(self, version: int, model_dir: Path) -> PinnedVersion:
        directory = self._directory(version)
        directory.mkdir(parents=True, exist_ok=True)
        return PinnedVersion(version, model_dir, directory)

    def _directory(self, version: int) -> Path:
        return self._layout.evaluation_dir / f"version_{version:08d}"


def engine_config(config: RunConfig) -> RolloutConfig:
    """The rollout engine's settings, as the evaluation changes them. A vLLM server is a rollout worker's: here vLLM runs in
    the process."""
    evaluation, rollout = config.evaluation, config.rollout
    in_process = "torch" if rollout.engine == "torch" else "vllm"
    return rollout.model_copy(
        update={
            "engine": evaluation.engine or in_process,
            "device": evaluation.device or rollout.device,
            "num_threads": evaluation.num_threads,
            "temperature": evaluation.temperature or rollout.temperature,
            "vllm": rollout.vllm.model_copy(update={"servers": []}),
        }
    )


def sampler(config: RunConfig, environment: Environment) -> Callable[[PinnedVersion], AbstractAsyncContextManager[Sampling]]:
    """What makes an engine for a pinned version, loaded from its model directory, and closes it."""
    rollout_config, timeout_s = engine_config(config), config.reward.timeout_s
    groups = isinstance(environment, GroupScorer)

    @asynccontextmanager
    async def sampling(pinned: PinnedVersion) -> AsyncIterator[Sampling]:
        tokenizer = load_tokenizer(config.model.path)
        engine = make_engine(pinned.model_dir, rollout_config, f"evaluation-{pinned.version}")
        try:
            await engine.start()
            await engine.serve(pinned.version)
            rollout = GroupRollout(
                engine,
                cast(Tokenizer, tokenizer),
                environment,
                RolloutLimits(
                    rollout_config.max_turns,
                    engine.max_context,
                    rollout_config.max_new_tokens,
                    max_sampled=rollout_config.max_sampled,
                    max_s=rollout_config.max_trajectory_s,
                ),
                worker_id="evaluation",
                stop_token_ids=stop_token_ids(config.model.path, tokenizer),
                score=partial(score_episode, environment, timeout_s=timeout_s),
                score_group=partial(score_group, environment, timeout_s=timeout_s) if groups else None,
                score_session=partial(score_episode, timeout_s=timeout_s),
                observe_timeout_s=timeout_s,
                skip_long_prompts=config.data.on_long_prompt == "skip",
            )
            yield Sampling(rollout.run, engine.work)
        finally:
            await engine.close()

    return sampling
