"""When a failed role is started again: figures by hand."""

from __future__ import annotations

from async_rl.launch.restarts import FailureHistory, RestartPolicy


def test_waits_double_up_to_the_longest() -> None:
    history = FailureHistory(RestartPolicy(max_restarts=9, window_s=600, backoff_s=0.5, max_backoff_s=3.0))
    assert [history.fail(float(at), lived_s=0.1) for at in range(5)] == [0.5, 1.0, 2.0, 3.0, 3.0]


def test_a_start_that_lived_longer_than_the_longest_wait_is_a_new_beginning() -> None:
    history = FailureHistory(RestartPolicy(max_restarts=9, window_s=600, backoff_s=0.5, max_backoff_s=3.0))
    history.fail(0.0, lived_s=0.1)
    assert history.fail(1.0, lived_s=3.0) == 1.0
    assert history.fail(5.0, lived_s=3.1) == 0.5


def test_one_failure_more_than_the_cap_within_the_window_is_too_many() -> None:
    history = FailureHistory(RestartPolicy(max_restarts=2, window_s=100, backoff_s=1, max_backoff_s=1))
    assert [history.fail(at, lived_s=0) for at in (0.0, 50.0, 100.0)] == [1, 1, None]  # all three within 100 s


def test_failures_outside_of_the_window_are_forgiven() -> None:
    history = FailureHistory(RestartPolicy(max_restarts=2, window_s=100, backoff_s=1, max_backoff_s=1))
    assert [history.fail(at, lived_s=0) for at in (0.0, 50.0, 100.1, 150.2)] == [1, 1, 1, 1]
    assert history.count == 4


def test_without_restarts_the_first_failure_is_too_many() -> None:
    assert FailureHistory(RestartPolicy()).fail(0.0, lived_s=1e9) is None


def test_thousands_of_failures_do_not_overflow() -> None:
    history = FailureHistory(RestartPolicy(max_restarts=5000, window_s=1e9, backoff_s=0.1, max_backoff_s=0.2))
    assert [history.fail(float(at), lived_s=0) for at in range(3000)][-1] == 0.2
