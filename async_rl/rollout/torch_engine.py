"""The built-in rollout engine: any Hugging Face causal LM, decoded by one thread, with weights that change underneath.

The event loop hands requests and commands to the decoding thread through a queue; between two steps the thread takes what
is there, so every swap is at a token boundary. Results go back with call_soon_threadsafe.
"""

from __future__ import annotations

import asyncio
import queue
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple, TypeVar, cast

import numpy as np
import numpy.typing as npt
import torch

from async_rl.config.rollout import RolloutConfig
from async_rl.errors import AsyncRLError, DeadlineExceeded, EngineError, NotServing
from async_rl.rollout.engine import Completion, Phase
from async_rl.rollout.loaded_model import LoadedModel, load_model
from async_rl.rollout.requests import Request, checked_request
from async_rl.weights.manifest import Manifest
from protocol.lease import Work
from protocol.messages import SamplingParams

T = TypeVar("T")


class _Submit(NamedTuple):
    requests: Sequence[Request]


class _Abort(NamedTuple):
    request: Request


class _Call(NamedTuple):
    run: Callable[[], object]
    loop: asyncio.AbstractEventLoop
    future: asyncio.Future[object]


class _Close(NamedTuple):
    pass


_Message = _Submit | _Abort | _Call | _Close


class TorchEngine:
    """A RolloutEngine (see rollout.engine) on PyTorch.

    The weights in `model_path` are not served until a push, or an explicit `serve`, says that they are a version.
    wait_timeout_s: how long requests wait for a version to be served after a swap or a withdrawal.
    command_timeout_s: longest wait for one answer of the decoding thread.
    load: makes the model ready, on that thread.
    """

    def __init__(
        self,
        model_path: Path | str,
        config: RolloutConfig,
        engine_id: str,
        *,
        wait_timeout_s: float = 300.0,
        command_timeout_s: float = 300.0,
        now: Callable[[], float] = time.monotonic,
        load: Callable[[Path, RolloutConfig, Callable[[], float]], LoadedModel] = load_model,
    ) -> None:
        self._path, self._config, self._engine_id = Path(model_path), config, engine_id
        self._wait_timeout_s, self._command_timeout_s = wait_timeout_s, command_timeout_s
        self._now, self._load = now, load
        self._inbox: queue.SimpleQueue[_Message] = queue.SimpleQueue()
        self._unsent: list[Request] = []
        self._model: LoadedModel | None = None
        self._phase = Phase.UNPROVEN
        self._version: int | None = None
        self._held_version: int | None = None  # of the last complete swap; None: the model directory's weights
        self._reason = "no version was served yet"
        self._paused_since_s: float | None = None
        self._failure: EngineError | None = None
        self._taken: deque[_Message] = deque()  # the thread's: messages out of the inbox, not yet handled
        self._open: dict[int, Request] = {}  # the thread's: every request that it has not answered
        self._thread: threading.Thread | None = None
        self._work = Work(clock=now)

    # -- identity ----------------------------------------------------------------------------------------------------

    @property
    def engine_id(self) -> str:
        return self._engine_id

    @property
    def max_context(self) -> int:
        """Prompt and sampled tokens of one sequence, at most: the model's context, or less by rollout.max_context."""
        return self._loaded().max_context

    @property
    def serving_version(self) -> int | None:
        return self._version if self._phase is Phase.SERVING else None

    @property
    def work(self) -> Work:
        """What the decoding thread does now."""
        return self._work

    # -- life --------------------------------------------------------------------------------------------------------

    async def start(self) -> None:
        """Load the model and start the decoding thread. Raises: what loading raises; EngineError for an unfit model."""
        if self._thread is not None:
            raise EngineError(f"engine {self._engine_id} was already started; make a new one")
        loop = asyncio.get_running_loop()
        loaded: asyncio.Future[object] = loop.create_future()
        self._thread = threading.Thread(target=self._main, args=(loop, loaded), name=f"engine-{self._engine_id}", daemon=True)
        self._thread.start()
        await self._bounded(loaded, "its model to load")

    async def close(self) -> None:
        """Stop the thread; whatever still waits gets an EngineError."""
        if self._thread is None or not self._thread.is_alive():
            return
        self._inbox.put(_Close())
        await asyncio.to_thread(self._thread.join, self._command_timeout_s)

    # -- sampling ----------------------------------------------------------------------------------------------------

    async def generate(self, prompt_ids: Sequence[int], sampling: Sequence[SamplingParams]) -> Sequence[Completion]:
        """Sample one completion per entry of `sampling`, all from the same prompt. Cancelling it frees its rows.

        Raises: DataError if the prompt leaves no room for a token; NotServing before the first served version, after a
        withdrawal, or when a swap is not followed by a version in time; EngineError if the engine died or refuses a parameter.
        """
        loaded = self._loaded()
        self._require_serving()
        request = checked_request(
            prompt_ids, sampling, max_context=loaded.max_context, vocab_size=loaded.vocab_size, now_s=self._now()
        )
        if not sampling:
            return []
        loop = asyncio.get_running_loop()
        request.future = loop.create_future()
        if not self._unsent:  # calls of the same turn of the loop are sent, and then admitted, together
            loop.call_soon(self._send)
        self._unsent.append(request)
        try:
            return await request.future
        except asyncio.CancelledError:
            self._inbox.put(_Abort(request))
            raise

    async def score(self, sequences: Sequence[Sequence[int]], *, temperature: float) -> Sequence[npt.NDArray[np.float32]]:
        """Logprob of token t given tokens < t, [len − 1] per sequence, under the weights held now, served or not."""
        loaded = self._loaded()
        checked = [loaded.checked_sequence(sequence) for sequence in sequences]
        return await self._call(lambda: loaded.score(checked, temperature), "a score")

    # -- weights -----------------------------------------------------------------------------------------------------

    def check(self, manifest: Manifest) -> None:
        """Raises: ManifestMismatch unless every name, shape and tie of the manifest is one of the engine's, and vice versa."""
        self._loaded().weights.names.check(manifest)

    async def swap(self, manifest: Manifest, tensors: Mapping[str, torch.Tensor]) -> None:
        """Replace all weights at a token boundary; generation stays paused, its requests kept, until `serve`.

        Raises: ManifestMismatch, with nothing changed; EngineError if copying failed midway: the engine is then withdrawn.
        """
        await self._call(lambda: self._swap(manifest, tensors), f"the swap to version {manifest.version}")

    def digests(self, manifest: Manifest) -> Mapping[str, str]:
        """Digest of every tensor of the manifest as the engine holds it now, cast to the wire dtype."""
        return self._loaded().weights.digests(manifest)

    async def serve(self, version: int) -> None:
        """Sample as `version` from now on; running requests go on under it, their KV recomputed or kept (rollout.kv)."""
        await self._call(lambda: self._serve(version), f"version {version} to be served")

    async def withdraw(self, reason: str) -> None:
        """Sample nothing until a later version is served."""
        await self._call(lambda: self._pause(Phase.WITHDRAWN, f"its weights were withdrawn: {reason}"), "the withdrawal")

    # -- the event loop's side ---------------------------------------------------------------------------------------

    def _loaded(self) -> LoadedModel:
        if self._failure is not None:
            raise EngineError(str(self._failure)) from self._failure
        if self._model is None:
            raise EngineError(f"engine {self._engine_id} is not started; await start() first")
        return self._model

    def _require_serving(self) -> None:
        if self._phase in (Phase.UNPROVEN, Phase.WITHDRAWN) or self._version is None:
            raise NotServing(f"engine {self._engine_id} samples nothing: {self._reason}; push a version and serve it")

    def _send(self) -> None:
        requests, self._unsent = self._unsent, []
        self._inbox.put(_Submit(requests))
        if self._failure is not None:  # the thread ended and may have read its last message already
            _resolve_all([(request, self._failure) for request in requests])

    async def _call(self, run: Callable[[], T], what: str) -> T:
        """Run a command on the decoding thread, between two steps."""
        self._loaded()
        loop = asyncio.get_running_loop()
        future: asyncio.Future[object] = loop.create_future()
        self._inbox.put(_Call(run, loop, future))
        if self._failure is not None and not future.done():
            future.set_exception(self._failure)
        return cast(T, await self._bounded(future, what))

    async def _bounded(self, future: asyncio.Future[object], what: str) -> object:
        try:
            async with asyncio.timeout(self._command_timeout_s):
                return await future
        except TimeoutError:
            raise DeadlineExceeded(f"waited {self._command_timeout_s:g} s for engine {self._engine_id}: {what}") from None

    # -- the decoding thread's side ----------------------------------------------------------------------------------

    def _main(self, loop: asyncio.AbstractEventLoop, loaded: asyncio.Future[object]) -> None:
        try:
            self._model = self._load(self._path, self._config, self._now)
        except Exception as error:
            self._failure = EngineError(f"engine {self._engine_id} did not start: {error}")
            known = error if isinstance(error, AsyncRLError) else self._failure
            _post(loop, _resolve, loaded, None, known)
            return
        _post(loop, _resolve, loaded, None, None)
        try:
            self._decode(self._model)
            reason = EngineError(f"engine {self._engine_id} was closed")
        except Exception as error:
            reason = EngineError(f"engine {self._engine_id} died while decoding: {type(error).__name__}: {error}")
            reason.__cause__ = error
        self._work.end()
        self._fail_everything(reason)

    def _decode(self, model: LoadedModel) -> None:
        batch = model.batch
        while True:
            serving = self._phase is Phase.SERVING
            idle = not serving or batch.is_idle
            if idle:
                self._work.end()
            self._take_messages(wait=idle)
            self._work.begin(f"decoding {batch.num_running} sequences")
            while self._taken:
                message = self._taken.popleft()
                if isinstance(message, _Close):
                    return
                self._handle(message, model)
            if self._phase is Phase.SERVING:
                self._deliver([(request, request.result()) for request in batch.advance()])
            elif self._paused_since_s is not None and self._now() - self._paused_since_s >= self._wait_timeout_s:
                self._give_up_waiting(model)

    def _take_messages(self, *, wait: bool) -> None:
        """Take what the inbox holds; if `wait`, not before there is something, or requests have waited too long."""
        if wait:
            timeout = None
            if self._open and self._paused_since_s is not None:
                timeout = max(0.0, self._paused_since_s + self._wait_timeout_s - self._now())
            try:
                self._taken.append(self._inbox.get(timeout=timeout))
            except queue.Empty:
                return
        while not self._inbox.empty():
            self._taken.append(self._inbox.get())

    def _handle(self, message: _Submit | _Abort | _Call, model: LoadedModel) -> None:
        match message:
            case _Submit(requests):
                wanted = {id(request): request for request in requests if not request.cancelled}
                self._open.update(wanted)  # all before the first is touched: whoever is in here gets an answer
                for request in wanted.values():
                    model.batch.submit(request)
            case _Abort(request):
                request.cancelled = True
                if self._open.pop(id(request), None) is not None:
                    model.batch.abort(request)
            case _Call(run, loop, future):
                try:
                    result, error = run(), None
                except Exception as raised:
                    result, error = None, raised
                _post(loop, _resolve, future, result, error)

    def _swap(self, manifest: Manifest, tensors: Mapping[str, torch.Tensor]) -> None:
        model = self._loaded()
        model.weights.names.require(manifest, tensors)
        self._pause(
            Phase.UNPROVEN if self._version is None else Phase.SWAPPED,
            f"version {manifest.version} was swapped in and awaits its proof",
        )
        try:
            model.weights.copy(manifest, tensors)
            self._held_version = manifest.version
        except Exception as error:
            reason = f"copying version {manifest.version} failed midway: {type(error).__name__}: {error}"
            self._pause(Phase.WITHDRAWN, reason)
            raise EngineError(f"engine {self._engine_id} holds a mixture and serves nothing: {reason}") from error

    def _serve(self, version: int) -> None:
        model = self._loaded()
        if self._phase is Phase.WITHDRAWN:
            raise EngineError(f"version {version} cannot be served by engine {self._engine_id}: {self._reason}; swap first")
        if self._held_version not in (None, version):
            raise EngineError(f"version {version} cannot be served: {self._engine_id} holds version {self._held_version}")
        if self._phase is not Phase.SERVING or self._version != version:
            model.batch.serve(version, recompute=self._config.kv == "recompute")
        self._phase, self._version, self._paused_since_s = Phase.SERVING, version, None

    def _pause(self, phase: Phase, reason: str) -> None:
        if self._paused_since_s is None:
            self._paused_since_s = self._now()
        self._phase, self._reason = phase, reason

    def _give_up_waiting(self, model: LoadedModel) -> None:
        waiting = list(self._open.values())
        error = NotServing(
            f"{len(waiting)} requests waited {self._wait_timeout_s:g} s for engine {self._engine_id} to serve again: "
            f"{self._reason}"
        )
        for request in waiting:
            model.batch.abort(request)
        self._deliver([(request, error) for request in waiting])

    def _deliver(self, answers: Sequence[tuple[Request, Sequence[Completion] | Exception]]) -> None:
        by_loop: dict[asyncio.AbstractEventLoop, list[tuple[Request, Sequence[Completion] | Exception]]] = {}
        for request, answer in answers:
            self._open.pop(id(request), None)
            if request.future is not None:
                by_loop.setdefault(request.future.get_loop(), []).append((request, answer))
        for loop, batch in by_loop.items():
            _post(loop, _resolve_all, batch)

    def _fail_everything(self, reason: EngineError) -> None:
        self._failure, self._phase, self._reason = reason, Phase.WITHDRAWN, str(reason)
        self._take_messages(wait=False)
        for message in self._taken:
            match message:
                case _Submit(requests):
                    self._open.update({id(request): request for request in requests})
                case _Call(_, loop, future):
                    _post(loop, _resolve, future, None, reason)
        self._deliver([(request, reason) for request in list(self._open.values())])


def _post(loop: asyncio.AbstractEventLoop, run: Callable[..., None], *args: object) -> None:
    """Run something on an event loop; nobody waits any more when the loop is closed."""
    try:
        loop.call_soon_threadsafe(run, *args)
    except RuntimeError:
        if not loop.is_closed():
            raise


def _resolve(future: asyncio.Future[object], result: object, error: Exception | None) -> None:
    if future.done():  # cancelled or timed out meanwhile
        return
    if error is None:
        future.set_result(result)
    else:
        future.set_exception(error)


def _resolve_all(answers: Sequence[tuple[Request, Sequence[Completion] | Exception]]) -> None:
    for request, answer in answers:
        if request.future is None or request.future.done():
            continue
        if isinstance(answer, Exception):
            request.future.set_exception(answer)
        else:
            request.future.set_result(answer)
