"""Options of the tests against real vLLM."""

from __future__ import annotations

import pytest

SMOKE = {
    "test_a_tied_head_that_stays_stale_is_found_by_the_proof",
    "test_logprobs_are_the_trainers_before_during_and_after_pushes",
    "test_a_run_trains_with_vllm",
    "test_nothing_of_an_engine_outlives_it",
    "test_every_token_has_its_id_logprob_and_versions",
    "test_a_stop_token_ends_the_completion_and_is_its_last_token",
    "test_a_push_replaces_every_tensor",
    "test_requests_survive_swaps_and_replay_under_the_versions_they_name",
    "test_kept_kv_is_recorded_as_old",
    "test_requests_wait_between_swap_and_serve",
}
SMOKE_OF_SERVER = {
    "test_every_token_has_its_id_logprob_and_versions",
    "test_requests_survive_swaps_and_replay_under_the_versions_they_name",
}


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--smoke", action="store_true", help="the short ones, for continuous integration")


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Engines last to be started are kept: tests of one engine go together."""
    items.sort(key=lambda item: "vllm-server" in item.name)
    if config.getoption("--smoke"):
        items[:] = [item for item in items if _is_short(item)]


def _is_short(item: pytest.Item) -> bool:
    name = getattr(item, "originalname", item.name)
    return name in (SMOKE_OF_SERVER if "vllm-server" in item.name else SMOKE)
