from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from async_rl.rollout.sampling import sample, tempered_logprobs, uniforms

MASK = 2**64 - 1
GAMMA = 0x9E3779B97F4A7C15
LARGEST_UNIFORM = 1 - 2.0**-53


def mix(x: int) -> int:
    """SplitMix64's finaliser on Python's integers."""
    x = ((x ^ (x >> 30)) * 0xBF58476D1CE4E5B9) & MASK
    x = ((x ^ (x >> 27)) * 0x94D049BB133111EB) & MASK
    return x ^ (x >> 31)


@settings(max_examples=50, deadline=None)
@given(seed=st.integers(0, 2**63 - 1), position=st.integers(0, 2**20))
def test_uniform_is_the_top_53_bits_of_splitmix64_at_the_position(seed: int, position: int) -> None:
    state = (mix((seed + GAMMA) & MASK) + (position + 1) * GAMMA) & MASK
    assert uniforms(seed, position)[0] == (mix(state) >> 11) / 2**53


def test_uniforms_broadcast_rows_against_positions() -> None:
    table = uniforms(np.array([3, 2**62]), np.array([[0], [7]]))
    assert table.shape == (2, 2)
    assert table[1, 1] == uniforms(2**62, 7)[0]


def test_uniforms_are_uniform_over_positions_and_over_neighbouring_seeds() -> None:
    # chi-square over 10 cells, 9 degrees of freedom: 33.72 is exceeded with probability 1e-4
    for numbers in (uniforms(5, np.arange(20_000)), uniforms(np.arange(20_000), 0)):
        counts = np.histogram(numbers, bins=10, range=(0, 1))[0]
        assert float(((counts - 2000) ** 2 / 2000).sum()) < 33.72


def test_logprob_is_of_the_tempered_distribution() -> None:
    # log sigmoid(2 / 0.5) = −log(1 + e^−4) = −0.01815 (raw: −0.1269)
    tokens, logprobs = sample(torch.tensor([[2.0, 0.0]]), 0.5, np.array([0.3]))
    assert tokens.tolist() == [0]
    assert logprobs.item() == pytest.approx(-0.01815, abs=1e-5)


def test_logprob_is_the_sampled_tokens_own_not_the_likeliest() -> None:
    probabilities = torch.tensor([[0.49, 0.015, 0.495]])
    tokens, logprobs = sample(probabilities.log(), 1.0, np.array([0.495]))
    assert tokens.tolist() == [1]
    assert logprobs.item() == pytest.approx(math.log(0.015), abs=1e-5)


def test_rows_have_their_own_temperature() -> None:
    logits = torch.tensor([[2.0, 0.0], [2.0, 0.0]])
    _, logprobs = sample(logits, torch.tensor([[0.5], [1.0]]), np.array([0.1, 0.1]))
    assert logprobs.tolist() == pytest.approx([-math.log(1 + math.exp(-4)), -math.log(1 + math.exp(-2))], abs=1e-6)


@pytest.mark.parametrize("uniform", [0.0, 0.5, LARGEST_UNIFORM])
def test_tokens_of_probability_zero_are_never_drawn(uniform: float) -> None:
    logits = torch.tensor([[-math.inf, 0.0, -math.inf, 0.0, -math.inf]])
    tokens, logprobs = sample(logits, 1.0, np.array([uniform]))
    assert tokens.item() in (1, 3)
    assert logprobs.item() == pytest.approx(math.log(0.5), abs=1e-6)


@settings(max_examples=100, deadline=None)
@given(st.lists(st.floats(-120, 120, width=32), min_size=1, max_size=300), st.sampled_from([0.0, LARGEST_UNIFORM]))
def test_extreme_uniforms_draw_tokens_that_have_mass(values: list[float], uniform: float) -> None:
    logits = torch.tensor([[*values, -math.inf]], dtype=torch.float32)
    tokens, logprobs = sample(logits, 1.0, np.array([uniform]))
    assert tokens.item() < len(values)
    assert math.exp(logprobs.item()) > 0


def test_draws_follow_the_distribution() -> None:
    # chi-square, 5 degrees of freedom: 25.74 is exceeded with probability 1e-4
    probabilities = torch.tensor([0.4, 0.3, 0.15, 0.1, 0.04, 0.01])
    n, temperature = 40_000, 0.7
    logits = (probabilities.log() * temperature).expand(n, 6)
    tokens, _ = sample(logits, temperature, uniforms(np.arange(n), 3))
    counts = np.bincount(tokens.numpy(), minlength=6)
    expected = probabilities.double().numpy() * n
    assert float(((counts - expected) ** 2 / expected).sum()) < 25.74


def test_a_rows_draw_does_not_depend_on_the_other_rows() -> None:
    logits = torch.randn((64, 50), generator=torch.Generator().manual_seed(0))
    drawn = uniforms(np.arange(64), 0)
    crowd, crowd_logprobs = sample(logits, 0.6, drawn)
    for row in (0, 17, 63):
        alone, logprobs = sample(logits[row : row + 1], 0.6, drawn[row : row + 1])
        assert alone.item() == crowd[row].item()
        assert logprobs.item() == pytest.approx(crowd_logprobs[row].item(), abs=1e-6)


def test_nan_logits_yield_a_nan_logprob_and_a_valid_id() -> None:
    tokens, logprobs = sample(torch.tensor([[math.nan, 1.0], [0.0, 0.0]]), 1.0, np.array([0.2, 0.2]))
    assert 0 <= tokens[0].item() < 2
    assert math.isnan(logprobs[0].item())
    assert logprobs[1].item() == pytest.approx(math.log(0.5))


def test_low_precision_logits_are_normalised_in_float32() -> None:
    logits = torch.tensor([[1.0, 2.0, 3.0]], dtype=torch.bfloat16)
    found = tempered_logprobs(logits, 1.0)
    assert found.dtype is torch.float32
    assert found.exp().sum().item() == pytest.approx(1.0, abs=1e-6)
