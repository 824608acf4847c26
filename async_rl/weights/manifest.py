"""The manifest of a push: what is sent, how it is laid out, and what proves that it arrived."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt


@dataclass(frozen=True, slots=True)
class TensorEntry:
    """One tensor in the flat send buffer. Names are the Hugging Face model's own state-dict names."""

    name: str
    shape: tuple[int, ...]
    dtype: str  # wire dtype, "float32" or "bfloat16" for floats; others as they are ("int64", ...)
    bucket: int
    offset: int  # bytes from the bucket's start, 16-byte aligned
    digest: str  # xxh3-64 of its little-endian wire bytes, hex; see tensor_digest
    is_buffer: bool = False


@dataclass(frozen=True, slots=True, eq=False)
class Probe:
    """Token sequences with the trainer's own logprobs at this version and temperature (nats; [len − 1] each)."""

    sequences: tuple[npt.NDArray[np.int32], ...]
    logprobs: tuple[npt.NDArray[np.float32], ...]
    temperature: float


@dataclass(frozen=True, slots=True, eq=False)
class Manifest:
    """Everything a receiver must know before it posts a receive."""

    epoch: int
    version: int
    entries: tuple[TensorEntry, ...]
    bucket_bytes: tuple[int, ...]  # size of each bucket
    ties: tuple[tuple[str, str], ...]  # (alias, owner): the alias is not sent
    probe: Probe
    tolerance: float  # largest |engine − trainer| logprob accepted on the probe
    canary: bool = False  # the start-up push with every tensor perturbed
    path: str = ""  # disk backend: directory of the safetensors file
