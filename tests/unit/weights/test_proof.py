"""The proof of a push."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import numpy.typing as npt
import pytest

from async_rl.errors import ProofFailed
from async_rl.testing.push_targets import TinyEngine, TinyPolicy, tiny_probe
from async_rl.weights.manifest import Manifest, Probe, Tolerance
from async_rl.weights.proof import prove
from async_rl.weights.send_buffer import SendBuffer, named_weights


class Shifted(TinyEngine):
    """Scores with an error at one token of the second sequence."""

    shift = 0.0

    async def score(self, sequences: Sequence[Sequence[int]], *, temperature: float) -> Sequence[npt.NDArray[np.float32]]:
        scores = list(await super().score(sequences, temperature=temperature))
        scores[1] = scores[1].copy()
        scores[1][1] += self.shift
        return scores


def manifest_of(model: TinyPolicy, *, tolerance: float = 1e-4) -> Manifest:
    named, ties, buffers = named_weights(model)
    buffer = SendBuffer.copy_from(named, "float32", ties=ties, buffer_names=buffers)
    return buffer.manifest(epoch=1, version=5, probe=tiny_probe(model), tolerance=Tolerance(tolerance))


async def test_the_report_says_how_far_engine_and_trainer_are_apart() -> None:
    model = TinyPolicy(1)
    engine = Shifted(model)
    engine.shift = 0.25
    report = await prove(manifest_of(model, tolerance=0.5), engine)
    # 4 + 2 tokens, of which one is off by 1/4
    assert report.parity_tokens == 6
    assert report.parity_max_abs == pytest.approx(0.25, abs=1e-6)
    assert report.parity_mean_abs == pytest.approx(0.25 / 6, abs=1e-6)


@pytest.mark.parametrize("shift", [2e-4, -2e-4, float("nan"), float("inf")])
async def test_a_difference_beyond_the_tolerance_or_no_number_at_all_fails(shift: float) -> None:
    model = TinyPolicy(1)
    engine = Shifted(model)
    engine.shift = shift
    with pytest.raises(ProofFailed, match="probe token 5 of 6"):
        await prove(manifest_of(model), engine)


async def test_tensors_that_differ_are_named_before_anything_is_scored() -> None:
    with pytest.raises(ProofFailed, match=r"steps, embed\.weight, mix\.weight, mix\.bias"):
        await prove(manifest_of(TinyPolicy(1)), TinyEngine(TinyPolicy(2)))


async def test_a_tensor_that_the_engine_says_nothing_about_fails() -> None:
    class Silent(TinyEngine):
        def digests(self, manifest: Manifest) -> dict[str, str]:
            return {name: digest for name, digest in super().digests(manifest).items() if name != "mix.bias"}

    model = TinyPolicy(1)
    with pytest.raises(ProofFailed, match=r"in mix\.bias$"):
        await prove(manifest_of(model), Silent(model))


async def test_an_empty_probe_proves_nothing() -> None:
    model = TinyPolicy(1)
    empty = Probe((np.array([3], dtype=np.int32),), (np.zeros(0, dtype=np.float32),), 1.0)
    with pytest.raises(ProofFailed, match="proves nothing"):
        await prove(replace(manifest_of(model), probe=empty), TinyEngine(model))
