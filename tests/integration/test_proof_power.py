"""What the parts of a push's proof detect, with the real trainer and engine (figures: tests/bench/bench_proof.py)."""

from __future__ import annotations

from pathlib import Path

import pytest

from async_rl.testing.proof_power import (
    SMALL_STEP,
    USUAL_STEP,
    Pushing,
    canary_margins,
    detect,
    false_alarms,
    fault_cases,
)
from async_rl.testing.push_faults import PushFault
from async_rl.testing.tiny_models import TinyModel


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
async def test_every_fault_is_found_by_the_part_that_is_there_for_it(dtype: str, tmp_path: Path) -> None:
    for what, fault, learning_rate, tensor, other in fault_cases(tied=False):
        pushing = Pushing(tmp_path, TinyModel.LLAMA, dtype)
        found = await detect(pushing, fault, learning_rate=learning_rate, tensor=tensor, other=other)
        assert found.canary, what
        assert found.digest == (fault is not PushFault.STALE_COPY), what


@pytest.mark.parametrize("kind", [TinyModel.LLAMA_TIED, TinyModel.QWEN2, TinyModel.GEMMA2])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
async def test_the_canary_finds_an_old_copy_of_any_single_tensor(kind: TinyModel, dtype: str, tmp_path: Path) -> None:
    margins = await canary_margins(Pushing(tmp_path, kind, dtype))
    assert {name: margin for name, margin in margins.items() if margin <= 1} == {}


@pytest.mark.parametrize("learning_rate", [USUAL_STEP, SMALL_STEP])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
async def test_honest_pushes_pass(dtype: str, learning_rate: float, tmp_path: Path) -> None:
    assert await false_alarms(Pushing(tmp_path, TinyModel.LLAMA_TIED, dtype), 10, learning_rate=learning_rate) == 0
