from __future__ import annotations

import pytest

from protocol.errors import QueueRefused
from protocol.redis_replies import check_server

GOOD = {"redis_version": "6.2.0", "maxmemory_policy": "noeviction"}


@pytest.mark.parametrize("version", ["6.2.0", "6.2.14", "7.0.15", "8.0.1", "10.0.0"])
def test_servers_from_6_2_on_are_accepted(version: str) -> None:
    check_server(GOOD | {"redis_version": version}, "redis://x")


@pytest.mark.parametrize("version", ["5.0.14", "6.0.16", "6.1.240"])
def test_older_servers_are_refused(version: str) -> None:
    with pytest.raises(QueueRefused, match=rf"redis://x is version {version}; needs Redis 6\.2"):
        check_server(GOOD | {"redis_version": version}, "redis://x")


def test_an_evicting_policy_is_refused() -> None:
    with pytest.raises(QueueRefused, match=r"maxmemory-policy=allkeys-lfu.*noeviction"):
        check_server(GOOD | {"maxmemory_policy": "allkeys-lfu"}, "redis://x")
