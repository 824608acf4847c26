"""The critic's model: the trunk of a causal LM with a head of one number, over packed tokens, sharded by FSDP2.

The value at position t is that of what stands before token t, as the logprob at t is: both come from the hidden state of the
token before, in its sequence.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.nn import functional

from async_rl.model.attention import PackedSegments, packed_segments
from async_rl.trainer.packed_model import PackedModel, persistent_buffers
from async_rl.trainer.packing import MicroBatch
from async_rl.trainer.policy import PolicyModel, PolicyOptions, load_policy
from async_rl.trainer.sharding import decoder_layers, full_tensor


class ValueModel(PackedModel):
    """Values of packed tokens. The head begins at 0, and with it every value: a critic that knows nothing yet."""

    def __init__(self, policy: PolicyModel) -> None:
        """Take over the trunk of a policy that is not sharded; its output layer is left behind."""
        super().__init__(dtype=policy.dtype, cpu_offload=policy.cpu_offload)
        self.source = policy.source
        self.trunk: nn.Module = policy.hf.base_model
        self.head = nn.Linear(policy.hf.config.hidden_size, 1)
        for parameter in self.head.parameters():
            nn.init.zeros_(parameter)
        self.eval()  # no dropout, as in the policy

    def forward(self, token_ids: Tensor, position_ids: Tensor, segments: PackedSegments, rows: Tensor) -> Tensor:
        """Return the value before token t at each t in rows, 0 elsewhere: [T], float32 (float64 for a float64 trunk).

        token_ids, position_ids int64 [T]; rows int64 [N], none of them a sequence's first token. The head's product is at least
        float32 whatever the trunk's dtype.
        """
        hidden = self.trunk(
            input_ids=token_ids[None], position_ids=position_ids[None], use_cache=False, packed_segments=segments
        ).last_hidden_state[0]
        before = hidden.index_select(0, segments.previous[rows])
        dtype = torch.promote_types(before.dtype, torch.float32)
        values = functional.linear(before.to(dtype), self.head.weight.to(dtype), self.head.bias.to(dtype))[:, 0]
        return values.new_zeros(len(token_ids)).index_copy(0, rows, values)

    def values(self, micro_batch: MicroBatch) -> Tensor:
        """Return [T] values where the micro-batch trains and 0 elsewhere. One that trains nothing runs all the same, and its
        backward pass too."""
        device = self.device
        rows = micro_batch.loss_mask.nonzero()[:, 0]
        segments = packed_segments(micro_batch.cu_seqlens, device, parents=micro_batch.parents)
        values: Tensor = self(micro_batch.token_ids.to(device), micro_batch.position_ids.to(device), segments, rows.to(device))
        if not torch.is_grad_enabled():
            self.reshard_all()
        return values

    def named_full_tensors(self) -> Iterator[tuple[str, Tensor]]:
        """Yield every tensor that a checkpoint keeps once, whole, float32. Every rank must iterate to the end."""
        for name, parameter in self.named_parameters():
            yield name, full_tensor(parameter.detach())
        for name, buffer in persistent_buffers(self):
            yield name, full_tensor(buffer)


def load_value_model(path: Path, *, options: PolicyOptions, mesh: DeviceMesh | None = None) -> ValueModel:
    """Load a model directory's trunk, verified as a policy is, put a head on it, and shard it over `mesh`.

    Raises: as load_policy.
    """
    whole = load_policy(path, options=replace(options, measure_rounding=False, canary_dtype=None))
    model = ValueModel(whole)
    model.place(decoder_layers(whole.hf), mesh)
    return model
