from __future__ import annotations

import msgspec
import numpy as np
import pytest

from async_rl.algorithms.parity import Guess, ParityLimit, comparable, compare
from async_rl.algorithms.records import RecordFault, bad_stops, explain, outside_turns, record_fault
from async_rl.algorithms.staleness import InvalidReason
from async_rl.testing.builders import make_trajectory
from protocol.messages import Trajectory

EOS = 9


def with_stops(token_ids: list[int], *, mask: list[int] | None = None) -> Trajectory:
    """Prompt of 2, a turn of 3, 1 token of a tool, a turn of 2."""
    made = make_trajectory(prompt_length=2, turns=((3, 1), (2, 0)), token_ids=token_ids)
    sampling = msgspec.structs.replace(made.sampling, stop_token_ids=(EOS,))
    loss_mask = made.loss_mask if mask is None else np.array(mask, dtype=np.uint8)
    return msgspec.structs.replace(made, sampling=sampling, loss_mask=loss_mask)


@pytest.mark.parametrize(
    ("token_ids", "mask", "bad"),
    [
        ([1, 2, 3, 4, EOS, 5, 6, EOS], None, []),
        ([1, 2, 3, 4, 5, 5, 6, 7], None, []),  # ended by the environment, or at the limit
        ([1, 2, 3, EOS, 5, 5, 6, EOS], None, [3]),  # it went on after a stop token
        ([1, 2, 3, 4, EOS, 5, 6, EOS], [0, 0, 1, 1, 1, 0, 1, 0], [7]),  # sampled, and not trained
        ([1, 2, 3, 4, EOS, 5, 6, EOS], [0, 0, 1, 1, 1, 0, 0, 0], []),  # a turn that is masked as a whole
        ([EOS, 2, 3, 4, 5, EOS, 6, 7], None, []),  # a prompt's and a tool's are not sampled
    ],
)
def test_a_stop_token_is_trained_exactly_when_it_was_sampled(
    token_ids: list[int], mask: list[int] | None, bad: list[int]
) -> None:
    trajectory = with_stops(token_ids, mask=mask)
    assert bad_stops(trajectory) == bad
    assert record_fault(trajectory) == (RecordFault.STOP_TOKEN if bad else None)


def test_faults_are_named_with_their_positions() -> None:
    trajectory = with_stops([1, 2, 3, 4, EOS, 5, 6, EOS])
    tool = msgspec.structs.replace(trajectory, loss_mask=np.array([0, 0, 1, 1, 1, 1, 1, 1], dtype=np.uint8))
    assert outside_turns(tool).tolist() == [5]
    assert record_fault(tool) is RecordFault.TRAINED_OUTSIDE_TURNS
    assert "at position 5" in explain(tool, RecordFault.TRAINED_OUTSIDE_TURNS)
    for value, fault, words in (
        (np.nan, RecordFault.NON_FINITE_LOGPROB, "position 3 are not finite"),
        (0.4, RecordFault.POSITIVE_LOGPROB, "position 3 are above 0"),
    ):
        logprobs = trajectory.behavior_logprobs.copy()
        logprobs[3] = value
        broken = msgspec.structs.replace(trajectory, behavior_logprobs=logprobs)
        assert record_fault(broken) is fault
        assert words in explain(broken, fault)


def test_every_fault_is_a_reason_of_a_verdict() -> None:
    assert {fault.value for fault in RecordFault} <= {reason.value for reason in InvalidReason}


def test_only_tokens_of_the_version_with_its_own_kv_are_compared() -> None:
    trajectory = make_trajectory(prompt_length=2, turns=((4, 0),), versions=[3, 4, 4, 4], kv_versions=[3, 3, 4, 4])
    assert np.flatnonzero(comparable(trajectory, 4)).tolist() == [4, 5]
    assert np.flatnonzero(comparable(trajectory, 3)).tolist() == [2]


def report(recorded: list[float], recomputed: list[float], guesses: list[Guess] | None = None) -> str:
    trajectory = make_trajectory(prompt_length=1, turns=((len(recorded), 0),), logprobs=recorded)
    own = np.array([0.0, *recomputed])
    found = compare(trajectory, own, comparable(trajectory, 0), ParityLimit(1e-3), guesses or [])
    assert found.num_tokens == len(recorded)
    return found.reason


def test_what_explains_a_mismatch_is_said() -> None:
    own = [-0.1, -2.0, -0.7, -1.1]
    assert report(own, own) == ""
    assert "each is that of the token before" in report([-9.0, -0.1, -2.0, -0.7], own)
    assert "each is that of the token after" in report([-2.0, -0.7, -1.1, -9.0], own)
    assert "1 trained tokens (positions 2)" in report([-0.1, 0.0, -0.7, -1.1], own)
    raw = np.array([0.0, -0.4, -1.5, -1.2, -0.9])
    guess = Guess("another temperature", lambda: raw)
    assert report(raw[1:].tolist(), own, [guess]).startswith("another temperature: recorded and recomputed logprobs differ by")
    assert "engine and trainer disagree" in report([-3.0, -3.5, -2.2, -4.1], own, [guess])


def test_a_mean_limit_bears_rounding_and_no_nan() -> None:
    limit = ParityLimit(0.1, "mean")
    assert limit.holds(np.array([0.3, 0.0, 0.0, 0.0]))
    assert not limit.holds(np.array([0.3, 0.3, 0.0, 0.0]))
    assert not limit.holds(np.array([np.nan]))
    assert limit.holds(np.zeros(0))
