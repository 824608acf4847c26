"""Checkpoints: all of the trainer's state at one step, complete or not there.

    checkpoints/step_00000050/
        .metadata, __0_0.distcp, …   DCP: parameters, optimizer moments, random state; loads on any number of ranks
        model/                       config and tokenizer of the model, so that a checkpoint exports on its own
        meta.json                    step, and what the caller wants back (log position, counters, …)
        complete.json                size and xxh3 of every other file; written last

A checkpoint is written as step_N.eE.tmp (E: the epoch that writes it), fsynced, marked complete and then renamed. What lacks
the marker, or does not match it, is not a checkpoint: `find_latest` passes over it and says why.
"""

from __future__ import annotations

import json
import os
import shutil
import time
import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import xxhash
from torch import Tensor, nn
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.filesystem import FileSystemReader, FileSystemWriter
from torch.distributed.checkpoint.metadata import TensorStorageMetadata
from torch.distributed.checkpoint.state_dict_loader import load as dcp_load
from torch.distributed.checkpoint.state_dict_saver import save as dcp_save
from torch.optim import AdamW

from async_rl.errors import CheckpointError, EpochFenced
from async_rl.run_dir.layout import fsync_directory
from async_rl.trainer.critic import Critic
from async_rl.trainer.packed_model import persistent_buffers
from async_rl.trainer.policy import PolicyModel
from protocol.messages import Json

FORMAT = 1
META = "meta.json"
COMPLETE = "complete.json"
MODEL_FILES = "model"
HASH_BLOCK_BYTES = 2**22
MODEL, CRITIC = "model.", "critic."


@dataclass(frozen=True, slots=True)
class Checkpoint:
    """A complete checkpoint on disk. meta: what the caller gave to save_checkpoint."""

    path: Path
    step: int
    meta: Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class Skipped:
    """A directory that is no usable checkpoint, and why."""

    path: Path
    reason: str


@dataclass(frozen=True, slots=True)
class Found:
    """The newest complete checkpoint, if any, and the newer ones that were passed over."""

    latest: Checkpoint | None
    skipped: tuple[Skipped, ...]


@dataclass(frozen=True, slots=True)
class CheckpointState:
    """What a rank writes: tensors by flat name (`checkpoint_tensors`), where config and tokenizer lie, and with whom.

    group: ranks that write together, None for a process that writes alone.
    """

    tensors: Mapping[str, Tensor]
    model_source: Path | None
    rank: int
    group: dist.ProcessGroup | None


def save_checkpoint(
    directory: Path,
    policy: PolicyModel,
    optimizer: AdamW,
    *,
    step: int,
    meta: Mapping[str, Json] | None = None,
    critic: Critic | None = None,
) -> Path:
    """Write directory/step_{step}; every rank calls it, and returns when the checkpoint is complete and durable.

    A complete checkpoint of the same step is replaced. On failure nothing of it is left, and older ones are untouched.
    Raises: CheckpointError, on every rank, naming path and bytes, if it cannot be written.
    """
    state = CheckpointState(checkpoint_tensors(policy, optimizer, critic), policy.source, policy.rank, policy.group)
    return write_checkpoint(directory, state, step=step, meta=meta or {})


def write_checkpoint(
    directory: Path,
    state: CheckpointState,
    *,
    step: int,
    meta: Mapping[str, Json],
    epoch: int = 0,
    is_fenced: Callable[[], bool] = lambda: False,
) -> Path:
    """As save_checkpoint, of a state that nobody changes meanwhile. Each epoch writes into a directory of its own.

    Raises: CheckpointError, on every rank; EpochFenced on rank 0 if `is_fenced` once it is written: it never gets its name.
    """
    final = directory / f"step_{step:08d}"
    temporary = directory / f"{final.name}.e{epoch:06d}.tmp"
    first, tensors = state.rank == 0, dict(state.tensors)
    error: OSError | EpochFenced | None = _prepare(temporary, tensors) if first else None
    _agree(state, error, temporary, "cannot be written")
    try:
        writer = FileSystemWriter(temporary, sync_files=True, overwrite=True)
        with _alone_is_fine(state.group):
            dcp_save(tensors, storage_writer=writer, process_group=state.group, no_dist=state.group is None)
    except (OSError, RuntimeError, CheckpointException) as failure:
        # DCP reports one rank's failure to all of them, so every rank comes here.
        if first:
            shutil.rmtree(temporary, ignore_errors=True)
        raise CheckpointError(_failed(temporary, _num_bytes(tensors), failure)) from failure
    error = _finish(temporary, final, state, step, meta, is_fenced) if first else None
    _agree(state, error, temporary, "cannot be completed")
    return final


