"""The client of a vLLM server against a real HTTP server that answers as vLLM 0.32 does, and that fails as a healthy one never
would. Format: vllm/entrypoints/scale_out/token_in_token_out/protocol.py. vLLM itself: tests/contracts/test_engine.py."""

from __future__ import annotations

import asyncio
import json
import math
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
from aiohttp import web

from async_rl.config.rollout import RolloutConfig, VllmConfig
from async_rl.errors import EngineError
from async_rl.rollout.vllm_host import LabelSpan, Sampled
from async_rl.rollout.vllm_server import ServerHost
from protocol.messages import SamplingParams

Answer = Callable[[web.Request], Awaitable[web.StreamResponse]]

GENERATE = "/inference/v1/generate"
PARAMS = SamplingParams(0.6, 3, 7, (2,))
ASKED = {"token_id": 382, "logprob": -4.2, "rank": 2}
LIKELIEST = {"token_id": 13, "logprob": -0.7, "rank": 1}


def frame(token_ids: Sequence[int], logprobs: Sequence[float], **end: Any) -> dict[str, Any]:
    content = [{"token_id": token, "logprob": value} for token, value in zip(token_ids, logprobs, strict=True)]
    choice = {"index": 0, "token_ids": list(token_ids), "logprobs": {"content": content}, "finish_reason": None}
    return {"choices": [{**choice, "weight_versions": None, **end}]}


def stream_of(*frames: Mapping[str, Any], cut: bool = False) -> Answer:
    """Server-sent events; cut: the connection breaks behind them."""

    async def answer(request: web.Request) -> web.StreamResponse:
        response = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
        await response.prepare(request)
        for one in frames:
            await response.write(f"data: {json.dumps(one)}\n\n".encode())
        if cut:
            assert request.transport is not None
            request.transport.abort()
        else:
            await response.write(b"data: [DONE]\n\n")
        return response

    return answer


def json_of(content: Any, status: int = 200) -> Answer:
    async def answer(request: web.Request) -> web.StreamResponse:
        del request
        return web.json_response(content, status=status)

    return answer


class Server:
    """Answers by route, and remembers what it was asked."""

    def __init__(self) -> None:
        self.answers: dict[str, Answer] = {"/health": json_of({}), "/weight_info": json_of({"weight_version": "default"})}
        self.asked: list[tuple[str, Any]] = []
        self.address = ""

    async def handle(self, request: web.Request) -> web.StreamResponse:
        if request.method == "POST":
            self.asked.append((request.path, await request.json() if request.can_read_body else dict(request.query)))
        return await self.answers.get(request.path, json_of({"message": "done"}))(request)


@pytest.fixture
async def server() -> AsyncIterator[Server]:
    made = Server()
    app = web.Application()
    app.router.add_route("*", "/{path:.*}", made.handle)
    runner = web.AppRunner(app, handler_cancellation=True)
    await runner.setup()
    site = web.TCPSite(runner, "127.0.0.1", 0)
    await site.start()
    host, port = runner.addresses[0][:2]
    made.address = f"http://{host}:{port}"
    yield made
    await runner.cleanup()


@pytest.fixture
async def host(server: Server) -> AsyncIterator[ServerHost]:
    made = ServerHost("model", RolloutConfig(engine="vllm-server"), 64, address=server.address)
    await made.start()
    yield made
    await made.close()


async def sample(host: ServerHost, on_output: Callable[[], object] = lambda: None) -> Sampled:
    return await host.sample([5, 9], PARAMS, salt="v1-x-2", on_output=on_output)


async def test_a_completion_is_joined_from_its_chunks(server: Server, host: ServerHost) -> None:
    spans = [{"version": "v1", "start": 0, "end": 2}, {"version": "v2", "start": 2, "end": 3}]
    usage = {"choices": [], "usage": {"prompt_tokens_details": {"cached_tokens": 1}}}
    last = frame([2], [-0.5], finish_reason="stop", weight_versions=spans)
    server.answers[GENERATE] = stream_of(frame([8, 9], [-1.0, -9999.0]), last, usage)
    outputs: list[None] = []
    found = await sample(host, lambda: outputs.append(None))
    expected_spans = [LabelSpan("v1", 0, 2), LabelSpan("v2", 2, 3)]
    assert found == Sampled([8, 9, 2], [-1.0, -math.inf, -0.5], expected_spans, is_stop=True, num_cached=1)
    assert len(outputs) == 3
    path, body = server.asked[-1]
    assert (path, body["token_ids"], body["cache_salt"]) == (GENERATE, [5, 9], "v1-x-2")
    own = body["sampling_params"]
    assert (own["temperature"], own["max_tokens"], own["seed"], own["stop_token_ids"]) == (0.6, 3, 7, [2])
    assert own["ignore_eos"]


async def test_without_details_all_of_the_prompt_may_be_cached(server: Server, host: ServerHost) -> None:
    server.answers[GENERATE] = stream_of(frame([8], [-1.0], finish_reason="length"))
    found = await sample(host)
    assert (found.num_cached, found.is_stop, list(found.spans)) == (2, False, [])


async def test_the_logprob_is_the_sampled_tokens_and_not_the_likeliest_ones(server: Server, host: ServerHost) -> None:
    one = frame([382], [-4.2], finish_reason="length")
    one["choices"][0]["logprobs"]["content"][0]["top_logprobs"] = [ASKED, LIKELIEST]
    server.answers[GENERATE] = stream_of(one)
    assert list((await sample(host)).logprobs) == [-4.2]


