"""Sampling by inverse CDF from counter-based uniforms: a token depends on its request's seed and position, on nothing else.

No generator state is shared, so a request draws the same numbers alone, in a crowd, and when its task is done again.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
import torch

UInt64Array = npt.NDArray[np.uint64]

_GAMMA = np.uint64(0x9E3779B97F4A7C15)
_MIX_1 = np.uint64(0xBF58476D1CE4E5B9)
_MIX_2 = np.uint64(0x94D049BB133111EB)
_S27, _S30, _S31, _S11 = np.uint64(27), np.uint64(30), np.uint64(31), np.uint64(11)


def _mix(x: UInt64Array) -> UInt64Array:
    x = (x ^ (x >> _S30)) * _MIX_1
    x = (x ^ (x >> _S27)) * _MIX_2
    return x ^ (x >> _S31)


def uniforms(seeds: npt.ArrayLike, positions: npt.ArrayLike) -> npt.NDArray[np.float64]:
    """Return one number in [0, 1) per (seed, position), broadcast against each other.

    seeds: integers in [0, 2**63). positions: index of the sampled token within its completion, from 0.
    Source: SplitMix64 (Steele, Lea and Flood 2014), used as a counter: state = mix(seed) + (position + 1) × gamma.
    """
    seed = np.atleast_1d(np.asarray(seeds, dtype=np.uint64))
    counter = np.atleast_1d(np.asarray(positions, dtype=np.uint64)) + np.uint64(1)
    bits = _mix(_mix(seed + _GAMMA) + counter * _GAMMA)  # arrays wrap silently: arithmetic modulo 2**64
    return (bits >> _S11).astype(np.float64) * 2.0**-53


def tempered_logprobs(logits: torch.Tensor, temperature: torch.Tensor | float) -> torch.Tensor:
    """Return log_softmax(logits / temperature) over the last dimension, in float32 nats."""
    scaled = logits.float()
    if not isinstance(temperature, float) or temperature != 1.0:
        scaled = scaled / temperature
    return torch.log_softmax(scaled, -1)


def sample(
    logits: torch.Tensor, temperature: torch.Tensor | float, uniform: npt.NDArray[np.float64]
) -> tuple[torch.Tensor, torch.Tensor]:
    """Draw one token per row, and return it [n] (int64) with its logprob [n] (float32, nats, tempered).

    logits [n, V]; temperature: one for all rows, or [n, 1]; uniform [n] in [0, 1).
    A token of probability zero is never drawn: the drawn index is the first whose cumulative probability exceeds
    uniform × total, and uniform < 1 keeps that product below the total in float64, whatever the rounding.
    Rows with NaN yield the last token with a NaN logprob, for whoever judges the trajectory to see.
    """
    logprobs = tempered_logprobs(logits, temperature)
    cumulative = torch.cumsum(logprobs.exp(), -1, dtype=torch.float64)
    points = torch.from_numpy(uniform).to(cumulative.device).unsqueeze(1) * cumulative[:, -1:]
    tokens = torch.searchsorted(cumulative, points, right=True).clamp_(max=logits.shape[-1] - 1)
    return tokens.squeeze(1), logprobs.gather(1, tokens).squeeze(1)
