"""A vLLM server as a host: token ids in and out over HTTP, and our own control client. Imports no vLLM.

Used are /inference/v1/generate and, with VLLM_SERVER_DEV_MODE=1, the weight-transfer and RPC routes (vLLM 0.32). A server that
we start listens on a unix socket in a private directory, and ends with us.
"""

from __future__ import annotations

import asyncio
import json
import os
import shutil
import signal
import sys
import tempfile
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import aiohttp

from async_rl.config.rollout import RolloutConfig
from async_rl.errors import EngineError
from async_rl.leash import leashed
from async_rl.rollout.vllm_host import (
    DIGESTS_METHOD,
    OUTPUT_EVERY,
    LabelSpan,
    Sampled,
    command_flags,
    engine_arguments,
    environment,
    next_logprob_params,
    one_digest,
    stop_kind,
)
from protocol.messages import SamplingParams

POLL_S = 0.2
CONNECT_S = 10.0
STOP_S = 20.0
MISSING_LOGPROB = -9998.0
"""The server writes −9999 for what JSON cannot hold; such a token is −inf here, for whoever judges the trajectory to see."""


class ServerProcess:
    """`python -m vllm.entrypoints.openai.api_server` on a unix socket, in a process group of its own."""

    def __init__(self, arguments: Mapping[str, Any], config: RolloutConfig) -> None:
        self._arguments, self._config = arguments, config
        self._directory: Path | None = None
        self._process: asyncio.subprocess.Process | None = None

    @property
    def socket(self) -> Path:
        assert self._directory is not None
        return self._directory / "vllm.sock"

    async def start(self) -> None:
        self._directory = Path(tempfile.mkdtemp(prefix="async-rl-vllm-"))  # for this user alone
        own = environment(self._config, os.getpid())
        variables = {**own, **os.environ, "ASYNC_RL_VLLM_STARTER": str(os.getpid()), "VLLM_SERVER_DEV_MODE": "1"}
        flags = [*command_flags(self._arguments), "--tokens-only", "--uds", str(self.socket)]
        quiet = ["--uvicorn-log-level", "warning", "--disable-uvicorn-access-log", "--enable-prompt-tokens-details"]
        command = [sys.executable, "-m", "vllm.entrypoints.openai.api_server", *flags, *quiet]
        self._process = await asyncio.create_subprocess_exec(
            *leashed(command),  # from its first moment on: vLLM takes seconds to import, and our plugin comes after that
            env=variables, stdin=asyncio.subprocess.DEVNULL, start_new_session=True,
        )  # fmt: skip

    def exit_code(self) -> int | None:
        return None if self._process is None else self._process.returncode

    async def stop(self) -> None:
        """End it and all that it started."""
        process, self._process = self._process, None
        if process is not None:
            if process.returncode is None:
                with suppress(ProcessLookupError):
                    process.terminate()
                with suppress(TimeoutError):
                    async with asyncio.timeout(STOP_S):
                        await process.wait()
            with suppress(ProcessLookupError, PermissionError):
                os.killpg(process.pid, signal.SIGKILL)
            await process.wait()
        if self._directory is not None:
            shutil.rmtree(self._directory, ignore_errors=True)


