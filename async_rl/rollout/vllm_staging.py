"""A file in shared memory by which received weights get from a rollout worker into the processes of its engine.

It is written while the engine still samples; the engine's ranks map it and copy from it while paused. Its name is gone as soon
as every rank has mapped it, so that nothing is left behind, whoever dies.
"""

from __future__ import annotations

import os
import tempfile
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch

from async_rl.weights.manifest import WIRE_DTYPES, Manifest

ALIGNMENT = 64
SHARED_MEMORY = Path("/dev/shm")


class StagingFile:
    """Room for one model, used again for every push of the same layout."""

    def __init__(self, directory: Path | None = None) -> None:
        self._directory = directory or (SHARED_MEMORY if SHARED_MEMORY.is_dir() else None)
        self._path: str | None = None
        self._is_named = False
        self._memory: torch.Tensor | None = None

    def write(self, manifest: Manifest, tensors: Mapping[str, torch.Tensor], untied: Mapping[str, str]) -> dict[str, Any]:
        """Copy what was received; returns what the ranks need to know (vllm_worker.StagedUpdate). Blocks.

        untied: alias → owner, sent under both names. Raises: OSError if there is no room.
        """
        entries: list[list[Any]] = []
        end = 0
        sources: list[torch.Tensor] = []
        for name, dtype, tensor in _named(manifest, tensors, untied):
            entries.append([name, dtype, list(tensor.shape), end])
            sources.append(tensor)
            end += -(-tensor.numel() * WIRE_DTYPES[dtype].itemsize // ALIGNMENT) * ALIGNMENT
        memory = self._room(max(end, 1))
        for (_, dtype, shape, offset), tensor in zip(entries, sources, strict=True):
            size = tensor.numel() * WIRE_DTYPES[dtype].itemsize
            memory[offset : offset + size].view(WIRE_DTYPES[dtype]).view(shape).copy_(tensor)
        return {"path": self._path, "num_bytes": memory.numel(), "entries": entries}

    def mapped(self) -> None:
        """Every rank holds the file now: remove its name."""
        if self._is_named and self._path is not None:
            Path(self._path).unlink(missing_ok=True)
            self._is_named = False

    def close(self) -> None:
        self.mapped()
        self._path = self._memory = None

    def _room(self, num_bytes: int) -> torch.Tensor:
        if self._memory is None or self._memory.numel() != num_bytes:
            self.close()
            handle, path = tempfile.mkstemp(prefix=f"async-rl-{os.getpid()}-", suffix=".weights", dir=self._directory)
            self._path, self._is_named = path, True
            try:
                os.posix_fallocate(handle, 0, num_bytes)  # a full disk says so here, and not as SIGBUS
                self._memory = torch.from_file(path, shared=True, size=num_bytes, dtype=torch.uint8)
            except BaseException:
                with suppress(OSError):
                    self.close()
                raise
            finally:
                os.close(handle)
        return self._memory


def _named(
    manifest: Manifest, tensors: Mapping[str, torch.Tensor], untied: Mapping[str, str]
) -> list[tuple[str, str, torch.Tensor]]:
    dtypes = {entry.name: entry.dtype for entry in manifest.entries}
    sent = [(name, dtype, tensors[name]) for name, dtype in dtypes.items()]
    return sent + [(alias, dtypes[owner], tensors[owner]) for alias, owner in untied.items()]
