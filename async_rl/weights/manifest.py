"""The manifest of a push: what is sent, how it is laid out, and what proves that it arrived."""

from __future__ import annotations

import difflib
from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any, Literal

import msgpack
import numpy as np
import numpy.typing as npt
import torch
import xxhash

from async_rl.errors import ManifestMismatch

MANIFEST_SCHEMA = 2

WIRE_DTYPES: Mapping[str, torch.dtype] = {
    "float32": torch.float32,
    "bfloat16": torch.bfloat16,
    "float16": torch.float16,
    "float64": torch.float64,
    "int64": torch.int64,
    "int32": torch.int32,
    "int16": torch.int16,
    "int8": torch.int8,
    "uint8": torch.uint8,
    "bool": torch.bool,
}
"""Every dtype that may be on the wire, by the name that a manifest gives it."""


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

    @property
    def num_bytes(self) -> int:
        """Bytes on the wire."""
        return int(np.prod(self.shape, dtype=np.int64)) * WIRE_DTYPES[self.dtype].itemsize


@dataclass(frozen=True, slots=True, eq=False)
class Probe:
    """Token sequences with the trainer's own logprobs at this version and temperature (nats; [len − 1] each)."""

    sequences: tuple[npt.NDArray[np.int32], ...]
    logprobs: tuple[npt.NDArray[np.float32], ...]
    temperature: float


@dataclass(frozen=True, slots=True)
class Tolerance:
    """How far |engine − trainer| may be on the probe, nats: its maximum (float32) or its mean (dtypes that round)."""

    value: float
    of: Literal["max", "mean"] = "max"


@dataclass(frozen=True, slots=True, eq=False)
class Canary:
    """Made-up weights that an engine is tried with once, at its first push (see weights.canary)."""

    seed: int
    scales: Mapping[str, tuple[float, float]]  # floating-point tensors by name: mean, spread
    probe: Probe  # scored by the trainer under the canary
    tolerance: Tolerance


@dataclass(frozen=True, slots=True, eq=False)
class Manifest:
    """Everything a receiver must know before it posts a receive."""

    epoch: int
    version: int
    entries: tuple[TensorEntry, ...]
    bucket_bytes: tuple[int, ...]  # size of each bucket
    ties: tuple[tuple[str, str], ...]  # (alias, owner): the alias is not sent
    probe: Probe
    tolerance: Tolerance  # of the proof
    canary: Canary | None = None
    path: str = ""  # disk: directory of the safetensors file; shm: the segment


def tensor_digest(tensor: torch.Tensor) -> str:
    """xxh3-64 of the tensor's little-endian bytes in row-major order, as 16 hex digits. Any dtype, any device, any strides."""
    flat = tensor.detach().to("cpu").contiguous().reshape(-1)
    return xxhash.xxh3_64_hexdigest(flat.view(torch.uint8).numpy().data)


def bucket_views(manifest: Manifest, buckets: tuple[torch.Tensor, ...]) -> dict[str, torch.Tensor]:
    """The manifest's tensors as views into flat uint8 buckets, by name (without aliases)."""
    views = {}
    for entry in manifest.entries:
        flat = buckets[entry.bucket][entry.offset : entry.offset + entry.num_bytes]
        views[entry.name] = flat.view(WIRE_DTYPES[entry.dtype]).view(entry.shape)
    return views


def check_names(manifest: Manifest, shapes: Mapping[str, tuple[int, ...]]) -> None:
    """Account for every name: what the model holds must be sent or tied to something sent, and nothing else may come.

    `shapes` maps every state-dict name of the model (aliases of tied tensors included, or left out) to its shape.
    Raises: ManifestMismatch, naming what is missing, unexpected (with the nearest known name) or of another shape.
    """
    sent = {entry.name: entry.shape for entry in manifest.entries}
    aliases = dict(manifest.ties)
    missing = [name for name in shapes if name not in sent and aliases.get(name) not in sent]
    unexpected = [name for name in sent if name not in shapes]
    reshaped = [
        f"{name} {list(shape)} here, {list(sent_shape)} sent"
        for name, shape in shapes.items()
        if (sent_shape := sent.get(name, sent.get(aliases.get(name, "")))) is not None and sent_shape != tuple(shape)
    ]
    if not (missing or unexpected or reshaped):
        return
    parts = []
    if missing:
        parts.append(f"held here but not sent: {_some(missing, sent)}")
    if unexpected:
        parts.append(f"sent but unknown here: {_some(unexpected, shapes)}")
    if reshaped:
        parts.append(f"other shapes: {'; '.join(reshaped[:4])}")
    raise ManifestMismatch(
        f"manifest of version {manifest.version} does not fit the engine's model: {'. '.join(parts)}. "
        "Start trainer and engine from the same model directory."
    )


