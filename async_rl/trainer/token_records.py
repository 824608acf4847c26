"""What the micro-batches of a step saw of each trained token, gathered from all ranks for the step's off-policy report."""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import Tensor

from async_rl.algorithms.off_policy import OffPolicyReport, off_policy_report
from async_rl.trainer.packing import MicroBatch


class TokenRecords:
    """Log-ratio policy/behavior, sequence and lag of every trained token of this rank."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._rows: list[Tensor] = []  # float64 [3, n] each
        self._sequences = 0

    @torch.no_grad()
    def add(self, micro_batch: MicroBatch, policy_logprobs_T: Tensor) -> None:
        """The micro-batch is on this rank's device."""
        mask = micro_batch.loss_mask
        log_ratios = (policy_logprobs_T.double() - micro_batch.behavior_logprobs)[mask]
        sequences = micro_batch.sequence_ids[mask] + self._sequences
        self._sequences += micro_batch.num_runs
        self._rows.append(torch.stack((log_ratios, sequences.double(), micro_batch.lags[mask].double())))

    def report(self, group: dist.ProcessGroup | None) -> OffPolicyReport:
        """The report over the tokens of all ranks (every rank of `group` calls it, and gets the same)."""
        rows = torch.cat(self._rows, dim=1) if self._rows else torch.zeros(3, 0, dtype=torch.float64, device=self._device)
        if group is not None:
            rows = _gather(rows, group)
        return off_policy_report(rows[0], rows[1].long(), rows[2].long())


def _gather(rows: Tensor, group: dist.ProcessGroup) -> Tensor:
    """Columns of all ranks. Sequence numbers of different ranks are kept apart."""
    count = torch.tensor([rows.shape[1]], device=rows.device)
    counts = [torch.zeros_like(count) for _ in range(group.size())]
    dist.all_gather(counts, count, group=group)
    longest = max(int(c) for c in counts)
    padded = rows.new_zeros(3, longest)
    padded[:, : rows.shape[1]] = rows
    parts = [torch.zeros_like(padded) for _ in range(group.size())]
    dist.all_gather(parts, padded, group=group)
    for rank, part in enumerate(parts):
        part[1] += rank * 2.0**40
    return torch.cat([part[:, : int(c)] for part, c in zip(parts, counts, strict=True)], dim=1)
