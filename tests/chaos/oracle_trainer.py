"""Trainers of the oracle: real trainer processes, forked from a parent that has imported everything once.

A line each on stdin: `start WORLD_SIZE PORT RUN_DIR` (answers a pid per rank), `poll PID` (`none` or an exit code, negative for
a signal), `wait PID`. A forked child is a trainer like any other from `workers.trainer.run` on; what it does not do again is
start an interpreter and import torch. Its writes to the intake log are short ones, as a kernel may make them, so that a kill
can leave part of a record.
"""

from __future__ import annotations

import os
import sys
import traceback
from pathlib import Path
from typing import Any

import transformers.models.llama.modeling_llama  # noqa: F401 (loaded lazily otherwise, by every child)
from oracle_marks import Marks, Phase, marked

from async_rl import logs
from async_rl.config import load_config
from async_rl.run_dir import intake_log
from async_rl.run_dir.layout import RunLayout, open_run
from async_rl.trainer import checkpoint, checkpoint_writer
from async_rl.trainer.checkpoints import Checkpoints
from async_rl.trainer.intake import Intake
from async_rl.trainer.learner import Learner
from async_rl.trainer.loop import TrainerLoop
from protocol.redis_streams import RedisStreams
from workers import trainer
from workers.arguments import RoleArguments, main_cause

SHORT_WRITE_BYTES = 512


def main() -> None:
    print("ready", flush=True)
    for line in sys.stdin:
        name, argument, *more = line.rstrip("\n").split(" ", 3)
        if name == "start":
            port, run_dir = more
            print(*(_fork(Path(run_dir), rank, int(argument), port) for rank in range(int(argument))), flush=True)
        else:
            found, status = os.waitpid(int(argument), os.WNOHANG if name == "poll" else 0)
            print("none" if found == 0 else os.waitstatus_to_exitcode(status), flush=True)


def _fork(run_dir: Path, rank: int, world_size: int, port: str) -> int:
    pid = os.fork()
    if pid == 0:
        _trainer(run_dir, rank, world_size, port)
    return pid


def _trainer(run_dir: Path, rank: int, world_size: int, port: str) -> None:
    """Be a trainer's rank, then end this process: 0, or 1 and the error's class as its last word on stderr."""
    code = 1
    try:
        os.setpgid(0, 0)
        os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
        os.dup2(os.open(run_dir / "stderr.txt", os.O_WRONLY | os.O_APPEND | os.O_CREAT), 2)
        os.dup2(2, 1)
        if world_size > 1:
            torchrun = {"RANK": rank, "WORLD_SIZE": world_size, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
            os.environ.update({name: str(value) for name, value in torchrun.items()})
        marks = Marks(run_dir / "marks.bin", world_size)
        _wrap(marks, rank)
        _, identity = open_run(run_dir)
        loaded = load_config(RunLayout(run_dir).config_toml, env={})
        worker = f"trainer-{os.getpid()}"
        index = None if world_size == 1 else rank
        logs.configure(role="trainer", worker_id=worker, run_id=identity.run_id, run_dir=run_dir, index=index, console=False)
        marks.enter(rank, Phase.START)
        trainer.run(RoleArguments("trainer", loaded.config, loaded.origins, identity.run_id, worker, rank, False))
        code = 0
    except BaseException as error:
        cause = main_cause(error)
        if type(cause).__name__ != "EpochFenced":
            traceback.print_exception(cause)
        print(f"{os.getpid()} {type(cause).__name__}", file=sys.stderr, flush=True)
    finally:
        os._exit(code)


def _wrap(marks: Marks, rank: int) -> None:
    """Put marks around what a kill is aimed at."""
    marked_methods: list[tuple[Any, str, Phase]] = [
        (RedisStreams, "finish", Phase.ACKNOWLEDGE),
        (intake_log.IntakeLog, "sync", Phase.FSYNC),
        (intake_log.IntakeLog, "append", Phase.APPEND),
        (Intake, "_record", Phase.COMPOSE),
        (checkpoint, "_finish", Phase.COMPLETE),
        (checkpoint_writer.CheckpointWriter, "_copy", Phase.COPY),
        (checkpoint_writer, "write_checkpoint", Phase.WRITE),
        (Checkpoints, "_tidy", Phase.TIDY),
        (Learner, "_do_train", Phase.STEP),
        (Learner, "_do_load", Phase.LOAD),
        (TrainerLoop, "_replay", Phase.REPLAY),
        (TrainerLoop, "_push", Phase.ANNOUNCE),
        (TrainerLoop, "_finish", Phase.END),
    ]
    for owner, name, phase in marked_methods:
        setattr(owner, name, marked(getattr(owner, name), phase, marks, rank))
    for name in ("read_groups", "take_over"):  # an exit is worth a trap if there is something to lose
        setattr(RedisStreams, name, marked(getattr(RedisStreams, name), Phase.READ, marks, rank, counts=bool))
    run = TrainerLoop._run

    async def started(*arguments: Any) -> Any:
        marks.leave(rank, Phase.START)
        return await run(*arguments)

    TrainerLoop._run = started  # type: ignore[method-assign]  # where a start ends
    intake_log.os = _ShortWrites()  # type: ignore[assignment]  # the module that the log writes with


class _ShortWrites:
    """`os`, whose writes take at most SHORT_WRITE_BYTES at a time."""

    def __getattr__(self, name: str) -> Any:
        return getattr(os, name)

    @staticmethod
    def write(descriptor: int, data: bytes | memoryview) -> int:
        return os.write(descriptor, memoryview(data)[:SHORT_WRITE_BYTES])


if __name__ == "__main__":
    main()
