"""The table in docs/staleness.md is what the simulation prints."""

from __future__ import annotations

import runpy
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[3]
STEPS = 300


@pytest.fixture(scope="module")
def simulation() -> dict[str, Any]:
    return runpy.run_path(str(ROOT / "tests/bench/sim_stragglers.py"))


@pytest.fixture(scope="module")
def page(simulation: dict[str, Any]) -> str:
    text = (ROOT / "docs/staleness.md").read_text(encoding="utf-8")
    return text.partition(simulation["BEGIN"])[2].partition(simulation["END"])[0].strip()


def test_the_page_holds_every_cell_once(simulation: dict[str, Any], page: str) -> None:
    cells = [tuple(column.strip() for column in line.split("|")[1:4]) for line in page.splitlines()[2:]]
    lags = [("∞", "–"), *((str(lag), policy) for lag in simulation["MAX_LAGS"] for policy in simulation["POLICIES"])]
    assert cells == [(f"{sigma:g}", *lag) for sigma in simulation["SIGMAS"] for lag in lags]


def test_a_part_of_the_page_simulated_again_is_the_same(simulation: dict[str, Any], page: str) -> None:
    part = simulation["table"](STEPS, sigmas=[1.4], max_lags=[1], policies=["wait", "mask"])
    for line in part.splitlines():
        assert line in page.splitlines()


def test_waiting_discards_nothing_and_keeps_the_limit_dropping_selects_against_length(page: str) -> None:
    rows = [[column.strip() for column in line.split("|")[1:-1]] for line in page.splitlines()[2:]]
    limited = [row for row in rows if row[1] != "∞"]
    assert all(int(row[6]) <= int(row[1]) for row in limited)
    assert all((row[7], row[8], row[9]) == ("0.0%", "–", "1.00") for row in limited if row[2] == "wait")
    assert all(float(row[8]) > 1 and float(row[9]) <= 1 for row in limited if row[8] != "–")
