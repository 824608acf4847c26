"""A model over packed tokens, whole or sharded by FSDP2: what the policy and the critic have in common."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule

from async_rl.trainer.sharding import shard


class PackedModel(nn.Module):
    """FSDP's root: it holds what no decoder layer does; each decoder layer is a group of its own."""

    def __init__(self, *, dtype: torch.dtype, cpu_offload: bool) -> None:
        """dtype: of forward and backward pass. cpu_offload: sharded parameters and their state stay in host memory."""
        super().__init__()
        self.dtype = dtype
        self.cpu_offload = cpu_offload
        self.mesh: DeviceMesh | None = None
        self.source: Path | None = None
        """Directory that the model came from: the policy's config and tokenizer go into checkpoints."""

    @property
    def group(self) -> dist.ProcessGroup | None:
        """The ranks that shard this model; None if it is not sharded, or by one rank."""
        return dist.group.WORLD if self.mesh is not None and self.mesh.size() > 1 else None

    @property
    def rank(self) -> int:
        """This process among the ranks that shard the model."""
        return 0 if self.mesh is None else self.mesh.get_rank()

    @property
    def num_ranks(self) -> int:
        """Ranks over which FSDP averages gradients."""
        return 1 if self.mesh is None else self.mesh.size()

    @property
    def device(self) -> torch.device:
        """Where it computes; its parameters may lie elsewhere."""
        if self.mesh is None:
            return next(self.parameters()).device
        is_cuda = self.mesh.device_type == "cuda"
        return torch.device("cuda", torch.cuda.current_device()) if is_cuda else torch.device(self.mesh.device_type)

    def place(self, layers: Sequence[nn.Module], mesh: DeviceMesh | None) -> None:
        """Move the model to the mesh's device, and cut it over the mesh if there is something to cut.

        Without a mesh, or with one rank that computes in float32, there is not: the plain model trains the same numbers
        without FSDP's copies (a fifth of a small model's step).
        """
        if mesh is None:
            return
        if not self.cpu_offload:
            self.to(mesh.device_type)
        if mesh.size() > 1 or self.dtype is not torch.float32 or self.cpu_offload:
            self.shard(layers, mesh)

    def shard(self, layers: Sequence[nn.Module], mesh: DeviceMesh) -> None:
        """Cut the model over `mesh` in place, as `dtype` and `cpu_offload` say (see sharding.shard)."""
        shard(self, layers, mesh, dtype=self.dtype, cpu_offload=self.cpu_offload)
        self.mesh = mesh

    def reshard_all(self) -> None:
        """Put sharded float32 parameters back in place, after a forward pass that no backward follows.

        FSDP keeps the root's gathered parameters, in the compute dtype, from a forward to its backward pass. Whoever reads the
        parameters next would read those.
        """
        for module in self.modules():
            if isinstance(module, FSDPModule):
                module.reshard()


def persistent_buffers(root: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """Yield the buffers of `root` that belong to its state dict, each once."""
    for prefix, module in root.named_modules():
        for name, buffer in module.named_buffers(prefix, recurse=False):
            if name.rpartition(".")[2] not in module._non_persistent_buffers_set:
                yield name, buffer
