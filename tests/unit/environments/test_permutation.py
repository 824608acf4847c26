from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from async_rl.environments.permutation import Permutation


@settings(max_examples=60, deadline=None)
@given(size=st.integers(1, 700), key=st.integers(0, 2**63 - 1))
def test_every_element_occurs_exactly_once(size: int, key: int) -> None:
    order = Permutation(size, key)
    assert sorted(order(position) for position in range(size)) == list(range(size))


def test_same_key_gives_the_same_order_and_another_key_another() -> None:
    first, again, other = Permutation(1000, "a", 1), Permutation(1000, "a", 1), Permutation(1000, "a", 2)
    orders = [[order(position) for position in range(1000)] for order in (first, again, other)]
    assert orders[0] == orders[1]
    # Two independent random orders agree on one position in expectation; 12 or more has probability below 1e-8 (Poisson).
    assert sum(a == b for a, b in zip(orders[0], orders[2], strict=True)) < 12


def test_order_is_spread_over_the_range() -> None:
    order = Permutation(10**6, 7)
    mean = sum(order(position) for position in range(4000)) / 4000
    # The mean of 4000 uniform draws from [0, 1e6) has a standard deviation of 1e6 / sqrt(12 · 4000) = 4564.
    assert abs(mean - 500_000) < 5 * 4564


def test_a_huge_range_needs_no_table() -> None:
    order = Permutation(10**18, 1)
    assert len({order(position) for position in range(100)}) == 100


@pytest.mark.parametrize("position", [-1, 5])
def test_positions_outside_the_range_are_refused(position: int) -> None:
    with pytest.raises(IndexError, match=r"outside 0 \.\. 4"):
        Permutation(5, 0)(position)


def test_an_empty_range_is_refused() -> None:
    with pytest.raises(ValueError, match="at least 1"):
        Permutation(0)
