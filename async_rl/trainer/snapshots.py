"""Snapshots of the policy for pushes: what every rank does, so that training can go on beside the push."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from async_rl.config.run import RunConfig
from async_rl.errors import ManifestMismatch, WeightPushError
from async_rl.run_dir.layout import open_run
from async_rl.trainer.distributed import Ranks
from async_rl.trainer.policy import PolicyModel
from async_rl.weights.send_buffer import SendBuffer, SendBufferPool, lay_out
from async_rl.weights.shm_segment import SegmentMemory, SegmentReader


class Snapshots:
    """One rank's part. Rank 0 makes a `request`; every rank does it (`do`), and rank 0 has the buffer then.

    With weights.backend = shm each rank writes its own shards into a segment that rank 0 made, and nothing is gathered. Else
    every tensor is gathered, one at a time, and rank 0 copies it into its send buffer.
    """

    def __init__(self, config: RunConfig, policy: PolicyModel, ranks: Ranks) -> None:
        self._config = config
        self._policy = policy
        self._ranks = ranks
        self._shared = config.weights.backend == "shm"
        self._pool: SendBufferPool | None = None
        self._segments = SegmentReader(write=True)
        self._taken: SendBuffer | None = None

    def request(self) -> Mapping[str, Any]:
        """Take a buffer for the next snapshot. Raises: ConfigError if there is no memory for one."""
        if self._pool is None:
            self._pool = self._make_pool()
        self._taken = self._pool.take(self._policy.weight_specs(), ties=self._policy.ties())
        return {"path": self._taken.location}

    def do(self, payload: Mapping[str, Any]) -> SendBuffer | None:
        """Raises: WeightPushError, on every rank, if one of them cannot write its share."""
        buffer, self._taken = self._taken, None
        if self._shared:
            self._write_own(buffer, payload["path"])
        elif buffer is not None:
            buffer.fill(self._policy.named_full_tensors())
        else:  # the collectives need every rank
            for _name, _tensor in self._policy.named_full_tensors():
                pass
        return buffer

    def close(self) -> None:
        """Remove the shared memory."""
        self._segments.close()
        if self._pool is not None:
            self._pool.close()

    def _make_pool(self) -> SendBufferPool:
        weights = self._config.weights
        memory = None
        if self._shared:
            _, identity = open_run(Path(self._config.run_dir))
            memory = SegmentMemory(weights.shm_dir, identity.run_id)
        return SendBufferPool(weights.wire_dtype, weights.bucket_bytes, memory)

    def _write_own(self, buffer: SendBuffer | None, path: str) -> None:
        failure: ManifestMismatch | None = None
        try:
            (buffer or self._mapped(path)).fill_shards(self._policy.named_shards())
        except ManifestMismatch as error:
            failure = error
        if self._policy.group is not None:  # also the sign that all have written
            failed = torch.tensor([int(failure is not None)], device=self._policy.device)
            dist.all_reduce(failed, op=dist.ReduceOp.MAX, group=self._policy.group)
            if failure is None and int(failed):
                raise WeightPushError("another rank of the trainer cannot write its share of a push; it says why")
        if failure is not None:
            raise WeightPushError(f"rank {self._ranks.rank}: {failure}") from failure

    def _mapped(self, path: str) -> SendBuffer:
        weights = self._config.weights
        slots, sizes = lay_out(self._policy.weight_specs(), weights.wire_dtype, weights.bucket_bytes)
        return SendBuffer(slots, self._segments.buckets(path, sizes), ())
