"""Structured logs: events with fields, as JSON lines per role in the run directory, and readable on the console.

One line is one `write` to a file opened with O_APPEND, so processes share `events.jsonl` without a lock. What is below the
level costs one attribute look-up. Secrets (passwords in URLs, fields named password, token, secret, …) are replaced by `***`
before anything is written. A full disk loses log lines, never the run. Torch-free.

    log = get_logger()
    log.info(Event.GROUP_DROPPED, group_id=..., lag=5, max_lag=4)      # an Event also goes to events.jsonl
    log.debug("engine.slot_freed", slot=3)                            # anything else to the role's own file
"""

from __future__ import annotations

import json
import logging
import math
import os
import re
import sys
import time
from collections.abc import Callable, Mapping, MutableMapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from enum import StrEnum
from pathlib import Path
from typing import IO, Any, TypeAlias, cast

import structlog
from structlog.typing import EventDict, FilteringBoundLogger, WrappedLogger

LEVELS: Mapping[str, int] = {"debug": 10, "info": 20, "warning": 30, "error": 40}

_HIDDEN = "***"
_URL_PASSWORD = re.compile(r"(://[^\s/@:]*):\S*@")
_QUERY_SECRET = re.compile(r"([?&](?:password|passwd|token|secret|api_key)=)[^&\s]+", re.IGNORECASE)
_SECRET_FIELD = re.compile(r"(?:^|[_.-])(?:password|passwd|token|secret|api_key|authorization|credentials)$", re.IGNORECASE)


class Event(StrEnum):
    """What happens to a run. Each is one line of events.jsonl; the fields beside it are named where it is logged."""

    RUN_STARTED = "run.started"
    RUN_RESUMED = "run.resumed"
    RUN_INTERRUPTED = "run.interrupted"
    RUN_ENDED = "run.ended"
    RUN_FAILED = "run.failed"
    ROLE_STARTED = "role.started"
    ROLE_ENDED = "role.ended"
    ROLE_FAILED = "role.failed"
    ROLE_RESTARTED = "role.restarted"
    ROLE_GIVEN_UP = "role.given_up"
    ROLE_DRAINED = "role.drained"
    WORKER_JOINED = "worker.joined"
    WORKER_LEFT = "worker.left"
    WORKER_LOST = "worker.lost"
    WORKER_DRAINING = "worker.draining"
    WORK_LEFT = "work.left"
    WORK_STALLED = "work.stalled"
    TASK_DEAD = "task.dead"
    TASK_RECLAIMED = "task.reclaimed"
    DUPLICATE_WORK = "work.duplicate"
    DATA_EXHAUSTED = "data.exhausted"
    DATA_GROWN = "data.grown"
    PROMPT_SKIPPED = "prompt.skipped"
    GROUP_DROPPED = "group.dropped"
    GROUP_INVALID = "group.invalid"
    ALL_INVALID = "groups.all_invalid"
    STRAGGLERS_GIVEN_UP = "stragglers.given_up"
    GROUP_QUARANTINED = "group.quarantined"
    REWARD_INVALID = "reward.invalid"
    STEP_DONE = "step.done"
    STEP_SKIPPED = "step.skipped"
    LOGPROBS_DIFFER = "logprobs.differ"
    OFF_POLICY_WARNING = "off_policy.warning"
    VERSION_ANNOUNCED = "version.announced"
    PUSH_STARTED = "push.started"
    PUSH_LIVE = "push.live"
    PUSH_FAILED = "push.failed"
    PUSH_MEASURED = "push.measured"
    ENGINE_SERVING = "engine.serving"
    ENGINE_EVICTED = "engine.evicted"
    ENGINE_FENCED = "engine.fenced"
    CHECKPOINT_WRITTEN = "checkpoint.written"
    CHECKPOINT_IGNORED = "checkpoint.ignored"
    CHECKPOINT_FAILED = "checkpoint.failed"
    EVALUATION_STARTED = "evaluation.started"
    EVALUATION_DONE = "evaluation.done"
    LOG_SEALED = "intake_log.sealed"
    LOG_REPLAYED = "intake_log.replayed"
    LOG_COMPACTED = "intake_log.compacted"
    QUEUE_RESTORED = "queue.restored"
    EPOCH_RAISED = "epoch.raised"
    QUEUE_LOST = "queue.lost"
    QUEUE_BACK = "queue.back"
    QUEUE_FULL = "queue.full"
    RANKS_STUCK = "ranks.stuck"
    WAITING = "waiting"


