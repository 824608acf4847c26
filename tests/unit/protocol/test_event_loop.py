from __future__ import annotations

import asyncio
import sys

import pytest

from protocol import event_loop


async def _loop_module() -> str:
    return type(asyncio.get_running_loop()).__module__


def test_roles_run_on_uvloop_where_there_is_one() -> None:
    pytest.importorskip("uvloop")
    assert event_loop.run(_loop_module()).startswith("uvloop")


def test_without_uvloop_roles_run_on_asyncios_own_loop(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "uvloop", None)  # importing it fails
    assert event_loop.run(_loop_module()).startswith("asyncio")


def test_what_main_raises_comes_out() -> None:
    async def fail() -> None:
        raise LookupError("nothing there")

    with pytest.raises(LookupError, match="nothing there"):
        event_loop.run(fail())
