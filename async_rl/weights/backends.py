"""How bytes get from the publisher to the receivers. One sender and one receiver class per `weights.backend`."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Protocol

import torch

from async_rl.config.trainer import WeightsConfig
from async_rl.registry.versions import PushPlan
from async_rl.weights.collective_backend import CollectiveReceiver, CollectiveSender
from async_rl.weights.disk_backend import DiskReceiver, DiskSender
from async_rl.weights.manifest import Manifest
from async_rl.weights.send_buffer import SendBuffer
from async_rl.weights.shm_backend import ShmReceiver, ShmSender
from async_rl.weights.transports import GLOO, NCCL


class Sender(Protocol):
    """The publisher's end. Methods block (call them in a thread) and raise WeightPushError."""

    @property
    def address(self) -> str:
        """What receivers connect to, or empty."""
        ...

    def prepare(self, manifest: Manifest, buffer: SendBuffer) -> Manifest:
        """Before the version is announced; returns the manifest to announce."""
        ...

    def send(self, plan: PushPlan, buffer: SendBuffer) -> None:
        """All participants are ready: move the bytes."""
        ...

    def forget(self, kept: frozenset[int]) -> None:
        """Only these versions may still be asked for."""
        ...

    def reset(self) -> None:
        """The last send failed: keep nothing of its group."""
        ...

    def close(self) -> None: ...


class Receiver(Protocol):
    """The engine's end. Methods block (call them in a thread) and raise WeightPushError."""

    def receive(self, plan: PushPlan, engine_id: str, manifest: Manifest) -> Mapping[str, torch.Tensor]:
        """All participants are ready: get the bytes. The tensors are valid until the next receive.

        Raises: ManifestMismatch if this engine can never have them; WeightPushError if the transport broke, for everybody.
        """
        ...

    def reset(self) -> None:
        """The last receive failed: keep nothing of its group."""
        ...

    def close(self) -> None: ...


def make_sender(config: WeightsConfig, weights_dir: Path) -> Sender:
    """The sender that `weights.backend` names."""
    match config.backend:
        case "gloo":
            return CollectiveSender(host=config.host, timeout_s=config.deadline_s / 4, transport=GLOO)
        case "nccl":
            return CollectiveSender(host=config.host, timeout_s=config.deadline_s / 4, transport=NCCL)
        case "shm":
            return ShmSender()
        case "disk":
            return DiskSender(weights_dir)


def make_receiver(config: WeightsConfig) -> Receiver:
    """The receiver that `weights.backend` names."""
    match config.backend:
        case "gloo":
            return CollectiveReceiver(timeout_s=config.deadline_s / 4, transport=GLOO)
        case "nccl":
            return CollectiveReceiver(timeout_s=config.deadline_s / 4, transport=NCCL)
        case "shm":
            return ShmReceiver()
        case "disk":
            return DiskReceiver()
