"""Checkpoints beside training: copy the state at one step, then write the copy from a thread while the next steps run.

Every rank copies and writes its own share; the ranks agree over a process group of their own, so that their messages never
mix with those of the steps. At most one checkpoint is on its way.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping
from concurrent.futures import Future
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor
from torch.optim import AdamW

from async_rl.errors import CheckpointError, DeadlineExceeded, EpochFenced
from async_rl.trainer.checkpoint import CheckpointState, checkpoint_tensors, write_checkpoint
from async_rl.trainer.critic import Critic
from async_rl.trainer.memory import give_back
from async_rl.trainer.policy import PolicyModel
from protocol.messages import Json


@dataclass(frozen=True, slots=True)
class WriteRequest:
    """What a checkpoint says beside its tensors, and who may write it.

    epoch: the incarnation that writes; no two write into one directory. is_fenced: whether a newer one has begun (asked on
    rank 0 before the checkpoint gets its name).
    """

    step: int
    meta: Mapping[str, Json]
    epoch: int
    is_fenced: Callable[[], bool]


class CheckpointWriter:
    """One rank's writer. Every rank makes one, and calls `start` for the same checkpoints."""

    def __init__(
        self,
        directory: Path,
        policy: PolicyModel,
        optimizer: AdamW,
        *,
        critic: Critic | None = None,
        timeout_s: float = 600.0,
    ) -> None:
        self._directory = directory
        self._policy = policy
        self._optimizer = optimizer
        self._critic = critic
        self._timeout_s = timeout_s
        self._group: dist.ProcessGroup | None = None
        self._mesh: DeviceMesh | None = None
        if dist.is_initialized():
            self._group = dist.new_group(backend="gloo", timeout=timedelta(seconds=timeout_s))
            shape = (dist.get_world_size(),) if policy.mesh is None else tuple(policy.mesh.shape)
            self._mesh = init_device_mesh("cpu", shape)  # of the copies, which lie in host memory
        self._copies: dict[str, Tensor] = {}
        self._thread: threading.Thread | None = None

    def start(self, request: WriteRequest) -> Future[Path]:
        """Copy the state as it is now, and write it in the background. The future brings the path, or why there is none.

        Raises: CheckpointError if the one before is still being written.
        """
        if self._thread is not None and self._thread.is_alive():
            self._thread.join(timeout=1.0)  # rank 0 knows that it ended; another rank may be a moment behind
            if self._thread.is_alive():
                raise CheckpointError(f"{self._directory}: a checkpoint is still being written; at most one is on its way")
        state = self._copy()
        done: Future[Path] = Future()
        # A daemon: a trainer that ends with an error does not wait for its checkpoint, which then never gets its name.
        self._thread = threading.Thread(target=self._write, args=(state, request, done), name="checkpoint", daemon=True)
        self._thread.start()
        return done

    def wait(self) -> None:
        """Wait until nothing is on its way. Raises: DeadlineExceeded if it takes too long."""
        if self._thread is not None:
            self._thread.join(self._timeout_s)
            if self._thread.is_alive():
                raise DeadlineExceeded(f"{self._directory}: waited {self._timeout_s:g} s for a checkpoint to be written")

    def _write(self, state: CheckpointState, request: WriteRequest, done: Future[Path]) -> None:
        done.set_running_or_notify_cancel()  # from here on a loop that ends cannot take the future away
        try:
            path = write_checkpoint(
                self._directory,
                state,
                step=request.step,
                meta=request.meta,
                epoch=request.epoch,
                is_fenced=request.is_fenced,
            )
        except (CheckpointError, EpochFenced) as error:
            done.set_exception(error)
        except BaseException as error:  # said as any failure: the intake log has what is missing
            done.set_exception(_unforeseen(request, error))
        else:
            done.set_result(path)
        finally:
            give_back()

    def _copy(self) -> CheckpointState:
        live = checkpoint_tensors(self._policy, self._optimizer, self._critic)
        with torch.no_grad():
            tensors = {name: self._copy_of(name, tensor) for name, tensor in live.items()}
        return CheckpointState(tensors, self._policy.source, self._policy.rank, self._group)

    def _copy_of(self, name: str, tensor: Tensor) -> Tensor:
        """A copy in host memory that is used again for the next checkpoint; of a sharded tensor, this rank's shard."""
        local = tensor.to_local() if isinstance(tensor, DTensor) else tensor
        kept = self._copies.get(name)
        if kept is None or kept.shape != local.shape or kept.dtype != local.dtype:
            kept = self._copies[name] = torch.empty(local.shape, dtype=local.dtype, device="cpu")
        kept.copy_(local)
        if not isinstance(tensor, DTensor):
            return kept
        assert self._mesh is not None
        whole: Tensor = DTensor.from_local(
            kept, self._mesh, tensor.placements, run_check=False, shape=tensor.shape, stride=tensor.stride()
        )
        return whole


def _unforeseen(request: WriteRequest, error: BaseException) -> CheckpointError:
    failure = CheckpointError(f"checkpoint of step {request.step}: its writer failed: {type(error).__name__}: {error}")
    failure.__cause__ = error
    return failure
