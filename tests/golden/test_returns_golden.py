from __future__ import annotations

import numpy as np
import pytest

from async_rl.algorithms.returns import discounted_returns, generalized_advantages
from async_rl.errors import ShapeError


def test_masked_tokens_neither_end_the_sequence_nor_take_a_discount_step() -> None:
    returns = discounted_returns(np.array([0.0, 0.0, 1.0]), np.array([True, False, True]), gamma=0.5)
    assert returns.tolist() == [0.5, 1.0, 1.0]


def test_a_tools_tokens_change_no_return_whatever_their_number() -> None:
    plain = discounted_returns(np.array([1.0, 2.0, 4.0]), np.array([True] * 3), gamma=0.5)
    between = discounted_returns(
        np.array([1.0, 0.0, 0.0, 2.0, 0.0, 4.0]), np.array([True, False, False, True, False, True]), gamma=0.5
    )
    assert plain.tolist() == [3.0, 4.0, 4.0]
    assert between[[0, 3, 5]].tolist() == plain.tolist()


def test_generalized_advantages_by_hand() -> None:
    """gamma = λ = 1/2, values 1, 2, 3, reward 4 at the end: δ = 0, −1/2, 1; A = −1/16, −1/4, 1."""
    rewards, values, mask = np.array([0.0, 0.0, 4.0]), np.array([1.0, 2.0, 3.0]), np.array([True] * 3)
    advantages, returns = generalized_advantages(rewards, values, mask, gamma=0.5, gae_lambda=0.5)
    assert advantages.tolist() == [-0.0625, -0.25, 1.0]
    assert returns.tolist() == [0.9375, 1.75, 4.0]


def test_a_tool_between_changes_no_advantage_and_its_values_are_not_read() -> None:
    rewards, values = np.array([0.0, 0.0, 0.0, 4.0]), np.array([1.0, 2.0, np.nan, 3.0])
    mask = np.array([True, True, False, True])
    advantages, returns = generalized_advantages(rewards, values, mask, gamma=0.5, gae_lambda=0.5)
    assert advantages.tolist() == [-0.0625, -0.25, 0.0, 1.0]
    assert returns.tolist() == [0.9375, 1.75, 0.0, 4.0]


def test_with_lambda_1_the_return_is_the_discounted_one() -> None:
    rng = np.random.default_rng(0)
    rewards, values, mask = rng.normal(size=12), rng.normal(size=12), rng.random(12) < 0.6
    rewards[~mask] = 0.0
    _, returns = generalized_advantages(rewards, values, mask, gamma=0.9, gae_lambda=1.0)
    np.testing.assert_allclose(returns[mask], discounted_returns(rewards, mask, gamma=0.9)[mask], rtol=1e-12)


def test_lengths_that_differ_are_refused() -> None:
    with pytest.raises(ShapeError, match="one value per token"):
        discounted_returns(np.zeros(2), np.zeros(3, dtype=bool), gamma=1.0)
