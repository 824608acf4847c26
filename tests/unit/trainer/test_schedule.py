from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from async_rl.trainer.schedule import Schedule, ScheduleName


def test_warm_up_is_linear_and_reaches_the_peak_at_its_last_step() -> None:
    schedule = Schedule(peak=2.0, warmup_steps=10, max_steps=100)
    assert [schedule.learning_rate(step) for step in (1, 5, 10, 11, 100)] == pytest.approx([0.2, 1.0, 2.0, 2.0, 2.0])


def test_linear_falls_to_its_final_fraction_at_max_steps_and_stays() -> None:
    schedule = Schedule(peak=1.0, name="linear", warmup_steps=10, max_steps=110, final_fraction=0.1)
    # 10 → 1, halfway 60 → 0.55, 110 → 0.1
    assert [schedule.learning_rate(step) for step in (10, 60, 110, 500)] == pytest.approx([1.0, 0.55, 0.1, 0.1])


def test_cosine_passes_the_middle_at_half_its_fall() -> None:
    schedule = Schedule(peak=1.0, name="cosine", warmup_steps=0, max_steps=101, final_fraction=0.0)
    # step 1 → 1, a quarter (26) → (1 + cos 45°)/2 = 0.853553, half (51) → 0.5, end (101) → 0
    assert [schedule.learning_rate(step) for step in (1, 26, 51, 101)] == pytest.approx([1.0, 0.853553, 0.5, 0.0], abs=1e-6)


def test_step_21_after_a_stop_at_20_is_that_of_an_uninterrupted_run() -> None:
    def fresh() -> Schedule:
        return Schedule(peak=4e-4, name="linear", warmup_steps=10, max_steps=100)

    uninterrupted = fresh()
    rates = [uninterrupted.learning_rate(step) for step in range(1, 101)]
    assert [fresh().learning_rate(step) for step in range(21, 101)] == rates[20:]


@given(
    name=st.sampled_from(["constant", "linear", "cosine"]),
    warmup=st.integers(0, 50),
    max_steps=st.integers(1, 60),
    final=st.floats(0, 1),
    step=st.integers(1, 200),
)
def test_the_rate_is_positive_up_to_the_peak_for_every_setting(
    name: ScheduleName, warmup: int, max_steps: int, final: float, step: int
) -> None:
    rate = Schedule(peak=1.0, name=name, warmup_steps=warmup, max_steps=max_steps, final_fraction=final).learning_rate(step)
    assert 0.0 <= rate <= 1.0
