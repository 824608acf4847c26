"""Weight pushes through files: one safetensors file per version, in a directory that publisher and engines share.

A file appears complete or not at all (written aside, then renamed). The newest two versions are kept, and what may still be
asked for; who has opened an older one can read it to its end, and who comes too late takes the next plan.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open

from async_rl.errors import WeightPushError
from async_rl.registry.versions import PushPlan
from async_rl.weights.manifest import WIRE_DTYPES, Manifest
from async_rl.weights.send_buffer import SendBuffer

FILE_NAME = "model.safetensors"
KEEP = 2

_SAFETENSORS_DTYPES = {
    "float64": "F64",
    "float32": "F32",
    "float16": "F16",
    "bfloat16": "BF16",
    "int64": "I64",
    "int32": "I32",
    "int16": "I16",
    "int8": "I8",
    "uint8": "U8",
    "bool": "BOOL",
}


class DiskSender:
    """Writes versions into `weights_dir`."""

    def __init__(self, weights_dir: Path, *, keep: int = KEEP) -> None:
        self._dir = weights_dir
        self._keep = keep

    @property
    def address(self) -> str:
        return ""

    def prepare(self, manifest: Manifest, buffer: SendBuffer) -> Manifest:
        """Write the version. Raises: WeightPushError."""
        target = self._dir / f"v{manifest.version:08d}-e{manifest.epoch}"
        partial = target.with_name(f".{target.name}.partial")
        try:
            for stale in (partial, target):
                shutil.rmtree(stale, ignore_errors=True)
            partial.mkdir(parents=True)
            write_safetensors(partial / FILE_NAME, buffer, {"version": str(manifest.version), "epoch": str(manifest.epoch)})
            partial.rename(target)
        except OSError as error:
            shutil.rmtree(partial, ignore_errors=True)
            raise WeightPushError(f"cannot write version {manifest.version} to {target}: {error}") from error
        return replace(manifest, path=str(target.resolve()))

    def send(self, plan: PushPlan, buffer: SendBuffer) -> None:
        """The file is there already."""

    def forget(self, kept: frozenset[int]) -> None:
        """Remove what is neither among the newest `keep` nor among `kept`."""
        for old in sorted(self._dir.glob("v*-e*"))[: -self._keep]:
            if _version_of(old) not in kept:
                shutil.rmtree(old, ignore_errors=True)

    def reset(self) -> None:
        """Nothing to drop."""

    def close(self) -> None:
        """Nothing is open; the files stay."""


def _version_of(path: Path) -> int:
    return int(path.name.removeprefix("v").partition("-")[0])


class DiskReceiver:
    """Reads the version that a manifest names."""

    def receive(self, plan: PushPlan, engine_id: str, manifest: Manifest) -> Mapping[str, torch.Tensor]:
        """Raises: WeightPushError if the file is gone (a newer version replaced it) or is not what the manifest says."""
        path = Path(manifest.path) / FILE_NAME
        try:
            with safe_open(path, framework="pt") as file:  # open: the file can be removed now, and still be read
                return {entry.name: file.get_tensor(entry.name) for entry in manifest.entries}
        except (OSError, SafetensorError) as error:
            raise WeightPushError(f"version {manifest.version} cannot be read from {path}: {error}") from error

    def reset(self) -> None:
        """Nothing to drop."""

    def close(self) -> None:
        """Nothing is open."""


def write_safetensors(path: Path, buffer: SendBuffer, metadata: Mapping[str, str]) -> None:
    """Write a snapshot straight from its buckets (safetensors' own writer would copy what shares memory).

    Source of the format: https://github.com/huggingface/safetensors#format (header length, JSON header, bytes without holes).
    """
    header: dict[str, object] = {"__metadata__": dict(metadata)}
    end = 0
    for slot in buffer.slots:
        size = torch.Size(slot.shape).numel() * WIRE_DTYPES[slot.dtype].itemsize
        header[slot.name] = {
            "dtype": _SAFETENSORS_DTYPES[slot.dtype],
            "shape": list(slot.shape),
            "data_offsets": [end, end + size],
        }
        end += size
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    with path.open("wb") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        for slot in buffer.slots:
            file.write(slot.view(buffer.buckets).reshape(-1).view(torch.uint8).numpy().data)
