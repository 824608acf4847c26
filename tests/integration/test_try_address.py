"""`async-rl try --address`: a real HTTP server acts, in a task of two turns with a tool between them."""

from __future__ import annotations

import json
import threading
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest

from async_rl import RunConfig
from async_rl.config import load_config
from async_rl.environments.look_up import LookUp
from async_rl.errors import EngineError
from async_rl.launch.demo_model import demo_model, demo_tokenizer, save_model
from async_rl.launch.try_environment import Policy, try_environment
from workers.cli import main

TOKENIZER = demo_tokenizer()
TASK = LookUp(length=4, sort=True)
Choice = Mapping[str, Any]


@dataclass
class CompletionServer:
    """Answers POST /v1/completions as told; keeps what it was asked."""

    answer: Callable[[str], tuple[int, Choice]]
    asked: list[dict[str, Any]] = field(default_factory=list)
    url: str = ""


@pytest.fixture
def serve() -> Iterator[Callable[[Callable[[str], tuple[int, Choice]]], CompletionServer]]:
    running: list[tuple[ThreadingHTTPServer, threading.Thread]] = []

    def start(answer: Callable[[str], tuple[int, Choice]]) -> CompletionServer:
        told = CompletionServer(answer)

        class Handler(BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
                told.asked.append({"path": self.path, **body})
                status, choice = told.answer(str(TOKENIZER.decode(body["prompt"], skip_special_tokens=True)))
                reply = json.dumps({"choices": [choice]}).encode()
                self.send_response(status)
                self.send_header("Content-Length", str(len(reply)))
                self.end_headers()
                self.wfile.write(reply)

            def log_message(self, *_: object) -> None:
                return

        server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
        thread.start()
        running.append((server, thread))
        told.url = f"http://127.0.0.1:{server.server_address[1]}/v1"
        return told

    yield start
    for server, thread in running:
        server.shutdown()
        server.server_close()
        thread.join()


@pytest.fixture(scope="module")
def config_path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("try")
    save_model(root / "model", demo_model(TOKENIZER, seed=0), TOKENIZER)
    path = root / "look_up.toml"
    path.write_text(
        f'model.path = "{root / "model"}"\ndata.shuffle = false\nrollout = {{ max_turns = 2, max_new_tokens = 8 }}\n'
        'environment = { name = "look_up", args = { length = 4, sort = true } }\n'
    )
    return path


def config(path: Path) -> RunConfig:
    return load_config(path, [], {}).config


def knows(prompt: str) -> str:
    """First the call of the tool; then, from what the tool said, its digits in order."""
    key, called, found = prompt.partition(">")[0], "=" in prompt, prompt.rpartition("=")[2]
    return "".join(sorted(found.rstrip(">"))) if called else f"*{key}"


def test_token_ids_of_the_server_are_kept_and_the_next_turn_begins_with_them(serve: Any, config_path: Path) -> None:
    def with_ids(prompt: str) -> tuple[int, Choice]:
        ids = [*TOKENIZER.encode(knows(prompt), add_special_tokens=False), TOKENIZER.eos_token_id]
        return 200, {"text": "not read", "token_ids": ids, "finish_reason": "stop"}

    server = serve(with_ids)
    (group,) = try_environment(
        config(config_path), Policy(address=server.url, served_model="m"), first_row=0, rows=1, members=1
    )
    (trajectory,) = group.trajectories
    assert trajectory.reward is not None
    assert (trajectory.reward.value, len(trajectory.turns)) == (1.0, 2)
    first, second = server.asked
    assert first["path"] == "/v1/completions"
    assert (first["model"], first["max_tokens"], first["temperature"], first["return_token_ids"]) == ("m", 8, 1.0, True)
    assert first["seed"] != second["seed"]
    key = str(TASK.row(0).columns["key"])
    said = [*TOKENIZER.encode(f"*{key}", add_special_tokens=False), TOKENIZER.eos_token_id]
    assert second["prompt"][: len(first["prompt"]) + len(said)] == [*first["prompt"], *said]
    assert second["prompt"] == trajectory.token_ids.tolist()[: len(second["prompt"])]


def test_a_server_that_answers_with_text_alone_can_act_too(serve: Any, config_path: Path) -> None:
    server = serve(lambda prompt: (200, {"text": knows(prompt), "finish_reason": "stop"}))
    groups = try_environment(config(config_path), Policy(address=f"{server.url}/"), first_row=1, rows=2, members=2)
    rewards = [trajectory.reward for group in groups for trajectory in group.trajectories]
    assert [reward.value for reward in rewards if reward is not None] == [1.0] * 4
    assert len({request["seed"] for request in server.asked}) == len(server.asked) == 8


def test_an_answer_cut_by_its_limit_ends_the_trajectory(serve: Any, config_path: Path) -> None:
    server = serve(lambda prompt: (200, {"text": "*0", "finish_reason": "length"}))
    (group,) = try_environment(config(config_path), Policy(address=server.url), first_row=0, rows=1, members=1)
    (trajectory,) = group.trajectories
    assert (trajectory.finish_reason, len(trajectory.turns)) == ("length", 1)


@pytest.mark.parametrize(("status", "choice"), [(503, {}), (200, {"message": "no completion"})])
def test_a_server_that_gives_no_completion_is_named(serve: Any, config_path: Path, status: int, choice: Choice) -> None:
    server = serve(lambda prompt: (status, choice))
    with pytest.raises((EngineError, ExceptionGroup), match=rf"{server.url} gave no completion"):
        try_environment(config(config_path), Policy(address=server.url), first_row=0, rows=1, members=1)


def test_the_command_shows_the_trajectory_with_its_reward(
    serve: Any, config_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    server = serve(lambda prompt: (200, {"text": knows(prompt), "finish_reason": "stop"}))
    with pytest.raises(SystemExit) as ended:
        main(["try", str(config_path), "--address", server.url])
    assert ended.value.code == 0
    shown = capsys.readouterr().out
    assert "2 turns, stop; reward 1" in " ".join(shown.split())
    assert "exact_match 1" in " ".join(shown.split())
