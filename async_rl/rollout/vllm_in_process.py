"""vLLM's AsyncLLM as a host: its engine core and ranks are children of this process."""

from __future__ import annotations

import asyncio
import itertools
import os
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

from vllm import SamplingParams as VllmSamplingParams
from vllm.distributed.weight_transfer.base import WeightTransferInitRequest, WeightTransferUpdateRequest
from vllm.engine.arg_utils import AsyncEngineArgs
from vllm.inputs.engine import tokens_input
from vllm.logprobs import FlatLogprobs
from vllm.outputs import RequestOutput
from vllm.sampling_params import RequestOutputKind
from vllm.v1.engine.async_llm import AsyncLLM

from async_rl.config.rollout import RolloutConfig
from async_rl.errors import AsyncRLError, EngineError
from async_rl.rollout.vllm_host import (
    DIGESTS_METHOD,
    OUTPUT_EVERY,
    LabelSpan,
    Sampled,
    engine_arguments,
    environment,
    next_logprob_params,
    one_digest,
    stop_kind,
)
from protocol.messages import SamplingParams


class InProcessHost:
    """A VllmHost (see vllm_host). refresh_tied_heads: see vllm_worker.StagedInit."""

    def __init__(
        self, model_path: Path | str, config: RolloutConfig, max_context: int, *, refresh_tied_heads: bool = True
    ) -> None:
        self._arguments = engine_arguments(Path(model_path), config, max_context) | {"skip_tokenizer_init": True}
        self._config = config
        self._init_info = {"refresh_tied_heads": refresh_tied_heads}
        self._ids = itertools.count()
        self._llm: AsyncLLM | None = None

    async def start(self) -> None:
        """Blocks the loop while the model loads: vLLM's processes end with the thread that started them, so it must be the one
        that lives longest."""
        own = {name: value for name, value in environment(self._config, os.getpid()).items() if name not in os.environ}
        os.environ.update(own, ASYNC_RL_VLLM_STARTER=str(os.getpid()))
        try:
            self._llm = AsyncLLM.from_engine_args(AsyncEngineArgs(**self._arguments))
        except Exception as error:
            raise EngineError(f"vLLM did not start: {type(error).__name__}: {error}; its processes' output says why") from error
        async with self._errors("to set up weight transfer"):
            await self._llm.init_weight_transfer_engine(WeightTransferInitRequest(init_info=self._init_info))

    async def close(self) -> None:
        llm, self._llm = self._llm, None
        if llm is not None:
            await asyncio.to_thread(llm.shutdown, 10.0)

    async def sample(
        self, prompt_ids: Sequence[int], sampling: SamplingParams, *, salt: str, on_output: Callable[[], object]
    ) -> Sampled:
        params = VllmSamplingParams(
            temperature=sampling.temperature,
            max_tokens=sampling.max_new_tokens,
            seed=sampling.seed,
            stop_token_ids=list(sampling.stop_token_ids),
            ignore_eos=True,  # the stops are those that were given
            logprobs=0,  # of the sampled token
            flat_logprobs=True,
            detokenize=False,
            output_kind=RequestOutputKind.CUMULATIVE,
            stream_interval=OUTPUT_EVERY,
        )
        output = await self._run(prompt_ids, params, salt, on_output)
        (completion,) = output.outputs
        token_ids = list(completion.token_ids)
        try:
            is_stop = stop_kind(completion.finish_reason)
        except ValueError as error:
            raise EngineError(f"vLLM gave a request up: {error}") from None
        logprobs = completion.logprobs
        assert isinstance(logprobs, FlatLogprobs)  # as was asked for
        return Sampled(
            token_ids,
            [logprobs.logprobs[start] for start in logprobs.start_indices],  # the sampled token's comes first
            [LabelSpan(span.version, span.start, span.end) for span in completion.weight_versions or ()],
            is_stop,
            output.num_cached_tokens or 0,
        )

    async def prompt_logprobs(self, token_ids: Sequence[int], *, salt: str) -> Sequence[float]:
        params = VllmSamplingParams(max_tokens=1, prompt_logprobs=0, detokenize=False, ignore_eos=True)
        params.output_kind = RequestOutputKind.FINAL_ONLY
        output = await self._run(token_ids, params, salt)
        rows = output.prompt_logprobs
        assert rows is not None
        return [rows[index][token_ids[index]].logprob for index in range(1, len(token_ids))]

    async def next_logprob(self, prefix_ids: Sequence[int], token_id: int, temperature: float, *, salt: str) -> float:
        params = VllmSamplingParams(temperature=temperature, **next_logprob_params(token_id))
        params.output_kind = RequestOutputKind.FINAL_ONLY
        output = await self._run(prefix_ids, params, salt)
        logprobs = output.outputs[0].logprobs
        assert logprobs is not None
        return float(logprobs[0][token_id].logprob)

    async def pause(self, *, clear_cache: bool) -> None:
        async with self._errors("to pause"):
            await self._alive().pause_generation(mode="keep", clear_cache=clear_cache)

    async def load(self, update: Mapping[str, Any], label: str) -> Mapping[str, str]:
        llm = self._alive()
        async with self._errors("to load weights"):
            await llm.start_weight_update()
            await llm.update_weights(WeightTransferUpdateRequest(update_info=dict(update)))
            await llm.finish_weight_update(label)
            return one_digest(await llm.collective_rpc(DIGESTS_METHOD))

    async def relabel(self, label: str) -> None:
        async with self._errors("to label its weights"):
            await self._alive().update_weight_version(label)

    async def resume(self) -> None:
        async with self._errors("to resume"):
            await self._alive().resume_generation()

    async def _run(
        self,
        prompt_ids: Sequence[int],
        params: VllmSamplingParams,
        salt: str,
        on_output: Callable[[], object] = lambda: None,
    ) -> RequestOutput:
        """The last output of a request."""
        prompt = tokens_input(list(prompt_ids), cache_salt=salt)
        last: RequestOutput | None = None
        async with self._errors("to sample"):
            async for output in self._alive().generate(prompt, params, str(next(self._ids))):
                last = output
                on_output()
        if last is None or not last.finished:
            raise EngineError("vLLM ended a request without an answer")
        return last

    def _alive(self) -> AsyncLLM:
        if self._llm is None:
            raise EngineError("vLLM is not running")
        return self._llm

    @asynccontextmanager
    async def _errors(self, what: str) -> AsyncIterator[None]:
        """Whatever vLLM raises is an EngineError; when it has died, that is said."""
        try:
            yield
        except AsyncRLError:
            raise
        except Exception as error:
            died = "vLLM has died" if self._llm is None or self._llm.errored else "vLLM failed"
            raise EngineError(f"{died} when asked {what}: {type(error).__name__}: {error}") from error
