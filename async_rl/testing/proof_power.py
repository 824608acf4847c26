"""What the parts of a push's proof detect, measured on a real trainer and the built-in engine; and how often they are wrong
about an honest push."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch

from async_rl.config.rollout import RolloutConfig
from async_rl.errors import ProofFailed
from async_rl.rollout.torch_engine import TorchEngine
from async_rl.testing.push_faults import FaultyTarget, PushFault
from async_rl.testing.tiny_models import TinyModel, save_tiny_model
from async_rl.trainer.policy import CANARY_SEED, PolicyOptions, load_policy
from async_rl.weights.canary import FLOAT32_SLACK, try_canary
from async_rl.weights.interfaces import PushTarget
from async_rl.weights.manifest import Canary, Manifest, Probe, Tolerance, bucket_views
from async_rl.weights.proof import check_digests, compare_probe, prove
from async_rl.weights.send_buffer import SendBuffer

HEAD = "lm_head.weight"
QUERY = "model.layers.1.self_attn.q_proj.weight"
KEY, VALUE = "model.layers.1.self_attn.k_proj.weight", "model.layers.1.self_attn.v_proj.weight"
USUAL_STEP, SMALL_STEP = 1e-4, 1e-6
PROBE_LENGTHS = (40, 24)


@dataclass(frozen=True, slots=True)
class Detected:
    """Which part of the proof finds a fault."""

    digest: bool
    probe: bool
    canary: bool


class Pushing:
    """A trainer that takes steps and the manifests of its pushes, and an engine: no transport between them.

    dtype: on the wire and in the engine. Steps move every weight by about the learning rate, as Adam's do.
    """

    def __init__(self, directory: Path, kind: TinyModel, dtype: str) -> None:
        self._path = save_tiny_model(directory, kind, sharpness=2.0)
        self._dtype = dtype
        rounds = dtype == "bfloat16"
        self.policy = load_policy(
            self._path, options=PolicyOptions(measure_rounding=rounds, canary_dtype=getattr(torch, dtype))
        )
        self._random = torch.Generator().manual_seed(7)
        self._version = 0
        noise, canary = self.policy.rounding_noise, self.policy.canary
        assert canary is not None
        self._tolerance = Tolerance(1e-4) if noise is None else Tolerance(3 * noise, "mean")
        of_canary = Tolerance(FLOAT32_SLACK * 1e-4) if canary.noise is None else Tolerance(3 * canary.noise, "mean")
        self.canary = Canary(CANARY_SEED, canary.scales, canary.probe, of_canary)

    async def engine(self) -> TorchEngine:
        engine = TorchEngine(self._path, RolloutConfig(dtype="bfloat16" if self._dtype == "bfloat16" else "float32"), "engine")
        await engine.start()
        return engine

    @torch.no_grad()
    def step(self, learning_rate: float) -> None:
        for parameter in self.policy.hf.parameters():
            parameter.add_(torch.randn(parameter.shape, generator=self._random), alpha=learning_rate)

    def push(self) -> tuple[Manifest, Mapping[str, torch.Tensor]]:
        """The manifest of the weights as they are now, and what a receiver would have of them."""
        self._version += 1
        sent = SendBuffer.copy_from(self.policy.named_full_tensors(), self._dtype, ties=self.policy.ties())
        manifest = sent.manifest(
            epoch=1, version=self._version, probe=self._probe(), tolerance=self._tolerance, canary=self.canary
        )
        return manifest, bucket_views(manifest, sent.buckets)

    def _probe(self) -> Probe:
        vocabulary = int(self.policy.hf.config.vocab_size)
        sequences = [torch.randint(vocabulary, (n,), generator=self._random).tolist() for n in PROBE_LENGTHS]
        scores = self.policy.score(sequences, temperature=1.0)
        return Probe(tuple(np.asarray(s, dtype=np.int32) for s in sequences), tuple(scores), 1.0)


async def detect(pushing: Pushing, fault: PushFault, *, learning_rate: float, tensor: str, other: str = "") -> Detected:
    """Let a fresh engine take one push rightly and the next, one step later, with `fault`; ask each part of the proof alone."""
    engine = await pushing.engine()
    try:
        target = FaultyTarget(engine, fault, tensor, other)
        first, tensors = pushing.push()
        await target.hold(first, tensors)
        pushing.step(learning_rate)
        manifest, received = pushing.push()
        canary = await _finds_canary(manifest, target, received)
        if fault is PushFault.NOT_APPLIED:
            await engine.swap(first, tensors)
        await target.swap(manifest, received)
        return Detected(_finds_digest(manifest, target), await _finds_probe(manifest, target), canary)
    finally:
        await engine.close()


async def false_alarms(pushing: Pushing, pushes: int, *, learning_rate: float = USUAL_STEP) -> int:
    """Push honestly, a step before each push; returns how many failed their proof. Each is tried with the canary too."""
    engine = await pushing.engine()
    alarms = 0
    try:
        for _ in range(pushes):
            pushing.step(learning_rate)
            manifest, received = pushing.push()
            try:
                await try_canary(manifest, engine, received)
                await engine.swap(manifest, received)
                await prove(manifest, engine)
                await engine.serve(manifest.version)
            except ProofFailed:
                alarms += 1
    finally:
        await engine.close()
    return alarms


async def canary_margins(pushing: Pushing) -> Mapping[str, float]:
    """By tensor: how far the canary's probe moves when the engine computes with an old copy of that tensor alone, as a multiple
    of the tolerance. Above 1 it is found."""
    engine = await pushing.engine()
    margins: dict[str, float] = {}
    try:
        for name in sorted(pushing.canary.scales):
            target = FaultyTarget(engine, PushFault.STALE_COPY, name)
            manifest, received = pushing.push()
            await target.hold(manifest, received)
            open_ended = Canary(pushing.canary.seed, pushing.canary.scales, pushing.canary.probe, Tolerance(float("inf")))
            await try_canary(_with(manifest, open_ended), target, received)
            report = await compare_probe(open_ended.probe, open_ended.tolerance, target)
            tolerance = pushing.canary.tolerance
            margins[name] = (report.parity_max_abs if tolerance.of == "max" else report.parity_mean_abs) / tolerance.value
    finally:
        await engine.close()
    return margins


def fault_cases(tied: bool) -> Sequence[tuple[str, PushFault, float, str, str]]:
    """(what, fault, learning rate of the step before, tensor, other tensor)."""
    head = "model.embed_tokens.weight" if tied else HEAD
    return (
        ("a skipped tensor", PushFault.SKIPPED_TENSOR, USUAL_STEP, QUERY, ""),
        ("a stale head", PushFault.STALE_COPY, USUAL_STEP, head, ""),
        ("a stale head, after a step at lr 1e-6", PushFault.STALE_COPY, SMALL_STEP, head, ""),
        ("two names swapped", PushFault.SWAPPED_NAMES, USUAL_STEP, KEY, VALUE),
        ("a wrong dtype on the way", PushFault.WRONG_DTYPE, USUAL_STEP, QUERY, ""),
        ("a push not applied", PushFault.NOT_APPLIED, USUAL_STEP, QUERY, ""),
        ("a push not applied, after a step at lr 1e-6", PushFault.NOT_APPLIED, SMALL_STEP, QUERY, ""),
    )


def _with(manifest: Manifest, canary: Canary) -> Manifest:
    return Manifest(
        manifest.epoch,
        manifest.version,
        manifest.entries,
        manifest.bucket_bytes,
        manifest.ties,
        manifest.probe,
        manifest.tolerance,
        canary,
    )


def _finds_digest(manifest: Manifest, target: PushTarget) -> bool:
    try:
        check_digests(manifest, target.digests(manifest))
    except ProofFailed:
        return True
    return False


async def _finds_probe(manifest: Manifest, target: PushTarget) -> bool:
    try:
        await compare_probe(manifest.probe, manifest.tolerance, target)
    except ProofFailed:
        return True
    return False


async def _finds_canary(manifest: Manifest, target: PushTarget, received: Mapping[str, torch.Tensor]) -> bool:
    try:
        await try_canary(manifest, target, received)
    except ProofFailed:
        return True
    return False
