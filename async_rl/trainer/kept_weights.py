"""A copy of the weights of one earlier version: in a pipeline that never waits, most tokens were sampled by such a one."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from async_rl.trainer.policy import PolicyModel


class KeptWeights:
    """This rank's shard of one older version; a float32 copy."""

    def __init__(self) -> None:
        self.version: int | None = None
        self.is_compared = False
        """Whether tokens that it sampled were compared, so that another version may take its place."""
        self._tensors: list[Tensor] = []

    @torch.no_grad()
    def keep(self, policy: PolicyModel, version: int) -> None:
        """Copy the policy as it is now, over what was kept before."""
        live = _local_tensors(policy)
        if not self._tensors:
            self._tensors = [torch.empty_like(tensor) for tensor in live]
        for kept, tensor in zip(self._tensors, live, strict=True):
            kept.copy_(tensor)
        self.version = version
        self.is_compared = False

    @contextmanager
    def in_place(self, policy: PolicyModel) -> Iterator[None]:
        """The policy computes with the kept weights inside the block, and with its own after it, bit for bit."""
        self._swap(policy)
        try:
            yield
        finally:
            self._swap(policy)

    @torch.no_grad()
    def _swap(self, policy: PolicyModel) -> None:
        """Exchange values, one tensor at a time, so that no second copy of the model is made."""
        for kept, tensor in zip(self._tensors, _local_tensors(policy), strict=True):
            other = kept.clone()
            kept.copy_(tensor)
            tensor.copy_(other)


def _local_tensors(policy: PolicyModel) -> list[Tensor]:
    parameters = [parameter.detach() for parameter in policy.hf.parameters()]
    return [tensor.to_local() if isinstance(tensor, DTensor) else tensor for tensor in parameters]
