"""FSDP2: how a model is cut over ranks, and how parts and wholes are got out of it."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy, OffloadPolicy, fully_shard
from torch.distributed.tensor import DTensor, Replicate, Shard
from transformers import PreTrainedModel

from async_rl.errors import ConfigError


def shard(
    root: nn.Module, layers: Sequence[nn.Module], mesh: DeviceMesh, *, dtype: torch.dtype, cpu_offload: bool = False
) -> None:
    """Apply FSDP2 in place: a group per layer, the rest in the root's group (tied heads stay tied).

    Compute runs in dtype; sharded weights, optimizer state and gradient reduction are float32. Over a mesh of two dimensions
    (replicate, shard) the first holds copies.
    """
    precision = MixedPrecisionPolicy(param_dtype=None if dtype is torch.float32 else dtype, reduce_dtype=torch.float32)
    offload = CPUOffloadPolicy(pin_memory=mesh.device_type == "cuda") if cpu_offload else OffloadPolicy()
    for module in (*layers, root):
        fully_shard(module, mesh=mesh, mp_policy=precision, offload_policy=offload)


def full_tensor(tensor: Tensor) -> Tensor:
    """Gather a sharded tensor (every rank must call it); others are returned as they are."""
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def own_shard(name: str, tensor: DTensor) -> Iterator[tuple[str, Tensor, int]]:
    """Yield this rank's rows of a tensor that FSDP2 sharded along its first dimension (torch.chunk's rule), if it has any and
    no lower rank holds the same ones."""
    coordinate = tensor.device_mesh.get_coordinate()
    assert coordinate is not None
    local = tensor.to_local().detach()
    rows, first = tensor.shape[0] if tensor.dim() else 1, 0
    for placement, size, index in zip(tensor.placements, tensor.device_mesh.shape, coordinate, strict=True):
        if isinstance(placement, Replicate) and index > 0:
            return
        if isinstance(placement, Shard):
            first = min(rows, index * -(-rows // size))
    if local.numel():
        yield name, local, first * (tensor.numel() // rows)


def decoder_layers(hf: PreTrainedModel) -> list[nn.Module]:
    """Return the decoder layers of any causal LM: its one list of config.num_hidden_layers modules.

    Raises: ConfigError if there is none.
    """
    count = hf.config.num_hidden_layers
    lists = [module for module in hf.modules() if isinstance(module, nn.ModuleList) and len(module) == count]
    if not lists:
        raise ConfigError(f"{type(hf).__name__} has no list of {count} decoder layers; it cannot be sharded by layer")
    return list(lists[0])
