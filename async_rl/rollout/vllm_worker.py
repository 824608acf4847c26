"""What runs in vLLM's ranks: loads staged weights into a live model, through vLLM's weight-transfer and layerwise-reload APIs.

Sources: vllm/distributed/weight_transfer/base.py, vllm/model_executor/model_loader/reload (vLLM 0.32).
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from vllm.distributed.weight_transfer.base import WeightTransferEngine, WeightTransferInitInfo, WeightTransferUpdateInfo
from vllm.model_executor.model_loader.reload import finalize_layerwise_reload, initialize_layerwise_reload

from async_rl.weights.manifest import WIRE_DTYPES, tensor_digest


@dataclass
class StagedInit(WeightTransferInitInfo):
    """refresh_tied_heads: rebuild what a CPU keeps of a tied head (off only to show that a proof finds it stale)."""

    refresh_tied_heads: bool = True


@dataclass
class StagedUpdate(WeightTransferUpdateInfo):
    """All weights of a push, in a file that this host's processes share (vllm_staging.StagingFile).

    entries: (name, wire dtype, shape, offset in bytes) each.
    """

    path: str
    num_bytes: int
    entries: list[list[Any]]


class StagedWeights(WeightTransferEngine[StagedInit, StagedUpdate]):
    """One rank's end of a push. `load_weights` takes full tensors by Hugging Face names, and keeps this rank's shards."""

    init_info_cls = StagedInit
    update_info_cls = StagedUpdate
    supports_draft_weight_update = False

    def __init__(self, *arguments: Any) -> None:
        super().__init__(*arguments)
        self._refresh_tied_heads = True
        self._mapped: tuple[str, torch.Tensor] | None = None
        self.digests: dict[str, str] = {}

    def init_transfer_engine(self, init_info: StagedInit) -> None:
        self._refresh_tied_heads = init_info.refresh_tied_heads

    def start_weight_update(self) -> None:
        initialize_layerwise_reload(self.model)  # bare load_weights fails where kernels keep packed or quantized weights

    def update_weights(self, update_info: dict[str, Any]) -> None:
        """As the base class, without waiting for an accelerator that may not be there."""
        self.receive_weights(self.parse_update_info(update_info))
        if self.device.type != "cpu":
            torch.accelerator.synchronize()

    def receive_weights(self, update_info: StagedUpdate) -> None:
        memory = self._map(update_info.path, update_info.num_bytes)
        self.digests = {name: tensor_digest(tensor) for name, tensor in _tensors(memory, update_info)}
        self.model.load_weights(_tensors(memory, update_info))

    def finish_weight_update(self) -> None:
        finalize_layerwise_reload(self.model, self.model_config)
        if self._refresh_tied_heads and self.device.type == "cpu":
            refresh_tied_heads(self.model)

    def shutdown(self) -> None:
        self._mapped = None

    def _map(self, path: str, num_bytes: int) -> torch.Tensor:
        """The file is mapped once; its name may be gone at the next push."""
        if self._mapped is None or self._mapped[0] != path:
            self._mapped = None
            if Path(path).stat().st_size != num_bytes:  # from_file would make a file that is missing, full of zeros
                raise ValueError(f"{path} has not {num_bytes} bytes")
            self._mapped = (path, torch.from_file(path, shared=True, size=num_bytes, dtype=torch.uint8))
        return self._mapped[1]


class WorkerExtension:
    """Methods of ours on vLLM's worker class (`worker_extension_cls`)."""

    weight_transfer_engine: StagedWeights

    def async_rl_digests(self) -> dict[str, str]:
        """Digest of every tensor of the last update, by name, as this rank read it."""
        return self.weight_transfer_engine.digests


def refresh_tied_heads(model: torch.nn.Module) -> None:
    """Pack tied heads again: on a CPU an embedding that is also the head keeps a packed copy for that, which a layerwise reload
    leaves as it was. Logprobs would be those of the old head on the new body."""
    from vllm.model_executor.layers.utils import dispatch_cpu_unquantized_gemm
    from vllm.model_executor.layers.vocab_parallel_embedding import VocabParallelEmbedding

    for module in model.modules():
        if isinstance(module, VocabParallelEmbedding) and hasattr(module, "cpu_linear") and module.weight.numel():
            dispatch_cpu_unquantized_gemm(module, remove_weight=False)


def _tensors(memory: torch.Tensor, update: StagedUpdate) -> Iterator[tuple[str, torch.Tensor]]:
    for name, dtype, shape, offset in update.entries:
        size = torch.Size(shape).numel() * WIRE_DTYPES[dtype].itemsize
        yield name, memory[offset : offset + size].view(WIRE_DTYPES[dtype]).view(shape)
