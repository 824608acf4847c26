"""The contracts are tested in the event loop that roles run in."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping

import pytest

from protocol.event_loop import loop_factory


def pytest_asyncio_loop_factories(
    config: pytest.Config, item: pytest.Item
) -> Mapping[str, Callable[[], asyncio.AbstractEventLoop]]:
    factory = loop_factory()
    return {"uvloop" if factory else "asyncio": factory or asyncio.new_event_loop}
