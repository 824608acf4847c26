"""How the suite is shared out among processes (`make test` starts them with pytest-xdist)."""

from __future__ import annotations

import os

# Before torch is imported anywhere: several processes share the cores, and threads that spin while they wait would take them.
os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")

from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import pytest
from xdist.scheduler import LoadScopeScheduling

if TYPE_CHECKING:
    from async_rl.testing.shared_hosts import SharedHosts

LANES: Mapping[str, Sequence[str]] = {
    "runs": ("test_whole_run.py", "test_fsdp_ranks.py", "test_reward_workers.py", "test_broken_on_purpose.py"),
    "more runs": (
        "test_bad_input.py",
        "test_replay_and_fork.py",
        "test_trainer_recovery.py",
        "test_example_configs.py",
        "test_workers_come_and_go.py",
    ),
}
"""Files whose tests start several large processes. Those of a lane run one after the other."""
LARGEST_FIRST = ("tests/integration/", "tests/contracts/", "tests/golden/", "tests/unit/")


class ByFile(LoadScopeScheduling):
    """Keeps the tests of a file in one process, for their servers and models, and the files of a lane too."""

    def _split_scope(self, nodeid: str) -> str:
        path = nodeid.partition("::")[0]
        return _lane(path) or path


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_auto_num_workers(config: pytest.Config) -> int:
    """One process more than cores: most of the longer tests wait for processes of their own."""
    del config
    return min(8, (os.cpu_count() or 1) + 1)


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> ByFile:
    config.option.loadscopereorder = False  # our order, below, not that of the number of tests
    return ByFile(config, log)


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """In a process of several, begin with what takes longest."""
    if hasattr(config, "workerinput"):
        items.sort(key=lambda item: _turn(item.nodeid))


@pytest.fixture(scope="session")
def shared_hosts() -> Iterator[SharedHosts]:
    """Real vLLMs, for tests that are marked vllm; a start takes long."""
    from async_rl.testing.shared_hosts import SharedHosts

    hosts = SharedHosts()
    yield hosts
    hosts.close()


def _lane(path: str) -> str | None:
    name = path.rpartition("/")[2]
    return next((lane for lane, names in LANES.items() if name in names), None)


def _turn(nodeid: str) -> int:
    path = nodeid.partition("::")[0]
    if (lane := _lane(path)) is not None:
        return list(LANES).index(lane)
    place = next((turn for turn, folder in enumerate(LARGEST_FIRST) if path.startswith(folder)), len(LARGEST_FIRST))
    return len(LANES) + place