def load_checkpoint(checkpoint: Checkpoint, policy: PolicyModel, optimizer: AdamW, critic: Critic | None = None) -> None:
    """Load parameters, moments and random state in place, resharded to the ranks of now. Every rank calls it.

    The random state is this rank's own, or rank 0's for a rank that did not exist when it was saved.
    Raises: CheckpointError if the checkpoint's tensors are not those of policy and critic (names or shapes).
    """
    reader = FileSystemReader(checkpoint.path)
    try:
        saved = reader.read_metadata().state_dict_metadata
        state = checkpoint_tensors(policy, optimizer, critic, with_random=False)
        _refuse_other_model(checkpoint.path, state, saved)
        rng_key = f"rng.{policy.rank}" if f"rng.{policy.rank}" in saved else "rng.0"
        state[rng_key] = torch.get_rng_state()
        with torch.no_grad(), _alone_is_fine():
            dcp_load(state, storage_reader=reader, process_group=policy.group, no_dist=policy.group is None)
    except (OSError, RuntimeError, CheckpointException) as failure:
        raise CheckpointError(f"checkpoint {checkpoint.path} cannot be loaded: {_reason(failure)}") from failure
    torch.set_rng_state(state[rng_key])


def find_latest(directory: Path) -> Found:
    """Return the newest checkpoint whose every file has the size and hash of its marker, and the newer ones that do not."""
    skipped: list[Skipped] = []
    for path in sorted(directory.glob("step_*"), key=lambda path: path.name, reverse=True):
        try:
            return Found(open_checkpoint(path), tuple(skipped))
        except CheckpointError as error:
            skipped.append(Skipped(path, str(error)))
    return Found(None, tuple(skipped))


def open_checkpoint(path: Path) -> Checkpoint:
    """Return the checkpoint at `path` after verifying every file.

    Raises: CheckpointError that says what is missing or damaged.
    """
    if path.suffix == ".tmp":
        raise CheckpointError(f"{path} was never completed; its trainer ended while it wrote it")
    try:
        marker = json.loads((path / COMPLETE).read_text())
        files: dict[str, dict[str, Any]] = marker["files"]
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise CheckpointError(f"{path} has no readable {COMPLETE}; it was never completed") from error
    if marker.get("format") != FORMAT:
        raise CheckpointError(f"{path} has format={marker.get('format')!r}, this version reads {FORMAT}")
    for name, expected in files.items():
        file = path / name
        size = file.stat().st_size if file.is_file() else None
        if size != expected["bytes"]:
            what = "is missing" if size is None else f"has {size} bytes"
            raise CheckpointError(f"{file} {what}, {expected['bytes']} were written; the checkpoint is incomplete")
    for name, expected in files.items():
        if file_hash(path / name) != expected["xxh3"]:
            raise CheckpointError(f"{path / name} does not match its hash; the checkpoint is damaged")
    meta = json.loads((path / META).read_text())
    return Checkpoint(path=path, step=meta["step"], meta=meta["meta"])


def checkpoint_of_step(directory: Path, step: int) -> Checkpoint:
    """Return the checkpoint of `step`, verified. Raises: CheckpointError that says which there are, or what is wrong."""
    path = directory / f"step_{step:08d}"
    if path.is_dir():
        return open_checkpoint(path)
    there = ", ".join(str(int(found.name.removeprefix("step_"))) for found in reversed(completed(directory)))
    raise CheckpointError(f"{directory} has no checkpoint of step {step}; it has {there or 'none'}")


def completed(directory: Path) -> list[Path]:
    """Directories of checkpoints that were completed, the newest first. Not verified."""
    return sorted((path.parent for path in directory.glob(f"step_*/{COMPLETE}") if path.parent.suffix != ".tmp"), reverse=True)