def get_logger() -> FilteringBoundLogger:
    """The logger of this process. Silent until `configure` was called."""
    return cast(FilteringBoundLogger, structlog.get_logger())


def configure(
    *,
    role: str,
    worker_id: str,
    run_id: str,
    run_dir: Path | None = None,
    index: int | None = None,
    level: str = "info",
    console: bool = True,
    stream: IO[str] | None = None,
    now: Callable[[], float] = time.time,
) -> None:
    """Bind run, role and worker for this process, and say where its log goes. May be called again: the last call counts.

    role_log_path and events.jsonl are written below `run_dir` (None: no files); `console` writes to `stream` or stderr.
    Python's own `logging` joins from WARNING on.
    """
    number = LEVELS[level]
    files = None if run_dir is None else role_log_path(run_dir, role, index)
    outputs = _Outputs(
        role_file=None if files is None else LineFile(files),
        events_file=None if run_dir is None else LineFile(run_dir / "events.jsonl"),
        console=(stream or sys.stderr) if console else None,
    )
    bound = {"run_id": run_id, "role": role, "worker_id": worker_id}
    _install(number, bound, outputs, now)
    _join_standard_logging(number)


def role_log_path(run_dir: Path, role: str, index: int | None = None) -> Path:
    """`logs/<role>.jsonl`, or `logs/<role>-<index>.jsonl` where a role has several processes."""
    return run_dir / "logs" / (f"{role}.jsonl" if index is None else f"{role}-{index}.jsonl")


def close() -> None:
    """Close the files of `configure`; later log calls are silent."""
    _OUTPUTS.value.close()
    _OUTPUTS.value = _Outputs(None, None, None)


def redact_url(text: str) -> str:
    """`text` with the password of every URL in it, and secret query parameters, replaced by `***`."""
    if "://" not in text:
        return text
    return _QUERY_SECRET.sub(rf"\1{_HIDDEN}", _URL_PASSWORD.sub(rf"\1:{_HIDDEN}@", text))


def redact(value: Any, name: str = "") -> Any:
    """`value` fit for a log: text in a field whose name says secret is hidden, URLs lose their passwords, at any depth."""
    if isinstance(value, str):
        return _HIDDEN if _SECRET_FIELD.search(name) else redact_url(value)
    if isinstance(value, bytes | bytearray):
        return _HIDDEN if _SECRET_FIELD.search(name) else f"<{len(value)} bytes>"
    if isinstance(value, Mapping):
        return {str(key): redact(inner, str(key)) for key, inner in value.items()}
    if isinstance(value, list | tuple | set | frozenset):
        return [redact(inner, name) for inner in value]
    return value


class LineFile:
    """A file that processes append whole lines to. A write that fails is reported once and drops its line."""

    def __init__(self, path: Path) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        self._path = path
        self._fd = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC, 0o644)
        self._torn = False  # the last write was cut short: end its line before the next
        self._complained = False

    def write(self, line: str) -> None:
        data = f"{line}\n".encode("utf-8", "backslashreplace")
        if self._torn:
            data = b"\n" + data
        try:
            self._torn = os.write(self._fd, data) < len(data)
        except OSError as error:
            self._complain(error)

    def close(self) -> None:
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1

    def _complain(self, error: OSError) -> None:
        if not self._complained:
            self._complained = True
            with suppress(OSError):
                print(f"warning: {self._path} cannot be written ({error.strerror}); log lines are lost", file=sys.stderr)


def to_json(fields: Mapping[str, Any]) -> str:
    """One line of strict JSON: non-finite floats become null, arrays lists, and what JSON does not know its str()."""
    return json.dumps(_plain(fields), ensure_ascii=False, separators=(",", ":"), allow_nan=False)


