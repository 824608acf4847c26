"""The proof of a push: the engine holds what was sent, and computes with it what the trainer computes."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Mapping
from dataclasses import replace

import numpy as np

from async_rl.errors import ProofFailed
from async_rl.registry.versions import ProofReport
from async_rl.weights.interfaces import PushTarget, Scorer
from async_rl.weights.manifest import Manifest, Probe, Tolerance


async def prove(manifest: Manifest, target: PushTarget) -> ProofReport:
    """Compare digests, then the probe's logprobs. Call it after `swap`, before `serve`.

    Raises: ProofFailed, naming the tensors that differ, or the largest difference and where it is.
    """
    started = time.perf_counter()
    check_digests(manifest, await asyncio.to_thread(target.digests, manifest))
    digested = time.perf_counter()
    try:
        report = await compare_probe(manifest.probe, manifest.tolerance, target)
    except ProofFailed as error:
        raise ProofFailed(f"version {manifest.version}: {error}") from error
    return replace(report, seconds={"digest": digested - started, "probe": time.perf_counter() - digested})


def check_digests(manifest: Manifest, held: Mapping[str, str]) -> None:
    """Raises: ProofFailed unless the engine's digests (name → hex) are those of the manifest."""
    wrong = [entry.name for entry in manifest.entries if held.get(entry.name) != entry.digest]
    if wrong:
        names = ", ".join(wrong[:4]) + (f" and {len(wrong) - 4} more" if len(wrong) > 4 else "")
        raise ProofFailed(f"version {manifest.version}: the engine does not hold what was sent in {names}")


async def compare_probe(probe: Probe, tolerance: Tolerance, target: Scorer) -> ProofReport:
    """Score the probe on the engine and compare with the trainer's own logprobs.

    Raises: ProofFailed, with the largest difference and where it is.
    """
    scored = await target.score([ids.tolist() for ids in probe.sequences], temperature=probe.temperature)
    if len(scored) != len(probe.logprobs):
        raise ProofFailed(f"{len(scored)} probe sequences scored of {len(probe.logprobs)}")
    differences = []
    for index, (mine, theirs) in enumerate(zip(scored, probe.logprobs, strict=True)):
        if mine.shape != theirs.shape:
            raise ProofFailed(f"probe {index} has {mine.shape} logprobs, not {theirs.shape}")
        differences.append(np.abs(mine.astype(np.float64) - theirs.astype(np.float64)))
    flat = np.concatenate(differences) if differences else np.zeros(0)
    if flat.size == 0:
        raise ProofFailed("the probe has no tokens; it proves nothing")
    worst, mean = float(flat.max()), float(flat.mean())
    measured = worst if tolerance.of == "max" else mean
    if not measured <= tolerance.value:  # a NaN is not
        at = int(flat.argmax())
        raise ProofFailed(
            f"engine and trainer differ by {measured:.3g} nats ({tolerance.of}; most at probe token {at} of {flat.size}), "
            f"more than {tolerance.value:g}; check the engine's dtype and attention, or raise weights.probe_tolerance"
        )
    return ProofReport(worst, mean, int(flat.size))
