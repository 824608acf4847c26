from __future__ import annotations

from collections.abc import Sequence

from async_rl.environments.episodes import episode_of
from async_rl.testing.builders import make_task, make_trajectory
from protocol.messages import FinishReason


def _letters(ids: Sequence[int]) -> str:
    return "".join(chr(ord("a") + token) for token in ids)


def test_turns_and_the_observations_between_them_are_read_from_the_ids() -> None:
    # ids 0 1 | 2 3 (sampled) 4 (observed) | 5 6 7 (sampled)
    trajectory = make_trajectory(prompt_length=2, turns=((2, 1), (3, 0)), token_ids=range(8))
    episode = episode_of(make_task(), trajectory, 3, _letters)
    assert [turn.text for turn in episode.turns] == ["cd", "fgh"]
    assert episode.observations == ("e",)
    assert (episode.index, episode.completion) == (3, "fgh")


def test_each_turn_keeps_its_finish_reason() -> None:
    trajectory = make_trajectory(turns=((2, 1), (3, 0)), finish_reason=FinishReason.LENGTH)
    assert [turn.finish_reason for turn in episode_of(make_task(), trajectory, 0, _letters).turns] == [FinishReason.LENGTH] * 2


def test_a_trajectory_without_a_turn_has_an_empty_completion() -> None:
    episode = episode_of(make_task(), make_trajectory(turns=()), 0, _letters)
    assert (episode.turns, episode.observations, episode.completion) == ((), (), "")
