"""One run of the oracle: its directory, its server, its trainers, and what can be seen of it from outside."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import socket
import subprocess
import sys
import warnings
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager, suppress
from pathlib import Path
from types import TracebackType
from typing import Any

import torch
import xxhash
from oracle_marks import Marks
from torch import Tensor
from torch.distributed.checkpoint.filesystem import FileSystemReader
from torch.distributed.checkpoint.metadata import TensorStorageMetadata
from torch.distributed.checkpoint.state_dict_loader import load

from async_rl.checks.audit import audit
from async_rl.config import RunConfig, load_config
from async_rl.launch.embedded_redis import EmbeddedRedis
from async_rl.launch.prepare import write_config
from async_rl.registry.redis_registry import RedisRegistry
from async_rl.run_dir.files import read_json_lines
from async_rl.run_dir.intake_log import read_log, task_ends
from async_rl.run_dir.layout import create_run
from async_rl.testing.recorded_stream import GROUP_SIZE, GROUPS_PER_STEP, Feeder, RecordedStream
from async_rl.testing.tiny_models import TinyModel, save_tiny_model
from async_rl.trainer.checkpoint import Checkpoint, completed
from protocol.redis_streams import RedisStreams
from protocol.streams import Stream

HERE = Path(__file__).parent
SETTINGS: Mapping[str, Any] = {
    "rollout.group_size": GROUP_SIZE,
    "trainer.groups_per_step": GROUPS_PER_STEP,
    "trainer.max_steps": 1_000_000,  # the stream's end is the run's
    "trainer.learning_rate": 1e-3,
    "trainer.warmup_steps": 10,
    "trainer.steps_per_batch": 2,
    "trainer.max_tokens_per_micro_batch": 96,
    "trainer.idle_timeout_s": 60,
    "staleness.max_lag": 4,
    "checkpoint.every_steps": 2,
    "checkpoint.keep": 2,
    "weights.deadline_s": 0.2,
    "validation.tokens_per_step": 0,  # no model sampled the recorded stream
    "redis.lease_s": 3.0,
}
"""A run whose every second matters: many checkpoints, several steps to a batch, several passes to a step."""
MANY_SEGMENTS = {"checkpoint.log_segment_bytes": 16384}


class TrainerParent:
    """The process that trainers are forked from: it has imported everything once."""

    def __init__(self) -> None:
        self._process = subprocess.Popen(
            [sys.executable, str(HERE / "oracle_trainer.py")],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env={**os.environ, **dict.fromkeys(("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS"), "1")},
        )

    def __enter__(self) -> TrainerParent:
        assert self._answer() == "ready"
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.kill()  # it holds nothing, and takes its time to end by itself
        self._process.wait()
        self._process.stdin.close()
        self._process.stdout.close()

    def ask(self, line: str) -> str:
        assert self._process.stdin is not None
        self._process.stdin.write(f"{line}\n")
        self._process.stdin.flush()
        return self._answer()

    def _answer(self) -> str:
        assert self._process.stdout is not None
        return self._process.stdout.readline().strip()


class World:
    """A context manager around server and trainers; `feeding()` around the feeder."""

    def __init__(
        self, run_dir: Path, stream: RecordedStream, parent: TrainerParent, *, world_size: int = 1, **chosen: Any
    ) -> None:
        model = run_dir.parent / "model"
        if not model.exists():
            save_tiny_model(model, TinyModel.LLAMA, hidden_size=32, intermediate_size=48, num_hidden_layers=2, head_dim=8)
        self.model = model
        self.world_size = world_size
        self.layout, identity = create_run(run_dir)
        self.run_id = identity.run_id
        self.marks = Marks(run_dir / "marks.bin", world_size)
        self._stream = stream
        self._parent = parent
        self._server = EmbeddedRedis(self.layout.redis_dir)
        self._server.start()
        settings = {"run_dir": run_dir, "model.path": model, "redis.url": self._server.url, **SETTINGS, **chosen}
        settings["trainer.world_size"] = world_size
        self.config: RunConfig = load_config(None, [f"--{key}={value}" for key, value in settings.items()], {}).config
        write_config(self.config, self.layout)
        self._alive: set[int] = set()
        self._ended: dict[int, int] = {}
        self._version = 0
        self._metrics_read = 0  # bytes of the metrics file, to the end of its last whole line

    def __enter__(self) -> World:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        for pid in [*self._alive]:
            self.kill(pid)
        self._server.stop()

    @property
    def checkpoints(self) -> Path:
        return self.layout.checkpoints_dir

    @asynccontextmanager
    async def feeding(self) -> AsyncIterator[Feeder]:
        """Feed beside the block. The connections are of this event loop."""
        streams = RedisStreams(self._server.url, self.run_id)
        feeder = Feeder(streams, self._stream, self.version)
        task = asyncio.create_task(feeder.run())
        try:
            yield feeder
            if task.done():
                task.result()
        finally:
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)
            await streams.close()

    # -- trainers ----------------------------------------------------------------------------------------------------
    def start(self) -> list[int]:
        """A trainer: the pids of its ranks."""
        port = _free_port() if self.world_size > 1 else 0
        pids = [int(pid) for pid in self._parent.ask(f"start {self.world_size} {port} {self.layout.root}").split()]
        self._alive.update(pids)
        return pids

    def exit_code(self, pid: int) -> int | None:
        """None while it runs, negative for a signal."""
        if pid in self._alive and (answer := self._parent.ask(f"poll {pid}")) != "none":
            self._alive.discard(pid)
            self._ended[pid] = int(answer)
        return self._ended.get(pid)

    def kill(self, pid: int) -> None:
        """SIGKILL, and wait until it is dead."""
        if pid in self._alive:
            os.kill(pid, signal.SIGKILL)
            self._ended[pid] = int(self._parent.ask(f"wait {pid}"))
            self._alive.discard(pid)

    def errors(self) -> str:
        path = self.layout.root / "stderr.txt"
        return path.read_text()[-3000:] if path.exists() else "it said nothing"

    def last_word(self, pid: int) -> str:
        """The class of the error that a trainer ended with."""
        words = [line.split() for line in self.errors().splitlines()]
        return next((word[1] for word in reversed(words) if len(word) == 2 and word[0] == str(pid)), "nothing")

    # -- what can be seen --------------------------------------------------------------------------------------------
    def version(self) -> int:
        """The newest policy version that a trainer has reached."""
        path = self.layout.metrics_jsonl
        if path.exists() and path.stat().st_size > self._metrics_read:
            with path.open("rb") as file:
                file.seek(self._metrics_read)
                data = file.read()
            whole = data[: data.rfind(b"\n") + 1]
            self._metrics_read += len(whole)
            for line in whole.splitlines():
                with suppress(ValueError):  # cut short by a kill
                    self._version = max(self._version, int(json.loads(line)["policy_version"]))
        return self._version

    async def left_half_done(self) -> set[str]:
        """Which half-done work a kill has left, as files and queue show it. Several may be true at once."""
        index = read_log(self.layout.intake_dir)
        async with self.connected() as streams:
            outstanding, held = await streams.outstanding(), (await streams.depths())[Stream.GROUPS].pending
        logged = sum(index.knows(task_id) for task_id in outstanding)
        found = {
            "a torn record": any("torn" in warning for warning in index.warnings),
            "groups logged, not acknowledged": logged > 0,
            "groups read, not logged": held > logged,
            "a step recorded, not trained": bool(index.steps) and index.steps[-1].version >= self.version(),
            "an incomplete checkpoint": any(self.checkpoints.glob("*.tmp")),
        }
        return {what for what, holds in found.items() if holds}

    @asynccontextmanager
    async def connected(self) -> AsyncIterator[RedisStreams]:
        streams = RedisStreams(self._server.url, self.run_id)
        try:
            yield streams
        finally:
            await streams.close()

    async def everything(self) -> str:
        """A digest of all that counts: the log (what of it is true), complete checkpoints, queue, registry."""
        index = read_log(self.layout.intake_dir)
        digest = xxhash.xxh3_64()
        for directory in completed(self.checkpoints):
            for path in sorted(directory.rglob("*")):
                digest.update(str(path).encode())
                digest.update(path.read_bytes() if path.is_file() else b"")
        async with self.connected() as streams:
            depths = {name: (depth.length, depth.pending) for name, depth in (await streams.depths()).items()}
            queue = (await streams.counters(), depths)
            registry = RedisRegistry(streams.client, self.run_id)
            state = await registry.state()
            await registry.close()
        log = (sorted(task_ends(index).items()), list(index.groups), index.num_steps)
        digest_of = (xxhash.xxh3_64_hexdigest(repr(part).encode()) for part in (log, state))
        return " ".join([digest.hexdigest(), str(queue), *digest_of])


def ledger_of(world: World) -> dict[str, Any]:
    """The audit of a run that has ended, how every task ended, and the steps of its metrics."""
    found = audit(world.layout.root)
    return {
        "exact": found.is_exact,
        "lost": found.lost,
        "twice": len(found.twice),
        "ends": dict(task_ends(read_log(world.layout.intake_dir))),
        "steps": [int(line["step"]) for line in read_json_lines(world.layout.metrics_jsonl)],
    }


def same_tensors(one: Checkpoint, other: Checkpoint) -> bool:
    """Whether two checkpoints hold the same parameters, moments and step counts, bit for bit."""
    mine, theirs = _tensors(one), _tensors(other)
    return mine.keys() == theirs.keys() and all(torch.equal(mine[name], theirs[name]) for name in mine)


def _tensors(checkpoint: Checkpoint) -> dict[str, Tensor]:
    reader = FileSystemReader(checkpoint.path)
    saved = reader.read_metadata().state_dict_metadata
    state = {
        name: torch.empty(entry.size, dtype=entry.properties.dtype)
        for name, entry in saved.items()
        if isinstance(entry, TensorStorageMetadata) and not name.startswith("rng.")
    }
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)
        load(dict(state), storage_reader=reader, no_dist=True)
    return state


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])