@pytest.mark.parametrize("asked", [ASKED, LIKELIEST])
async def test_the_next_tokens_logprob_is_that_of_the_one_asked_for(
    server: Server, host: ServerHost, asked: Mapping[str, Any]
) -> None:
    choice = {"logprobs": {"content": [{**ASKED, "top_logprobs": [ASKED, LIKELIEST]}]}}
    server.answers[GENERATE] = json_of({"choices": [choice]})
    assert await host.next_logprob([5], asked["token_id"], 0.6, salt="s") == asked["logprob"]


async def test_prompt_logprobs_are_of_the_given_tokens(server: Server, host: ServerHost) -> None:
    rows = [None, {"9": {"logprob": -0.25}}, {"4": {"logprob": -0.1}, "7": {"logprob": -2.0}}]
    server.answers[GENERATE] = json_of({"prompt_logprobs": rows})
    assert await host.prompt_logprobs([5, 9, 7], salt="s") == [-0.25, -2.0]


@pytest.mark.parametrize(
    ("answer", "reason"),
    [
        (stream_of({"error": {"message": "kernel died"}}), "kernel died"),
        (stream_of(frame([8], [-1.0]), {"error": {"message": "kernel died"}}), "kernel died"),
        (stream_of(frame([8], [-1.0], finish_reason="abort")), "abort"),
        (stream_of(frame([8], [-1.0])), "None"),
        (stream_of(), "None"),
        (stream_of(frame([8], [-1.0]), cut=True), "does not answer"),
        (json_of({"error": "seed must be an integer"}, 400), "400.*seed must be"),
    ],
    ids=["error", "error later", "abort", "no end", "nothing", "cut", "refused"],
)
async def test_a_request_without_a_whole_answer_is_an_engine_error(
    server: Server, host: ServerHost, answer: Answer, reason: str
) -> None:
    server.answers[GENERATE] = answer
    with pytest.raises(EngineError, match=reason):
        await sample(host)


async def test_cancelling_a_request_ends_it_at_the_server(server: Server, host: ServerHost) -> None:
    begun, ended = asyncio.Event(), asyncio.Event()

    async def hang(request: web.Request) -> web.StreamResponse:
        response = web.StreamResponse()
        await response.prepare(request)
        begun.set()
        try:
            await asyncio.Event().wait()
        finally:
            ended.set()
        return response

    server.answers[GENERATE] = hang
    task = asyncio.create_task(sample(host))
    await begun.wait()
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    async with asyncio.timeout(10):
        await ended.wait()


async def test_a_load_begins_updates_ends_with_its_label_and_returns_what_all_ranks_read(
    server: Server, host: ServerHost
) -> None:
    server.asked.clear()
    server.answers["/collective_rpc"] = json_of({"results": [{"a": "1", "b": "2"}, {"a": "1", "b": "3"}]})
    await host.pause(clear_cache=True)
    assert await host.load({"path": "p"}, "v3-x-4") == {"a": "1", "b": "ranks differ"}
    await host.resume()
    assert server.asked == [
        ("/pause", {"mode": "keep", "clear_cache": "true"}),
        ("/start_weight_update", {}),
        ("/update_weights", {"update_info": {"path": "p"}}),
        ("/finish_weight_update", {"weight_version": "v3-x-4"}),
        ("/collective_rpc", {"method": "async_rl_digests"}),
        ("/resume", {}),
    ]


async def test_a_command_that_fails_says_which_and_why(server: Server, host: ServerHost) -> None:
    server.answers["/update_weights"] = json_of({"error": "size mismatch for lm_head"}, 500)
    with pytest.raises(EngineError, match=r"/update_weights with 500: .*size mismatch"):
        await host.load({"path": "p"}, "v3")


async def test_a_server_without_the_weight_transfer_routes_is_refused_with_the_remedy(server: Server) -> None:
    server.answers["/weight_info"] = json_of({}, 404)
    host = ServerHost("model", RolloutConfig(engine="vllm-server"), 64, address=server.address)
    with pytest.raises(EngineError, match="VLLM_SERVER_DEV_MODE=1"):
        await host.start()
    await host.close()


async def test_a_server_that_never_gets_healthy_is_waited_for_so_long(server: Server) -> None:
    server.answers["/health"] = json_of({}, 503)
    config = RolloutConfig(engine="vllm-server", vllm=VllmConfig(start_timeout_s=0.05))
    host = ServerHost("model", config, 64, address=server.address)
    with pytest.raises(EngineError, match=r"rollout\.vllm\.start_timeout_s=0\.05"):
        await host.start()
    await host.close()


async def test_after_close_nothing_is_asked(host: ServerHost) -> None:
    await host.close()
    for ask in (sample(host), host.resume()):
        with pytest.raises(EngineError, match="not connected"):
            await ask


async def test_a_started_server_that_ends_at_once_is_not_waited_for(tmp_path: Path) -> None:
    """With or without vLLM: there is no such model."""
    host = ServerHost(tmp_path / "missing", RolloutConfig(engine="vllm-server"), 64)
    with pytest.raises(EngineError, match=r"ended with exit code 1.*did not start"):
        await host.start()
    await host.close()