def _plain(value: Any) -> Any:
    if value is None or isinstance(value, bool | int):
        return value
    if isinstance(value, str):
        return str(value)
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, Mapping):
        return {str(key): _plain(inner) for key, inner in value.items()}
    if isinstance(value, list | tuple | set | frozenset):
        return [_plain(inner) for inner in value]
    if hasattr(value, "tolist"):  # numpy and torch, arrays and scalars
        return _plain(value.tolist())
    return str(value)


@dataclass(slots=True)
class _Outputs:
    role_file: LineFile | None
    events_file: LineFile | None
    console: IO[str] | None
    renderer: structlog.dev.ConsoleRenderer | None = None

    def __post_init__(self) -> None:
        if self.console is not None:
            colors = hasattr(self.console, "isatty") and self.console.isatty() and "NO_COLOR" not in os.environ
            plain = structlog.dev.plain_traceback
            self.renderer = structlog.dev.ConsoleRenderer(colors=colors, pad_event_to=24, exception_formatter=plain)

    def write(self, fields: EventDict, is_event: bool) -> None:
        if self.role_file is not None or self.events_file is not None:
            line = to_json(fields)
            if self.role_file is not None:
                self.role_file.write(line)
            if is_event and self.events_file is not None:
                self.events_file.write(line)
        if self.console is not None and self.renderer is not None:
            self._print(fields)

    def close(self) -> None:
        for file in (self.role_file, self.events_file):
            if file is not None:
                file.close()

    def _print(self, fields: EventDict) -> None:
        """For people: local time, no run id, and of an exception its last line only (the file has it all)."""
        shown = {key: value for key, value in fields.items() if key not in {"run_id", "role", "time_s", "exception"}}
        shown["timestamp"] = time.strftime("%H:%M:%S", time.localtime(fields["time_s"]))
        if "exception" in fields:
            shown["error"] = str(fields["exception"]).rstrip().rpartition("\n")[2]
        assert self.renderer is not None
        with suppress(OSError):  # the console may be a file on a full disk
            print(self.renderer(None, "", shown), file=self.console)


@dataclass(slots=True)
class _Current:
    value: _Outputs = field(default_factory=lambda: _Outputs(None, None, None))


_OUTPUTS = _Current()

_Processor: TypeAlias = Callable[[WrappedLogger, str, EventDict], EventDict]


def _install(level: int, bound: Mapping[str, str], outputs: _Outputs, now: Callable[[], float]) -> None:
    previous, _OUTPUTS.value = _OUTPUTS.value, outputs
    previous.close()

    def finish(_logger: WrappedLogger, method: str, fields: EventDict) -> EventDict:
        name = fields.pop("event")
        is_event = isinstance(name, Event)
        head: MutableMapping[str, Any] = {"time_s": round(now(), 6), "level": method, "event": str(name), **bound}
        clean = {key: redact(value, key) for key, value in fields.items()}
        _OUTPUTS.value.write({**head, **clean, "event": redact_url(str(name))}, is_event)
        raise structlog.DropEvent

    processors: Sequence[_Processor] = (structlog.contextvars.merge_contextvars, structlog.processors.format_exc_info, finish)
    structlog.configure(
        processors=list(processors),
        wrapper_class=structlog.make_filtering_bound_logger(level),
        logger_factory=structlog.ReturnLoggerFactory(),
        cache_logger_on_first_use=False,  # a logger made at import must follow a later `configure`
    )


class _Forward(logging.Handler):
    """Python's `logging` into ours."""

    def emit(self, record: logging.LogRecord) -> None:
        method = "error" if record.levelno >= logging.ERROR else "warning" if record.levelno >= logging.WARNING else "info"
        fields: dict[str, Any] = {"logger": record.name}
        if record.exc_info:
            fields["exc_info"] = record.exc_info
        getattr(get_logger(), method)(" ".join(record.getMessage().split()), **fields)


def _join_standard_logging(level: int) -> None:
    root = logging.getLogger()
    for handler in [handler for handler in root.handlers if isinstance(handler, _Forward)]:
        root.removeHandler(handler)
    root.addHandler(_Forward(level=max(level, logging.WARNING)))
    logging.captureWarnings(True)


structlog.configure(
    wrapper_class=structlog.make_filtering_bound_logger(logging.CRITICAL), logger_factory=structlog.ReturnLoggerFactory()
)