class ServerHost:
    """A VllmHost (see vllm_host) over HTTP. address: of a running server; None: one is started.

    refresh_tied_heads: see vllm_worker.StagedInit.
    """

    def __init__(
        self,
        model_path: Path | str,
        config: RolloutConfig,
        max_context: int,
        *,
        address: str | None = None,
        refresh_tied_heads: bool = True,
    ) -> None:
        arguments = engine_arguments(Path(model_path), config, max_context)
        self._address = address
        self._start_timeout_s = config.vllm.start_timeout_s
        self._process = ServerProcess(arguments, config) if address is None else None
        self._init_info = {"refresh_tied_heads": refresh_tied_heads}
        self._session: aiohttp.ClientSession | None = None

    async def start(self) -> None:
        connector: aiohttp.BaseConnector = aiohttp.TCPConnector(limit=0)
        if self._process is not None:
            await self._process.start()
            connector = aiohttp.UnixConnector(str(self._process.socket), limit=0)
        timeout = aiohttp.ClientTimeout(total=None, sock_connect=CONNECT_S)  # the engine bounds what it asks for
        limit = 2**24  # bytes of one line: the last chunk of a long completion
        address = self._address or "http://vllm"
        self._session = aiohttp.ClientSession(address, connector=connector, timeout=timeout, read_bufsize=limit)
        await self._until_healthy()
        await self._post("init_weight_transfer_engine", json={"init_info": self._init_info})

    async def close(self) -> None:
        session, self._session = self._session, None
        if session is not None:
            await session.close()
        if self._process is not None:
            await self._process.stop()

    async def sample(
        self, prompt_ids: Sequence[int], sampling: SamplingParams, *, salt: str, on_output: Callable[[], object]
    ) -> Sampled:
        params = {
            "temperature": sampling.temperature,
            "max_tokens": sampling.max_new_tokens,
            "seed": sampling.seed,
            "stop_token_ids": list(sampling.stop_token_ids),
            "ignore_eos": True,  # the stops are those that were given
            "logprobs": 0,  # of the sampled token
            "detokenize": False,
            "stream_interval": OUTPUT_EVERY,
        }
        token_ids: list[int] = []
        logprobs: list[float] = []
        last: dict[str, Any] = {}
        # Without details nothing is known of the cache: then all of the prompt may have come from it.
        num_cached = len(prompt_ids)
        async for chunk in self._stream(prompt_ids, params, salt):
            on_output()
            for choice in chunk["choices"]:
                last = choice
                token_ids += choice["token_ids"] or ()
                logprobs += [_logprob(one["logprob"]) for one in (choice["logprobs"] or {}).get("content") or ()]
            details = (chunk.get("usage") or {}).get("prompt_tokens_details") or {}
            num_cached = details.get("cached_tokens", num_cached)
        try:
            is_stop = stop_kind(last.get("finish_reason"))
        except ValueError as error:
            raise EngineError(f"the vLLM server gave a request up: {error}") from None
        spans = [LabelSpan(span["version"], span["start"], span["end"]) for span in last["weight_versions"] or ()]
        return Sampled(token_ids, logprobs, spans, is_stop, num_cached)

    async def prompt_logprobs(self, token_ids: Sequence[int], *, salt: str) -> Sequence[float]:
        params = {"max_tokens": 1, "prompt_logprobs": 0, "detokenize": False, "ignore_eos": True}
        rows = (await self._generate(token_ids, params, salt))["prompt_logprobs"]
        return [_logprob(rows[index][str(token_ids[index])]["logprob"]) for index in range(1, len(token_ids))]

    async def next_logprob(self, prefix_ids: Sequence[int], token_id: int, temperature: float, *, salt: str) -> float:
        params = {"temperature": temperature, **next_logprob_params(token_id)}
        choice = (await self._generate(prefix_ids, params, salt))["choices"][0]
        entries = {entry["token_id"]: entry["logprob"] for entry in choice["logprobs"]["content"][0]["top_logprobs"]}
        return _logprob(entries[token_id])

    async def pause(self, *, clear_cache: bool) -> None:
        await self._post("pause", params={"mode": "keep", "clear_cache": str(clear_cache).lower()})

    async def load(self, update: Mapping[str, Any], label: str) -> Mapping[str, str]:
        await self._post("start_weight_update")
        await self._post("update_weights", json={"update_info": dict(update)})
        await self._post("finish_weight_update", json={"weight_version": label})
        answer = await self._post("collective_rpc", json={"method": DIGESTS_METHOD})
        return one_digest(answer["results"])

    async def relabel(self, label: str) -> None:
        await self._post("update_weight_version", json={"new_version": label})

    async def resume(self) -> None:
        await self._post("resume")

    async def _stream(self, prompt_ids: Sequence[int], params: Mapping[str, Any], salt: str) -> AsyncIterator[dict[str, Any]]:
        """The chunks of a completion. Leaving it early ends the request at the server."""
        if self._session is None:
            raise EngineError("the vLLM server is not connected")
        options = {"stream": True, "stream_options": {"include_usage": True}}
        body = {"token_ids": list(prompt_ids), "sampling_params": params, "cache_salt": salt, **options}
        try:
            async with self._session.post("/inference/v1/generate", json=body) as response:
                if response.status != 200:
                    raise EngineError(f"the vLLM server refused a request: {response.status} {_short(await response.text())}")
                async for line in response.content:
                    if line.startswith(b"data: {"):
                        chunk: dict[str, Any] = json.loads(line[6:])
                        if "choices" not in chunk:
                            raise EngineError(f"the vLLM server gave a request up: {_short(line.decode(errors='replace'))}")
                        yield chunk
        except (aiohttp.ClientError, OSError, RuntimeError) as error:
            raise EngineError(f"the vLLM server{self._ended()} does not answer: {error!r}") from error

    async def _generate(self, prompt_ids: Sequence[int], params: Mapping[str, Any], salt: str) -> dict[str, Any]:
        body = {"token_ids": list(prompt_ids), "sampling_params": params, "cache_salt": salt}
        return await self._post("inference/v1/generate", json=body)

    async def _post(self, route: str, **request: Any) -> dict[str, Any]:
        if self._session is None:
            raise EngineError("the vLLM server is not connected")
        try:
            async with self._session.post(f"/{route}", **request) as response:
                text = await response.text()
                if response.status != 200:
                    raise EngineError(f"the vLLM server answered /{route} with {response.status}: {_short(text)}")
        except (aiohttp.ClientError, OSError, RuntimeError) as error:
            raise EngineError(f"the vLLM server{self._ended()} does not answer /{route}: {error!r}") from error
        answer: dict[str, Any] = json.loads(text)
        return answer

    async def _until_healthy(self) -> None:
        """Raises: EngineError if the server ends or does not answer in time, or was started without what we need."""
        assert self._session is not None
        try:
            async with asyncio.timeout(self._start_timeout_s):
                while not await self._is_healthy():
                    if self._process is not None and self._process.exit_code() is not None:
                        raise EngineError(f"the vLLM server{self._ended()} did not start; its output says why")
                    await asyncio.sleep(POLL_S)
        except TimeoutError:
            raise EngineError(
                f"the vLLM server did not answer within rollout.vllm.start_timeout_s={self._start_timeout_s:g} s"
            ) from None
        async with self._session.get("/weight_info") as response:
            if response.status != 200:
                raise EngineError(
                    f"the vLLM server at {self._address} has no weight-transfer routes ({response.status}); start it with "
                    "VLLM_SERVER_DEV_MODE=1 and the flags in docs/vllm.md"
                )

    async def _is_healthy(self) -> bool:
        assert self._session is not None
        try:
            async with self._session.get("/health") as response:
                return response.status == 200
        except (aiohttp.ClientError, OSError):
            return False

    def _ended(self) -> str:
        code = None if self._process is None else self._process.exit_code()
        return "" if code is None else f" (it ended with exit code {code})"


def _logprob(value: float) -> float:
    return float("-inf") if value <= MISSING_LOGPROB else value


def _short(text: str) -> str:
    line = " ".join(text.split())
    return line if len(line) <= 400 else f"{line[:400]}…"
