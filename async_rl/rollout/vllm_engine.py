"""The vLLM rollout engine: versions, swaps and proofs over a vLLM in this process or behind HTTP (a VllmHost).

Every swap labels the tokens that follow it, inside vLLM, while it is paused with nothing in flight; a finished request says
which of its tokens carry which label. Requests go on as soon as new weights are in, but nobody is given a token of a label
before its weights are proven and served; if they are refused, the requests that may hold such tokens end with NotServing.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import numpy.typing as npt
import torch

from async_rl.config.rollout import RolloutConfig
from async_rl.errors import DeadlineExceeded, EngineError, ManifestMismatch, NotServing
from async_rl.rollout.engine import Completion, Phase
from async_rl.rollout.model_names import ModelNames
from async_rl.rollout.requests import checked_request
from async_rl.rollout.vllm_host import Sampled, VllmHost
from async_rl.rollout.vllm_labels import LabelledWeights, Labels, Trust
from async_rl.rollout.vllm_score import checked_sequence, score
from async_rl.rollout.vllm_staging import StagingFile
from async_rl.weights.manifest import Manifest
from protocol.lease import Work
from protocol.messages import SamplingParams

MIN_TEMPERATURE = 0.01
"""vLLM raises lower ones to it (vllm/sampling_params.py, _MAX_TEMP)."""


@dataclass(frozen=True, slots=True)
class _Answer:
    """What one request got: begun under `asked`, after `queued_s`."""

    sampled: Sampled
    asked: LabelledWeights
    queued_s: float
    generate_s: float


@dataclass(slots=True, eq=False)
class _Running:
    """A `generate` call within the host; `ended_by` says why it was cancelled from here."""

    tasks: Sequence[asyncio.Task[_Answer]]
    ended_by: EngineError | None = field(default=None)

    def end(self, reason: EngineError) -> None:
        self.ended_by = reason
        for task in self.tasks:
            task.cancel()


class VllmEngine:
    """A RolloutEngine (see rollout.engine) on vLLM.

    names, max_context, vocab_size: of the model that the host serves (engines.vllm_engine finds them).
    wait_timeout_s: how long requests wait for a version to be served after a swap or a withdrawal.
    command_timeout_s: longest wait for one answer of the host, other than a sample.
    """

    def __init__(
        self,
        host: VllmHost,
        config: RolloutConfig,
        engine_id: str,
        *,
        names: ModelNames,
        max_context: int,
        vocab_size: int,
        wait_timeout_s: float = 300.0,
        command_timeout_s: float = 300.0,
        staging_dir: Path | None = None,
        now: Callable[[], float] = time.monotonic,
    ) -> None:
        self._host, self._config, self._engine_id = host, config, engine_id
        self._names, self._max_context, self._vocab_size = names, max_context, vocab_size
        self._wait_timeout_s, self._command_timeout_s, self._now = wait_timeout_s, command_timeout_s, now
        self._staging = StagingFile(staging_dir)
        self._work = Work(clock=now)
        self._is_paused = False
        self._num_sampling = 0
        self._labels = Labels()
        self._held: LabelledWeights | None = None
        self._digests: Mapping[str, str] | None = None
        self._phase = Phase.UNPROVEN
        self._version: int | None = None
        self._reason = "no version was served yet"
        self._failure: EngineError | None = None
        self._started = False
        self._command = asyncio.Lock()  # one of swap, serve, withdraw, score at a time
        self._settled = asyncio.Event()  # set unless swapped-in weights await their proof
        self._settled.set()
        self._serving = asyncio.Event()  # set while requests may begin, and when none will any more
        # Waiting is done here and not within vLLM, whose queue is in order of arrival: a probe would wait behind all of it.
        self._places = asyncio.Semaphore(config.max_running)
        self._running: set[_Running] = set()
        self._give_up: asyncio.TimerHandle | None = None

    # -- identity ----------------------------------------------------------------------------------------------------

    @property
    def engine_id(self) -> str:
        return self._engine_id

    @property
    def max_context(self) -> int:
        return self._max_context

    @property
    def work(self) -> Work:
        """Sampling; progress is marked at every output of any request."""
        return self._work

    @property
    def serving_version(self) -> int | None:
        return self._version if self._phase is Phase.SERVING and self._failure is None else None

    # -- life --------------------------------------------------------------------------------------------------------

    async def start(self) -> None:
        """Start the host, and label what it holds. Raises: EngineError, DeadlineExceeded."""
        if self._started:
            raise EngineError(f"engine {self._engine_id} was already started; make a new one")
        self._started = True
        await self._host.start()
        held = self._labels.new(None)
        async with self._bounded("its first label"):
            await self._host.relabel(held.label)
        self._held = held

    async def close(self) -> None:
        """End the host; whatever still waits gets an EngineError."""
        if not self._started:
            return
        self._fail(EngineError(f"engine {self._engine_id} was closed"))
        await asyncio.gather(*(task for running in self._running for task in running.tasks), return_exceptions=True)
        await self._host.close()
        self._staging.close()

    # -- sampling ----------------------------------------------------------------------------------------------------

    async def generate(self, prompt_ids: Sequence[int], sampling: Sequence[SamplingParams]) -> Sequence[Completion]:
        """Sample one completion per entry of `sampling`, all from the same prompt. Cancelling it aborts its requests.

        Raises: DataError if the prompt leaves no room for a token; NotServing before the first served version, after a
        withdrawal, or when a swap is not followed by a version in time; EngineError if the engine died or refuses a parameter.
        """
        self._require_alive()
        self._require_serving()
        checked_request(prompt_ids, sampling, max_context=self._max_context, vocab_size=self._vocab_size, now_s=self._now())
        if too_cold := [params.temperature for params in sampling if params.temperature < MIN_TEMPERATURE]:
            raise EngineError(
                f"temperature={too_cold[0]} is below {MIN_TEMPERATURE}, and vLLM would sample at {MIN_TEMPERATURE}"
            )
        if not sampling:
            return []
        room = self._max_context - len(prompt_ids)
        answers = await self._answers(list(prompt_ids), [_within(room, params) for params in sampling])
        await self._until_proven([answer.sampled for answer in answers])
        return [
            self._labels.completion(one.sampled, one.asked, self._config.kv, queued_s=one.queued_s, generate_s=one.generate_s)
            for one in answers
        ]

    async def score(self, sequences: Sequence[Sequence[int]], *, temperature: float) -> Sequence[npt.NDArray[np.float32]]:
        """Logprob of token t given tokens < t, [len − 1] per sequence, under the weights held now, proven or not.

        Raises: DataError; NotServing after a withdrawal, when vLLM is paused.
        """
        self._require_alive()
        if self._phase is Phase.WITHDRAWN:
            raise NotServing(f"engine {self._engine_id} scores nothing: {self._reason}")
        checked = [checked_sequence(one, max_context=self._max_context, vocab_size=self._vocab_size) for one in sequences]
        async with self._command, self._bounded("a score"):
            return await score(self._host, checked, temperature, self._max_context)

    # -- weights -----------------------------------------------------------------------------------------------------

    def check(self, manifest: Manifest) -> None:
        """Raises: ManifestMismatch unless every name, shape and tie of the manifest is one of the engine's, and vice versa, and
        all are parameters."""
        self._names.check(manifest)
        if buffers := [entry.name for entry in manifest.entries if entry.is_buffer]:
            raise ManifestMismatch(
                f"version {manifest.version} brings buffers ({', '.join(buffers[:4])}), and vLLM loads parameters alone: it "
                "would go on with the values of the model directory; use rollout.engine='torch'"
            )

    async def swap(self, manifest: Manifest, tensors: Mapping[str, torch.Tensor]) -> None:
        """Replace all weights at a token boundary. Running requests go on under them; what they sample is held back, and new
        requests wait, until `serve`.

        Raises: ManifestMismatch, with nothing changed; EngineError if loading failed midway: the engine is then of no use.
        """
        self._require_alive()
        self.check(manifest)
        self._names.require(manifest, tensors)
        async with self._command:
            try:
                update = await asyncio.to_thread(self._staging.write, manifest, tensors, self._names.untied(manifest))
            except OSError as error:
                raise EngineError(f"no room in shared memory for {manifest.version}'s weights: {error}") from error
            self._await_proof(f"version {manifest.version} was swapped in and awaits its proof")
            self._refuse_unproven()
            weights = self._labels.new(manifest.version)
            try:
                async with self._bounded(f"the swap to version {manifest.version}"):
                    await self._pause(clear_cache=self._config.kv == "recompute")
                    self._digests = await self._host.load(update, weights.label)
                    self._held = weights
                    await self._resume()
            except (EngineError, DeadlineExceeded) as error:
                reason = EngineError(f"loading version {manifest.version} failed midway: {error}")
                self._fail(reason)
                raise reason from error
            self._staging.mapped()

    def digests(self, manifest: Manifest) -> Mapping[str, str]:
        """Digest of every tensor that the engine's ranks read from the staging file and loaded at the last swap.

        Kernels pack and fuse weights, so this is the last place where a tensor has its name and its bytes; what is computed
        with them is for the canary and the probe to show.
        """
        if self._digests is None:
            raise EngineError(f"digests: nothing was swapped into engine {self._engine_id} yet")
        return self._digests

    async def serve(self, version: int) -> None:
        """Give out what is sampled as `version` from now on, and take requests again."""
        self._require_alive()
        async with self._command:
            held = self._held_weights()
            if self._phase is Phase.WITHDRAWN:
                raise EngineError(f"version {version} cannot be served by engine {self._engine_id}: {self._reason}; swap first")
            if held.version not in (None, version):
                raise EngineError(f"version {version} cannot be served: {self._engine_id} holds version {held.version}")
            held.version, held.trust = version, Trust.PROVEN
            self._phase, self._version = Phase.SERVING, version
            self._stop_giving_up()
            self._settled.set()
            self._serving.set()

    async def withdraw(self, reason: str) -> None:
        """Sample nothing until a later version is served. Requests that may hold tokens of refused weights end with NotServing,
        others wait."""
        self._require_alive()
        async with self._command:
            held = self._held_weights()
            self._phase, self._reason = Phase.WITHDRAWN, f"its weights were withdrawn: {reason}"
            self._serving.clear()
            async with self._bounded("the withdrawal"):
                await self._pause(clear_cache=False)
            if held.trust is Trust.UNPROVEN:
                self._refuse_unproven()
            else:
                self._start_giving_up()
            self._settled.set()

    # -- requests ----------------------------------------------------------------------------------------------------

    async def _answers(self, prompt_ids: list[int], sampling: Sequence[SamplingParams]) -> Sequence[_Answer]:
        tasks = [asyncio.ensure_future(self._sample(prompt_ids, params)) for params in sampling]
        running = _Running(tasks)
        self._running.add(running)
        try:
            return await asyncio.gather(*tasks)
        except asyncio.CancelledError:
            if running.ended_by is None:
                raise
            raise type(running.ended_by)(str(running.ended_by)) from running.ended_by
        finally:
            self._running.discard(running)
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

    async def _sample(self, prompt_ids: list[int], params: SamplingParams) -> _Answer:
        """Wait for a place and for served weights, then sample. Raises: NotServing; EngineError."""
        asked_s = self._now()
        async with self._places:
            await self._until_serving()
            weights, begun_s = self._held_weights(), self._now()
            self._num_sampling += 1
            self._watch()
            try:
                sampled = await self._host.sample(prompt_ids, params, salt=weights.label, on_output=self._on_output)
            finally:
                self._num_sampling -= 1
                self._watch()
        return _Answer(sampled, weights, begun_s - asked_s, self._now() - begun_s)

    async def _until_serving(self) -> None:
        """Raises: NotServing if it takes too long; EngineError if the engine ended."""
        while not self._serving.is_set():
            await self._wait_for(self._serving)
        self._require_alive()

    async def _wait_for(self, event: asyncio.Event) -> None:
        try:
            async with asyncio.timeout(self._wait_timeout_s):
                await event.wait()
        except TimeoutError:
            raise NotServing(
                f"a request waited {self._wait_timeout_s:g} s for engine {self._engine_id} to serve again: {self._reason}"
            ) from None

    async def _until_proven(self, sampled: Sequence[Sampled]) -> None:
        """Hold tokens back until the weights that sampled them are served. Raises: NotServing if they are not."""
        for weights in {weights for one in sampled for weights in self._labels.weights_of(one)}:
            while weights.trust is Trust.UNPROVEN and not self._settled.is_set():
                await self._wait_for(self._settled)
            self._require_alive()
            if weights.trust is not Trust.PROVEN:
                raise NotServing(f"engine {self._engine_id} sampled for nothing: {self._reason}")

    # -- state -------------------------------------------------------------------------------------------------------

    def _held_weights(self) -> LabelledWeights:
        if self._held is None:
            raise EngineError(f"engine {self._engine_id} is not started; await start() first")
        return self._held

    def _require_alive(self) -> None:
        if self._failure is not None:
            raise EngineError(str(self._failure)) from self._failure
        self._held_weights()

    def _require_serving(self) -> None:
        if self._phase in (Phase.UNPROVEN, Phase.WITHDRAWN) or self._version is None:
            raise NotServing(f"engine {self._engine_id} samples nothing: {self._reason}; push a version and serve it")

    def _await_proof(self, reason: str) -> None:
        self._phase = Phase.UNPROVEN if self._version is None else Phase.SWAPPED
        self._reason = reason
        self._settled.clear()
        self._serving.clear()
        self._stop_giving_up()

    def _refuse_unproven(self) -> None:
        """What the held weights sampled is worth nothing, if they were never served; what runs may hold such tokens."""
        held = self._held_weights()
        if held.trust is Trust.UNPROVEN:
            held.trust = Trust.REFUSED
            self._end_running(NotServing(f"engine {self._engine_id} sampled for nothing: {self._reason}"))

    def _watch(self) -> None:
        """Sampling is work that must make progress, unless vLLM is paused."""
        is_sampling = self._num_sampling > 0 and not self._is_paused
        if is_sampling and not self._work.what:
            self._work.begin("sampling with vLLM")
        elif not is_sampling and self._work.what:
            self._work.end()

    def _on_output(self) -> None:
        if self._work.what:
            self._work.mark()

    async def _pause(self, *, clear_cache: bool) -> None:
        self._is_paused = True
        self._watch()
        await self._host.pause(clear_cache=clear_cache)

    async def _resume(self) -> None:
        await self._host.resume()
        self._is_paused = False
        self._watch()

    def _end_running(self, reason: EngineError) -> None:
        for running in self._running:
            running.end(reason)

    def _fail(self, reason: EngineError) -> None:
        """The engine is of no use any more; the first reason counts."""
        self._failure = self._failure or reason
        self._phase, self._reason = Phase.WITHDRAWN, str(self._failure)
        self._end_running(self._failure)
        self._stop_giving_up()
        self._settled.set()
        self._serving.set()

    def _start_giving_up(self) -> None:
        """What waits for too long within a paused vLLM is told so."""
        reason = f"requests waited {self._wait_timeout_s:g} s for engine {self._engine_id} to serve again: {self._reason}"
        loop = asyncio.get_running_loop()
        self._give_up = loop.call_later(self._wait_timeout_s, self._end_running, NotServing(reason))

    def _stop_giving_up(self) -> None:
        if self._give_up is not None:
            self._give_up.cancel()
            self._give_up = None

    @asynccontextmanager
    async def _bounded(self, what: str) -> AsyncIterator[None]:
        try:
            async with asyncio.timeout(self._command_timeout_s):
                yield
        except TimeoutError:
            raise DeadlineExceeded(f"waited {self._command_timeout_s:g} s for engine {self._engine_id}: {what}") from None


def _within(room: int, params: SamplingParams) -> SamplingParams:
    if params.max_new_tokens <= room:
        return params
    return SamplingParams(params.temperature, room, params.seed, params.stop_token_ids)