def check_layout(manifest: Manifest) -> None:
    """Raises: ManifestMismatch unless every tensor lies within its bucket, aligned, and no two overlap or share a name."""
    ends: dict[int, int] = {}
    names = {entry.name for entry in manifest.entries}
    if len(names) != len(manifest.entries):
        raise ManifestMismatch(f"manifest of version {manifest.version} names a tensor twice")
    for entry in sorted(manifest.entries, key=lambda entry: (entry.bucket, entry.offset)):
        if entry.dtype not in WIRE_DTYPES:
            raise ManifestMismatch(f"{entry.name}: dtype {entry.dtype!r} is none of {', '.join(WIRE_DTYPES)}")
        size = manifest.bucket_bytes[entry.bucket] if 0 <= entry.bucket < len(manifest.bucket_bytes) else -1
        if entry.offset % 16 or entry.offset < ends.get(entry.bucket, 0) or entry.offset + entry.num_bytes > size:
            raise ManifestMismatch(
                f"{entry.name}: {entry.num_bytes} bytes at offset {entry.offset} of bucket {entry.bucket} ({size} bytes) "
                "overlap another tensor, are not 16-byte aligned or do not fit"
            )
        ends[entry.bucket] = entry.offset + entry.num_bytes
    if orphans := [alias for alias, owner in manifest.ties if owner not in names or alias in names]:
        raise ManifestMismatch(f"tied names without an owner that is sent: {', '.join(orphans[:4])}")


def encode_manifest(manifest: Manifest) -> bytes:
    """msgpack; arrays as raw little-endian bytes."""
    body = {
        "schema": MANIFEST_SCHEMA,
        "epoch": manifest.epoch,
        "version": manifest.version,
        "entries": [[getattr(entry, name) for name in _ENTRY_FIELDS] for entry in manifest.entries],
        "bucket_bytes": manifest.bucket_bytes,
        "ties": manifest.ties,
        "probe": _pack_probe(manifest.probe),
        "tolerance": [manifest.tolerance.value, manifest.tolerance.of],
        "canary": None if manifest.canary is None else _pack_canary(manifest.canary),
        "path": manifest.path,
    }
    packed: bytes = msgpack.packb(body)
    return packed


def decode_manifest(data: bytes) -> Manifest:
    """Raises: ManifestMismatch if the bytes are no manifest of a known schema, or its layout is impossible."""
    try:
        body: dict[str, Any] = msgpack.unpackb(data, use_list=False)
        if body["schema"] != MANIFEST_SCHEMA:
            raise ManifestMismatch(
                f"manifest schema {body['schema']} is not {MANIFEST_SCHEMA}: run the same release everywhere"
            )
        manifest = Manifest(
            epoch=body["epoch"],
            version=body["version"],
            entries=tuple(TensorEntry(*values) for values in body["entries"]),
            bucket_bytes=body["bucket_bytes"],
            ties=body["ties"],
            probe=_unpack_probe(body["probe"]),
            tolerance=Tolerance(*body["tolerance"]),
            canary=None if body["canary"] is None else _unpack_canary(body["canary"]),
            path=body["path"],
        )
    except (ValueError, TypeError, KeyError, msgpack.UnpackException) as error:
        raise ManifestMismatch(f"these {len(data)} bytes are not a manifest: {error!r}") from error
    check_layout(manifest)
    return manifest


def _pack_probe(probe: Probe) -> dict[str, Any]:
    return {
        "sequences": [np.ascontiguousarray(ids, dtype="<i4").tobytes() for ids in probe.sequences],
        "logprobs": [np.ascontiguousarray(values, dtype="<f4").tobytes() for values in probe.logprobs],
        "temperature": probe.temperature,
    }


def _unpack_probe(body: Mapping[str, Any]) -> Probe:
    return Probe(
        sequences=tuple(np.frombuffer(ids, dtype="<i4") for ids in body["sequences"]),
        logprobs=tuple(np.frombuffer(values, dtype="<f4") for values in body["logprobs"]),
        temperature=body["temperature"],
    )


def _pack_canary(canary: Canary) -> dict[str, Any]:
    return {
        "seed": canary.seed,
        "scales": {name: list(scale) for name, scale in canary.scales.items()},
        "probe": _pack_probe(canary.probe),
        "tolerance": [canary.tolerance.value, canary.tolerance.of],
    }


def _unpack_canary(body: Mapping[str, Any]) -> Canary:
    scales = {name: (float(mean), float(spread)) for name, (mean, spread) in body["scales"].items()}
    return Canary(body["seed"], scales, _unpack_probe(body["probe"]), Tolerance(*body["tolerance"]))


_ENTRY_FIELDS = tuple(field.name for field in fields(TensorEntry))


def _some(names: list[str], known: Mapping[str, object]) -> str:
    """The first few names, each with the nearest known one."""
    shown = []
    for name in names[:4]:
        nearest = difflib.get_close_matches(name, list(known), n=1, cutoff=0.4)
        shown.append(f"{name} (nearest: {nearest[0]})" if nearest else name)
    rest = len(names) - len(shown)
    return ", ".join(shown) + (f" and {rest} more" if rest else "")
