"""How the suite is shared out among processes (`make test` starts them with pytest-xdist)."""

from __future__ import annotations

import os
from collections.abc import Iterator
from typing import TYPE_CHECKING

# Before torch is imported anywhere: several processes share the cores, and threads that spin while they wait would take them.
os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")

import pytest

if TYPE_CHECKING:
    from async_rl.testing.shared_hosts import SharedHosts

RUNS = "runs"
"""The group of tests that start whole runs: one after the other, beside small tests. Two at once would wait for each other."""
LARGEST_FIRST = ("tests/integration/", "tests/contracts/", "tests/golden/", "tests/unit/")


def pytest_xdist_auto_num_workers(config: pytest.Config) -> int:
    """One process more than cores: most of the longer tests wait for processes of their own."""
    del config
    return min(8, (os.cpu_count() or 1) + 1)


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """In a process of several: keep the tests of a file together, for their servers and models, and begin with the largest."""
    if not hasattr(config, "workerinput"):
        return
    for item in items:
        if item.get_closest_marker("xdist_group") is None:
            item.add_marker(pytest.mark.xdist_group(item.nodeid.partition("::")[0]))
    items.sort(key=_turn)


def _turn(item: pytest.Item) -> int:
    marker = item.get_closest_marker("xdist_group")
    if marker is not None and marker.args == (RUNS,):
        return -1
    return next((turn for turn, place in enumerate(LARGEST_FIRST) if item.nodeid.startswith(place)), len(LARGEST_FIRST))


@pytest.fixture(scope="session")
def shared_hosts() -> Iterator[SharedHosts]:
    """Real vLLMs, for tests that are marked vllm; a start takes long."""
    from async_rl.testing.shared_hosts import SharedHosts

    hosts = SharedHosts()
    yield hosts
    hosts.close()
