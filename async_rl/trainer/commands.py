"""Commands of rank 0 to the other ranks: a name and a packed message, broadcast as bytes (no pickle)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

from async_rl.trainer.samples import TrainingSample
from protocol.packing import pack
from protocol.packing import unpack as unpack_message


def send_command(name: str, payload: Mapping[str, Any], device: torch.device) -> None:
    """From rank 0."""
    data = np.frombuffer(pack({"name": name, **_to_plain(payload)}), dtype=np.uint8)
    size = torch.tensor([len(data)], dtype=torch.int64, device=device)
    dist.broadcast(size, 0)
    dist.broadcast(torch.from_numpy(data.copy()).to(device), 0)


def receive_command(device: torch.device) -> tuple[str, Mapping[str, Any]]:
    """On every other rank: name and payload."""
    size = torch.zeros(1, dtype=torch.int64, device=device)
    dist.broadcast(size, 0)
    data = torch.zeros(int(size), dtype=torch.uint8, device=device)
    dist.broadcast(data, 0)
    payload = unpack_message(data.cpu().numpy().tobytes())
    name = payload.pop("name")
    return name, _from_plain(payload)


def _to_plain(payload: Mapping[str, Any]) -> dict[str, Any]:
    if "samples" not in payload:
        return dict(payload)
    return {**payload, "samples": [_sample_to_plain(sample) for sample in payload["samples"]]}


def _from_plain(payload: dict[str, Any]) -> dict[str, Any]:
    if "samples" in payload:
        payload["samples"] = [_sample_from_plain(fields) for fields in payload["samples"]]
    return payload


def _sample_to_plain(sample: TrainingSample) -> list[Any]:
    return [
        sample.token_ids,
        sample.loss_mask.astype(np.uint8),
        sample.behavior_logprobs,
        sample.advantages,
        sample.lags,
        sample.temperature,
        sample.task_id,
        sample.member,
    ]


def _sample_from_plain(fields: Sequence[Any]) -> TrainingSample:
    token_ids, mask, behavior, advantages, lags, temperature, task_id, member = fields
    return TrainingSample(token_ids, mask != 0, behavior, advantages, lags, temperature, task_id, member)
