"""The soak's line: it finds growth, and takes no noise and no single step for it."""

from __future__ import annotations

import importlib.util
import random
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType

import pytest

CHAOS = Path(__file__).parents[2] / "chaos"
MIB = 2**20


@pytest.fixture
def soak(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.syspath_prepend(str(CHAOS))
    spec = importlib.util.spec_from_file_location("soak", CHAOS / "soak.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    monkeypatch.setitem(sys.modules, "soak", module)
    spec.loader.exec_module(module)
    return module


def samples(level_mib: Callable[[float], float], *, noise_mib: float = 2.0) -> list[tuple[float, int]]:
    """Thirty minutes, one every two seconds; `level_mib` of the hours since the start."""
    noise = random.Random(0)
    return [(at, int(MIB * (level_mib(at / 3600) + noise.gauss(0, noise_mib)))) for at in range(0, 1800, 2)]


def plan(soak: ModuleType) -> object:
    return soak.Plan(Path(), 0, 1800.0, 300.0, 60.0, soak.LIMIT_MIB_PER_H)


def test_a_leak_of_forty_mib_an_hour_is_found_within_its_interval(soak: ModuleType) -> None:
    line = soak.fit(samples(lambda hours: 300 + 40 * hours), plan(soak))
    assert line.windows == 25
    assert soak.LIMIT_MIB_PER_H < line.low < 40 < line.high
    assert line.slope == pytest.approx(40, abs=5)


def test_a_level_with_noise_is_no_leak(soak: ModuleType) -> None:
    line = soak.fit(samples(lambda _: 300.0, noise_mib=5.0), plan(soak))
    assert line.low < 0 < line.high


def test_what_came_before_the_settling_time_does_not_count(soak: ModuleType) -> None:
    line = soak.fit(samples(lambda hours: 100.0 if hours < 300 / 3600 else 300.0), plan(soak))
    assert line.low < 0 < line.high


def test_one_step_half_way_has_a_wide_interval_and_is_no_leak(soak: ModuleType) -> None:
    """An allocator takes another arena: neighbouring windows are alike, so they count as few."""
    line = soak.fit(samples(lambda hours: 300.0 if hours < 0.3 else 306.0, noise_mib=0.5), plan(soak))
    assert line.slope > 0
    assert line.low < soak.LIMIT_MIB_PER_H


def test_too_few_windows_make_no_line(soak: ModuleType) -> None:
    assert soak.fit(samples(lambda _: 300.0)[:220], plan(soak)) is None


@pytest.mark.parametrize(("freedom", "expected"), [(4, 2.776), (10, 2.228), (23, 2.069), (100, 1.984)])
def test_students_t_is_that_of_the_tables(soak: ModuleType, freedom: int, expected: float) -> None:
    assert soak.student_t_975(freedom) == pytest.approx(expected, abs=2e-3)


def test_growth_a_restart_and_a_process_without_samples_are_problems(soak: ModuleType) -> None:
    names = [*soak.ROLES, soak.SUPERVISOR, soak.SERVER, soak.SERVER_DATA]
    flat, steep = (soak.Fit(slope, slope - 1, slope + 1, 300.0, 301.0, 25) for slope in (0.0, 40.0))
    good = {"restarted": [], "exit_code": 143}
    assert soak.problems(dict.fromkeys(names, flat), good, plan(soak)) == []
    found = soak.problems({**dict.fromkeys(names[1:], flat), "trainer": steep}, {**good, "restarted": ["reward"]}, plan(soak))
    assert len(found) == 3
    assert "coordinator has no samples" in found[0]
    assert "trainer grows by 40.0 MiB an hour" in found[1]
    assert "restarted: ['reward']" in found[2]
