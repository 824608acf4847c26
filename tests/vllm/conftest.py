"""Options of the tests against real vLLM."""

from __future__ import annotations

import pytest

SMOKE = (
    "test_every_token_has_its_id_logprob_and_versions[vllm-",
    "test_a_stop_token_ends_the_completion_and_is_its_last_token[vllm]",
    "test_a_push_replaces_every_tensor[vllm-llama",
    "test_requests_wait_between_swap_and_serve[vllm]",
    "test_requests_survive_swaps_and_replay_under_the_versions_they_name[vllm",
    "test_kept_kv_is_recorded_as_old[vllm]",
    "test_logprobs_are_the_trainers_before_during_and_after_pushes",
    "test_members_of_a_group_share_the_kv_of_their_prompt",
    "test_a_tied_head_that_stays_stale_is_found_by_the_proof",
    "test_nothing_of_an_engine_outlives_it[starter-vllm]",
    "test_a_run_trains_with_vllm[gloo]",
)
"""Beginnings of their names. What counts is how many engines they start."""


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--smoke", action="store_true", help="the short ones, for continuous integration")


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Tests that can share an engine go together."""
    items.sort(key=lambda item: "vllm-server" in item.name)
    if config.getoption("--smoke"):
        items[:] = [item for item in items if item.name.startswith(SMOKE)]
