"""The value loss, explained variance and whitened advantages, by hand."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from async_rl.algorithms.returns import whitened
from async_rl.algorithms.value import clipped_value_loss, explained_variance
from async_rl.errors import ShapeError

MASK = torch.ones(5, dtype=torch.bool)
OLD = torch.tensor([1.0, 1.0, 1.0, 1.0, 1.0], dtype=torch.float64)
RETURNS = torch.tensor([2.0, 2.0, 0.0, 2.0, 1.0], dtype=torch.float64)


def test_a_value_that_moved_too_far_towards_its_return_is_judged_at_the_bound_and_left_alone() -> None:
    """ε = 0.2. Moved by +.1 (free): (1.1 − 2)². By +.5 towards 2: at the bound, (1.2 − 2)². By +.5 away from 0: its own error,
    1.5². By −.5 away from 2: its own, 1.5². Not moved and right: 0."""
    values = torch.tensor([1.1, 1.5, 1.5, 0.5, 1.0], dtype=torch.float64, requires_grad=True)
    losses, clipped = clipped_value_loss(values, OLD, RETURNS, MASK, clip=0.2)
    assert losses.tolist() == pytest.approx([0.405, 0.32, 1.125, 1.125, 0.0], abs=1e-12)
    assert clipped.tolist() == [False, True, False, False, False]
    (gradient,) = torch.autograd.grad(losses.sum(), values)
    assert gradient.tolist() == pytest.approx([-0.9, 0.0, 1.5, -1.5, 0.0], abs=1e-12)


def test_without_a_clip_it_is_half_the_squared_error() -> None:
    values = torch.tensor([1.1, 1.5, 1.5, 0.5, 1.0], dtype=torch.float64, requires_grad=True)
    losses, clipped = clipped_value_loss(values, OLD, RETURNS, MASK, clip=None)
    assert losses.tolist() == pytest.approx([0.405, 0.125, 1.125, 1.125, 0.0], abs=1e-12)
    assert not clipped.any()


def test_what_is_not_trained_may_hold_anything_and_gets_no_gradient() -> None:
    mask = torch.tensor([True, False, True])
    nan = float("nan")
    values = torch.tensor([1.0, nan, 0.0], requires_grad=True)
    losses, clipped = clipped_value_loss(values, torch.tensor([0.0, nan, 0.0]), torch.tensor([3.0, nan, 1.0]), mask, clip=0.5)
    assert losses.tolist() == [3.125, 0.0, 0.5]
    assert clipped.tolist() == [True, False, False]
    (gradient,) = torch.autograd.grad(losses.sum(), values)
    assert gradient.tolist() == [0.0, 0.0, -1.0]


def test_a_nan_of_a_trained_token_surfaces() -> None:
    one = torch.ones(1)
    for values, returns in ((one * float("nan"), one), (one, one * float("nan"))):
        losses, _ = clipped_value_loss(values, one, returns, one.bool(), clip=0.2)
        assert losses.isnan().all()


def test_lengths_that_differ_are_refused() -> None:
    with pytest.raises(ShapeError, match="returns"):
        clipped_value_loss(torch.zeros(2), torch.zeros(2), torch.zeros(3), torch.ones(2, dtype=torch.bool), clip=0.2)


def test_explained_variance_by_hand() -> None:
    returns = np.array([0.0, 1.0, 2.0, 3.0])
    assert explained_variance(returns, returns) == 1.0
    assert explained_variance(returns + 7.0, returns) == 1.0  # of the variance, not of the mean
    assert explained_variance(np.full(4, 1.5), returns) == 0.0
    assert explained_variance(returns / 2, returns) == pytest.approx(0.75)
    assert explained_variance(-returns, returns) == pytest.approx(-3.0)
    assert explained_variance(returns, np.full(4, 2.0)) is None
    assert explained_variance(np.zeros(0), np.zeros(0)) is None


def test_whitening_is_over_the_trained_tokens_of_all_samples() -> None:
    """1, 2, 3 and 6: mean 3, variance 14/3."""
    masks = [np.array([False, True, True]), np.array([True, False, True])]
    rows = [np.array([9.0, 1.0, 2.0]), np.array([3.0, -9.0, 6.0])]
    scale = (14 / 3) ** 0.5
    first, second = whitened(rows, masks)
    assert first.tolist() == pytest.approx([0.0, -2 / scale, -1 / scale], abs=1e-7)
    assert second.tolist() == pytest.approx([0.0, 0.0, 3 / scale], abs=1e-7)


def test_advantages_that_do_not_differ_and_a_single_one_are_whitened_to_0() -> None:
    assert [rows.tolist() for rows in whitened([np.array([0.7, 0.7])], [np.array([True, True])])] == [[0.0, 0.0]]
    assert [rows.tolist() for rows in whitened([np.array([5.0, 0.0])], [np.array([True, False])])] == [[0.0, 0.0]]
    assert whitened([], []) == []
