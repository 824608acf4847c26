"""The contracts are tested in the event loop that roles run in (see `protocol.event_loop`)."""

from __future__ import annotations

import asyncio
import sys

import pytest

if sys.version_info < (3, 14) and sys.platform != "win32":  # from 3.14 on policies are deprecated

    @pytest.fixture(scope="session")
    def event_loop_policy() -> asyncio.AbstractEventLoopPolicy:
        uvloop = pytest.importorskip("uvloop")
        policy: asyncio.AbstractEventLoopPolicy = uvloop.EventLoopPolicy()
        return policy
