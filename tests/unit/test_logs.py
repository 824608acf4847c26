from __future__ import annotations

import io
import json
import logging
import subprocess
import sys
import warnings
from pathlib import Path

import numpy as np
import pytest

from async_rl import logs
from async_rl.logs import Event, LineFile, configure, get_logger, redact, redact_url, to_json


@pytest.fixture(autouse=True)
def closed():
    yield
    logs.close()
    logging.captureWarnings(False)
    root = logging.getLogger()
    root.handlers = [handler for handler in root.handlers if type(handler).__module__ != "async_rl.logs"]


def start(run_dir: Path | None = None, **options: object) -> io.StringIO:
    stream = io.StringIO()
    fields = {"role": "rollout", "worker_id": "w-0", "run_id": "run-1", "run_dir": run_dir, "stream": stream, **options}
    configure(now=lambda: 12.5, **fields)  # type: ignore[arg-type]  # a test's keyword arguments
    return stream


def lines(path: Path) -> list[dict[str, object]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def test_line_carries_run_role_and_worker_bound_once(tmp_path):
    start(tmp_path, index=3)
    get_logger().info("engine.ready", slots=4)
    assert lines(tmp_path / "logs/rollout-3.jsonl") == [
        {
            "time_s": 12.5,
            "level": "info",
            "event": "engine.ready",
            "run_id": "run-1",
            "role": "rollout",
            "worker_id": "w-0",
            "slots": 4,
        }
    ]


def test_events_go_to_the_events_file_too_and_other_lines_do_not(tmp_path):
    start(tmp_path)
    get_logger().info(Event.GROUP_DROPPED, lag=5)
    get_logger().info("detail")
    assert [line["event"] for line in lines(tmp_path / "events.jsonl")] == ["group.dropped"]
    assert [line["event"] for line in lines(tmp_path / "logs/rollout.jsonl")] == ["group.dropped", "detail"]


def test_level_holds_for_files_and_console(tmp_path):
    stream = start(tmp_path, level="warning")
    get_logger().info("quiet")
    get_logger().warning("loud")
    assert [line["event"] for line in lines(tmp_path / "logs/rollout.jsonl")] == ["loud"]
    assert "loud" in stream.getvalue()
    assert "quiet" not in stream.getvalue()


def test_logger_made_before_configure_follows_it(tmp_path):
    log = get_logger()
    start(tmp_path, level="error")
    log.info("first")
    start(tmp_path, level="debug")
    log.debug("second")
    assert [line["event"] for line in lines(tmp_path / "logs/rollout.jsonl")] == ["second"]


def test_console_is_readable_and_leaves_out_the_traceback(tmp_path):
    stream = start(tmp_path)
    try:
        raise ValueError("boom")
    except ValueError:
        get_logger().exception("role.crashed", lag=3)
    assert "lag=3" in stream.getvalue()
    assert "ValueError: boom" in stream.getvalue()
    assert "Traceback" not in stream.getvalue()
    assert "Traceback" in str(lines(tmp_path / "logs/rollout.jsonl")[0]["exception"])


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("redis://user:hunter2@host:6379/0", "redis://user:***@host:6379/0"),
        ("redis://:hunter2@host", "redis://:***@host"),
        ("rediss://u:p@ss@host/1 is down", "rediss://u:***@host/1 is down"),
        ("unix:///run/redis.sock?password=hunter2&db=0", "unix:///run/redis.sock?password=***&db=0"),
        ("redis://host:6379/0", "redis://host:6379/0"),
        ("mail me: a@b.c", "mail me: a@b.c"),
    ],
)
def test_passwords_in_addresses_are_hidden(text, shown):
    assert redact_url(text) == shown


def test_secrets_reach_neither_file_nor_console_in_any_place(tmp_path):
    stream = start(tmp_path)
    address = "redis://u:hunter2@h"
    try:
        raise ConnectionError(address)
    except ConnectionError:
        get_logger().exception(
            f"cannot reach {address}",
            url=address,
            password="hunter2",
            hf_token="hunter2",
            settings={"api_key": "hunter2", "inner": [{"secret": "hunter2"}, address]},
            raw=b"hunter2",
        )
    logging.getLogger("other").error("at %s", address)
    written = (tmp_path / "logs/rollout.jsonl").read_text() + stream.getvalue()
    assert len(lines(tmp_path / "logs/rollout.jsonl")) == 2
    assert "hunter2" not in written
    assert "***" in written


def test_numbers_of_tokens_are_no_secrets():
    fields = {"num_tokens": 4, "stop_token": 13, "token_ids": [1, 2], "tokens": "a"}
    assert redact(fields) == fields


def test_line_is_strict_json_whatever_the_fields_hold():
    fields = {
        "a": float("nan"),
        "b": [float("inf")],
        "c": np.float32(0.5),
        "d": np.arange(2),
        "e": Path("x"),
        "f": Event.WAITING,
        "g": {1: None},
    }
    assert json.loads(to_json(fields)) == {
        "a": None,
        "b": [None],
        "c": 0.5,
        "d": [0, 1],
        "e": "x",
        "f": "waiting",
        "g": {"1": None},
    }


def test_python_warnings_and_logging_join_from_warning_on(tmp_path):
    start(tmp_path)
    logging.getLogger("lib").warning("careful")
    logging.getLogger("lib").info("chatter")
    with warnings.catch_warnings():
        warnings.simplefilter("always")
        warnings.warn("old\nstyle", stacklevel=1)
    found = lines(tmp_path / "logs/rollout.jsonl")
    assert found[0] | {"event": "careful", "logger": "lib", "level": "warning"} == found[0]
    assert "old style" in str(found[1]["event"])
    assert len(found) == 2


def test_full_disk_costs_lines_and_one_warning_but_never_the_run(capsys):
    file = LineFile(Path("/dev/full"))
    file.write("a")
    file.write("b")
    file.close()
    assert capsys.readouterr().err.count("cannot be written (No space left on device)") == 1


def test_processes_share_the_events_file_without_tearing_lines(tmp_path):
    program = (
        "import sys; from pathlib import Path; from async_rl.logs import *\n"
        "configure(role='r', worker_id=sys.argv[2], run_id='x', run_dir=Path(sys.argv[1]), console=False)\n"
        "for i in range(300): get_logger().info(Event.WAITING, i=i, filler='y' * (i * 7 % 3000))\n"
    )
    children = [subprocess.Popen([sys.executable, "-c", program, str(tmp_path), f"w{n}"]) for n in range(3)]
    assert [child.wait(timeout=60) for child in children] == [0, 0, 0]
    found = lines(tmp_path / "events.jsonl")
    for worker in ("w0", "w1", "w2"):
        assert [line["i"] for line in found if line["worker_id"] == worker] == list(range(300))


def test_unconfigured_and_closed_loggers_are_silent(tmp_path, capsys):
    program = "from async_rl.logs import get_logger; get_logger().error('x', a=1)"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True, timeout=60)
    assert done.stdout + done.stderr == ""
    start(tmp_path)
    logs.close()
    get_logger().error("after")
    assert "after" not in (tmp_path / "logs/rollout.jsonl").read_text() + capsys.readouterr().err
