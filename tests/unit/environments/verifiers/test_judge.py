"""The judge against a real HTTP server on this machine: scores, retries, rate, cache, and what is invalid."""

from __future__ import annotations

import asyncio
import json
import threading
import time
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest
from msgspec.structs import replace

from async_rl.environments.base import Episode, TurnText
from async_rl.environments.verifiers.judge import Judge
from async_rl.errors import ConfigError
from async_rl.testing.builders import make_task
from protocol.messages import FinishReason, Reward

Answer = tuple[int, str, dict[str, str]]


class Server:
    """Answers with what `script` says for the number of the request and its body."""

    def __init__(self, script: Callable[[int, dict[str, Any]], Answer]) -> None:
        self.requests: list[dict[str, Any]] = []
        self.headers: list[dict[str, str]] = []
        self.times: list[float] = []
        self.most_at_once = 0
        at_once, lock, outer = 0, threading.Lock(), self

        class Handler(BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                nonlocal at_once
                body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
                with lock:
                    number = len(outer.requests)
                    outer.requests.append(body)
                    outer.headers.append({name.lower(): value for name, value in self.headers.items()})
                    outer.times.append(time.monotonic())
                    at_once += 1
                    outer.most_at_once = max(outer.most_at_once, at_once)
                status, text, headers = script(number, body)
                with lock:
                    at_once -= 1
                reply = json.dumps({"choices": [{"message": {"content": text}}]}).encode()
                self.send_response(status)
                for name, value in {"Content-Length": str(len(reply)), **headers}.items():
                    self.send_header(name, value)
                self.end_headers()
                self.wfile.write(reply)

            def log_message(self, *_: object) -> None:
                return

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self._thread = threading.Thread(target=self._server.serve_forever, kwargs={"poll_interval": 0.01})
        self._thread.start()
        self.url = f"http://127.0.0.1:{self._server.server_address[1]}/v1"

    def stop(self) -> None:
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()


@pytest.fixture
def serve() -> Iterator[Callable[..., Server]]:
    servers: list[Server] = []

    def start(script: Callable[[int, dict[str, Any]], Answer]) -> Server:
        servers.append(Server(script))
        return servers[-1]

    yield start
    for server in servers:
        server.stop()


def episode(completion: str = "4") -> Episode:
    return Episode(replace(make_task(prompt="2 + 2?"), columns={"hint": "even"}), 0, (TurnText(completion, FinishReason.STOP),))


async def verdict(judge: Judge, *episodes: Episode) -> list[Any]:
    try:
        return list(await asyncio.gather(*(judge.verify(one) for one in episodes or (episode(),))))
    finally:
        await judge.close()


def score(number: int) -> Callable[[int, dict[str, Any]], Answer]:
    return lambda _, body: (200, f"Well.\nScore: {number}", {})


async def test_the_score_is_scaled_and_the_question_holds_the_row(serve: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("JUDGE_KEY", "secret")
    server = serve(score(7))
    judge = Judge(url=server.url, model="m", template="{prompt}|{completion}|{hint}|{unknown}", key_env="JUDGE_KEY")
    assert await verdict(judge) == [0.7]
    (body,) = server.requests
    assert body["messages"] == [{"role": "user", "content": "2 + 2?|4|even|{unknown}"}]
    assert (body["model"], body["temperature"]) == ("m", 0.0)
    assert server.headers[0]["authorization"] == "Bearer secret"


async def test_later_means_later_and_then_it_counts(serve: Any) -> None:
    answers: list[Answer] = [(503, "", {}), (429, "", {"Retry-After": "0.2"}), (200, "Score: 10", {})]
    server = serve(lambda number, _: answers[number])
    assert await verdict(Judge(url=server.url, model="m", backoff_s=0.01)) == [1.0]
    assert server.times[2] - server.times[1] >= 0.2


@pytest.mark.parametrize(
    ("answer", "kind", "requests"),
    [
        ((500, "", {}), "JudgeUnavailable", 3),
        ((401, "", {}), "JudgeUnavailable", 1),
        ((200, "I like it.", {}), "JudgeUnreadable", 1),
        ((200, "Score: 11", {}), "JudgeUnreadable", 1),
    ],
)
async def test_what_gives_no_score_is_invalid(serve: Any, answer: Answer, kind: str, requests: int) -> None:
    server = serve(lambda *_: answer)
    (reward,) = await verdict(Judge(url=server.url, model="m", retries=2, backoff_s=0.01))
    assert isinstance(reward, Reward)
    assert (reward.value, reward.error_type) == (None, kind)
    assert len(server.requests) == requests


async def test_a_server_that_is_not_there_is_invalid() -> None:
    (reward,) = await verdict(Judge(url="http://127.0.0.1:9/v1", model="m", retries=1, backoff_s=0.01))
    assert reward.error_type == "JudgeUnavailable"


async def test_equal_questions_are_asked_once_also_by_another_process(serve: Any, tmp_path: Path) -> None:
    server = serve(score(5))
    cache = str(tmp_path / "judge.jsonl")
    assert await verdict(Judge(url=server.url, model="m", cache_file=cache), *[episode()] * 5) == [0.5] * 5
    with (tmp_path / "judge.jsonl").open("a") as file:
        file.write('{"key": "torn')
    assert await verdict(Judge(url=server.url, model="m", cache_file=cache), episode(), episode("5")) == [0.5, 0.5]
    assert len(server.requests) == 2


async def test_requests_keep_to_the_rate_and_the_bound(serve: Any) -> None:
    def slow(_: int, __: dict[str, Any]) -> Answer:
        time.sleep(0.05)
        return 200, "Score: 1", {}

    server = serve(slow)
    judge = Judge(url=server.url, model="m", per_second=50.0, max_concurrent=2)
    assert await verdict(judge, *(episode(str(number)) for number in range(10))) == [0.1] * 10
    assert server.most_at_once <= 2
    assert server.times[-1] - server.times[0] >= 9 / 50 - 0.02


def test_an_address_that_is_none_is_refused() -> None:
    with pytest.raises(ConfigError, match="is no http address"):
        Judge(url="localhost:8000", model="m")