def prune_checkpoints(directory: Path, *, keep: int, newer_than_s: float = 0.0, now_s: float | None = None) -> list[Path]:
    """Remove completed checkpoints but the newest `keep` and those younger than newer_than_s, and leftovers older than the
    newest. One rank calls it.

    Returns: what was removed.
    """
    now_s = time.time() if now_s is None else now_s
    marked = completed(directory)
    leftovers = [path for path in directory.glob("step_*.tmp") if marked and path.name.partition(".")[0] <= marked[0].name]
    removed = [path for path in marked[keep:] if now_s - (path / COMPLETE).stat().st_mtime > newer_than_s] + leftovers
    for path in removed:
        (path / COMPLETE).unlink(missing_ok=True)  # first: a half-removed checkpoint must not look complete
        shutil.rmtree(path, ignore_errors=True)
    return removed


def model_state(path: Path, prefix: str = MODEL) -> dict[str, Tensor]:
    """Read a checkpoint's parameters and buffers, whole and float32, by their Hugging Face names (tied ones once).

    prefix: MODEL for the policy, CRITIC + MODEL for the critic (nothing without one).
    """
    reader = FileSystemReader(path)
    saved = reader.read_metadata().state_dict_metadata
    state = {
        name: torch.empty(entry.size, dtype=entry.properties.dtype)
        for name, entry in saved.items()
        if name.startswith(prefix) and isinstance(entry, TensorStorageMetadata)
    }
    with _alone_is_fine():
        dcp_load(dict(state), storage_reader=reader, no_dist=True)
    return {name.removeprefix(prefix): tensor for name, tensor in state.items()}


@contextmanager
def _alone_is_fine(group: dist.ProcessGroup | None = None) -> Iterator[None]:
    """DCP warns that a single process saves alone; that is what a single process is for. With a group it does not."""
    if group is not None:  # catching warnings is not for threads
        yield
        return
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="torch.distributed is disabled", category=UserWarning)
        yield


def checkpoint_tensors(
    policy: PolicyModel, optimizer: AdamW, critic: Critic | None = None, *, with_random: bool = True
) -> dict[str, Tensor]:
    """Every live tensor under a flat name: `model.<name>`, `optimizer.<name>.<moment>`, `rng.<rank>`, and the critic's likewise
    behind `critic.`."""
    state = _trained_tensors("", policy.hf, optimizer)
    if critic is not None:
        state.update(_trained_tensors(CRITIC, critic.model, critic.optimizer))
    if with_random:
        state[f"rng.{policy.rank}"] = torch.get_rng_state()
    return state


def _trained_tensors(prefix: str, module: nn.Module, optimizer: AdamW) -> dict[str, Tensor]:
    state: dict[str, Tensor] = {}
    for name, parameter in module.named_parameters():
        state[f"{prefix}{MODEL}{name}"] = parameter.detach()
        for key, value in _moments(optimizer, parameter).items():
            state[f"{prefix}optimizer.{name}.{key}"] = value
    state.update((f"{prefix}{MODEL}{name}", buffer) for name, buffer in persistent_buffers(module))
    return state


def _moments(optimizer: AdamW, parameter: torch.nn.Parameter) -> dict[str, Tensor]:
    """AdamW's state of a parameter, made as AdamW makes it if it has not stepped yet."""
    state = optimizer.state[parameter]
    if not state:
        state["step"] = torch.zeros((), dtype=torch.float32, device=parameter.device)
        state["exp_avg"] = torch.zeros_like(parameter, memory_format=torch.preserve_format)
        state["exp_avg_sq"] = torch.zeros_like(parameter, memory_format=torch.preserve_format)
    return dict(state)


def _refuse_other_model(path: Path, state: Mapping[str, Tensor], saved: Mapping[str, Any]) -> None:
    names = {name for name in saved if not name.startswith("rng.")}
    has_critic, wants_critic = (any(name.startswith(CRITIC) for name in given) for given in (names, state))
    if has_critic != wants_critic:
        what = "has a critic, which this run has not" if has_critic else "has no critic, which algorithm.advantage='gae' trains"
        raise CheckpointError(f"checkpoint {path} {what}; set algorithm.advantage as that run did, or start a new run")
    if names != set(state):
        example = sorted(names ^ set(state))[0]
        raise CheckpointError(f"checkpoint {path} is of another model or optimizer (e.g. {example}); start a new run from it")
    for name, tensor in state.items():
        if tuple(saved[name].size) != tuple(tensor.shape):
            raise CheckpointError(f"checkpoint {path}: {name} is {tuple(saved[name].size)}, the model's {tuple(tensor.shape)}")


def _prepare(temporary: Path, state: Mapping[str, Tensor]) -> OSError | None:
    needed = _num_bytes(state)
    try:
        shutil.rmtree(temporary, ignore_errors=True)
        temporary.mkdir(parents=True)
        free = shutil.disk_usage(temporary).free
        if free < needed:
            temporary.rmdir()
            return OSError(f"{needed} bytes are needed, {free} are free")
    except OSError as error:
        return error
    return None


def _finish(
    temporary: Path,
    final: Path,
    state: CheckpointState,
    step: int,
    meta: Mapping[str, Json],
    is_fenced: Callable[[], bool],
) -> OSError | EpochFenced | None:
    """Add meta and model files, make everything durable, mark it complete, rename it into place."""
    try:
        if state.model_source is not None:
            _copy_model_files(state.model_source, temporary / MODEL_FILES)
        _write(temporary / META, {"step": step, "meta": meta})
        files = sorted(path for path in temporary.rglob("*") if path.is_file())
        marker = {str(path.relative_to(temporary)): {"bytes": path.stat().st_size, "xxh3": file_hash(path)} for path in files}
        for path in [*files, *(path for path in temporary.rglob("*") if path.is_dir()), temporary]:
            fsync_directory(path)  # opens read-only and fsyncs: right for files too
        _write(temporary / COMPLETE, {"format": FORMAT, "files": marker})
        fsync_directory(temporary)
        if is_fenced():
            shutil.rmtree(temporary, ignore_errors=True)
            return EpochFenced(f"checkpoint {final} is not ours to write any more: a newer trainer has started; this one stops")
        if final.exists():
            (final / COMPLETE).unlink(missing_ok=True)
            shutil.rmtree(final)
        temporary.replace(final)
        fsync_directory(final.parent)
    except OSError as error:
        shutil.rmtree(temporary, ignore_errors=True)
        return error
    return None


def _copy_model_files(source: Path, target: Path) -> None:
    """Config and tokenizer: everything small and textual, no weights."""
    target.mkdir()
    for path in source.iterdir():
        if path.suffix in {".json", ".txt", ".model", ".jinja"} and not path.name.endswith(".index.json"):
            shutil.copyfile(path, target / path.name)


def _write(path: Path, content: Mapping[str, Any]) -> None:
    with path.open("w") as file:
        json.dump(content, file, indent=1)
        file.flush()
        os.fsync(file.fileno())


def file_hash(path: Path) -> str:
    """xxh3-64 of a file's bytes, as the marker has it."""
    digest = xxhash.xxh3_64()
    with path.open("rb") as file:
        for block in _blocks(file):
            digest.update(block)
    return str(digest.hexdigest())


def _blocks(file: Any) -> Iterator[bytes]:
    while block := file.read(HASH_BLOCK_BYTES):
        yield block


def _num_bytes(state: Mapping[str, Tensor]) -> int:
    return sum(tensor.numel() * tensor.element_size() for tensor in state.values())


def _agree(state: CheckpointState, error: OSError | EpochFenced | None, path: Path, what: str) -> None:
    """Wait for rank 0 and fail on every rank if it failed."""
    if state.group is not None:
        failed = torch.tensor([0 if error is None else 1])
        dist.all_reduce(failed, op=dist.ReduceOp.MAX, group=state.group)
        if error is None and int(failed):
            raise CheckpointError(f"checkpoint {path} {what}; rank 0 says why")
    if isinstance(error, EpochFenced):
        raise error
    if error is not None:
        raise CheckpointError(f"checkpoint {path} {what}: {_reason(error)}; free space or name another run_dir") from error


def _failed(path: Path, needed: int, failure: BaseException) -> str:
    free = shutil.disk_usage(path.parent).free
    return f"checkpoint {path} cannot be written ({needed} bytes needed, {free} free): {_reason(failure)}"


def _reason(failure: BaseException) -> str:
    if isinstance(failure, CheckpointException):  # one cause per rank; its own text is a traceback
        failure = next(iter(failure.failures.values()))[0]
    if isinstance(failure, OSError) and failure.strerror:
        return failure.strerror
    lines = str(failure).strip().splitlines()
    return lines[0] if lines else type(failure).__name__
