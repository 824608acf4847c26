from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from async_rl.algorithms.losses import (
    LOSSES,
    ClipRange,
    LossSettings,
    LossStats,
    LossTokens,
    clipped_surrogate,
    decoupled_clip,
)
from async_rl.errors import ShapeError

SETTINGS = LossSettings(ClipRange(0.2, 0.28), importance_cap=2.0)
LN2 = math.log(2.0)


def make_tokens(
    policy: Tensor, *, behavior: Tensor | None = None, proximal: Tensor | None = None, advantages: Tensor, mask: Tensor
) -> LossTokens:
    zeros = torch.zeros(len(policy))
    behavior = zeros if behavior is None else behavior
    return LossTokens(policy, behavior if proximal is None else proximal, behavior, advantages, mask)


@pytest.mark.parametrize(
    ("log_ratio", "advantage", "gradient"),
    [
        (0.0, 1.0, -1.0),  # −r A
        (0.1, 3.0, -3.0 * math.exp(0.1)),
        (0.5, 1.0, 0.0),  # above 1.28 and wanted higher: clipped
        (0.5, -1.0, math.exp(0.5)),  # above, and wanted lower: not clipped
        (-0.5, -1.0, 0.0),  # below 0.8 and wanted lower: clipped
        (-0.5, 1.0, -math.exp(-0.5)),
    ],
)
@pytest.mark.parametrize("name", LOSSES)
def test_clip_takes_the_gradient_only_on_the_side_that_gains(
    name: str, log_ratio: float, advantage: float, gradient: float
) -> None:
    policy = torch.tensor([log_ratio], requires_grad=True)
    output = LOSSES[name](make_tokens(policy, advantages=torch.tensor([advantage]), mask=torch.tensor([True])), SETTINGS)
    output.loss_sum.backward()
    assert policy.grad is not None
    assert policy.grad.item() == pytest.approx(gradient, rel=1e-6)
    assert output.stats.to_floats()["num_clipped"] == (gradient == 0.0)


def test_clipped_surrogate_ignores_the_proximal_policy() -> None:
    tokens = make_tokens(
        torch.zeros(1), proximal=torch.tensor([7.0]), advantages=torch.tensor([2.0]), mask=torch.tensor([True])
    )
    assert clipped_surrogate(tokens, SETTINGS).loss_sum.item() == -2.0


def test_decoupled_clip_weighs_by_who_sampled_even_with_one_step_per_batch() -> None:
    policy = torch.tensor([math.log(1.5) - 1.0, 3 * LN2 - 1.0, -1.0 - LN2], requires_grad=True)  # weights 1.5, 8 → 2, 1/2
    tokens = make_tokens(
        policy,
        proximal=policy.detach(),
        behavior=torch.full((3,), -1.0),
        advantages=torch.tensor([1.0, 1.0, -1.0]),
        mask=torch.ones(3, dtype=torch.bool),
    )
    output = decoupled_clip(tokens, SETTINGS)
    output.loss_sum.backward()
    assert output.loss_sum.item() == pytest.approx(-1.5 - 2.0 + 0.5)
    assert policy.grad is not None
    assert policy.grad.tolist() == pytest.approx([-1.5, -2.0, 0.5])
    assert output.stats.to_floats() == pytest.approx(
        {
            "num_tokens": 3,
            "num_clipped": 0,
            "num_clamped": 0,
            "num_truncated": 1,
            "ratio_sum": 3,
            "weight_sum": 10.0,
            "weight_squared_sum": 2.25 + 64 + 0.25,
        },
        rel=1e-6,
    )


@pytest.mark.parametrize("name", LOSSES)
def test_gradient_is_exactly_zero_on_tool_tokens_whatever_they_hold(name: str) -> None:
    nan = float("nan")
    logits = torch.tensor([[0.2, -0.4], [0.1, 0.3], [-0.5, 0.6]], requires_grad=True)  # model, tool, model
    policy = logits.log_softmax(-1)[:, 0]
    garbage = torch.tensor([-0.45, nan, -1.4])  # close to the policy's −0.437 and −1.387: nothing is clipped
    tokens = make_tokens(
        policy,
        behavior=garbage,
        proximal=policy.detach(),
        advantages=torch.tensor([1.0, nan, -1.0]),
        mask=torch.tensor([True, False, True]),
    )
    output = LOSSES[name](tokens, SETTINGS)
    output.loss_sum.backward()
    assert logits.grad is not None
    assert logits.grad[1].tolist() == [0.0, 0.0]
    assert (logits.grad[[0, 2]] != 0).all()
    assert all(map(math.isfinite, [output.loss_sum.item(), *output.stats.to_floats().values()]))


@pytest.mark.parametrize("name", LOSSES)
@pytest.mark.parametrize("gap", [200.0, -200.0])
@pytest.mark.parametrize("advantage", [0.0, 1.0, -1.0])
def test_an_enormous_gap_to_the_old_policy_keeps_loss_and_gradient_finite(name: str, gap: float, advantage: float) -> None:
    policy = torch.tensor([gap - 250.0, -1.0], requires_grad=True)
    tokens = make_tokens(
        policy,
        behavior=torch.tensor([-250.0, -1.0]),
        advantages=torch.tensor([advantage, advantage]),
        mask=torch.tensor([True, True]),
    )
    output = LOSSES[name](tokens, SETTINGS)
    output.loss_sum.backward()
    assert policy.grad is not None
    assert math.isfinite(output.loss_sum.item())
    assert policy.grad.isfinite().all()
    assert output.stats.to_floats()["num_clamped"] == 1
    if advantage == 0.0:
        assert (output.loss_sum.item(), policy.grad.tolist()) == (0.0, [0.0, 0.0])


@pytest.mark.parametrize("name", LOSSES)
@pytest.mark.parametrize("field", ["policy", "behavior", "advantage"])
def test_a_genuine_nan_surfaces(name: str, field: str) -> None:
    values = {"policy": -1.0, "behavior": -1.0, "advantage": 0.0} | {field: float("nan")}
    tokens = make_tokens(
        torch.tensor([values["policy"]]),
        behavior=torch.tensor([values["behavior"]]),
        advantages=torch.tensor([values["advantage"]]),
        mask=torch.tensor([True]),
    )
    assert math.isnan(LOSSES[name](tokens, SETTINGS).loss_sum.item())


@pytest.mark.parametrize("name", LOSSES)
@pytest.mark.parametrize("length", [0, 1, 3])
def test_nothing_trained_gives_a_zero_that_runs_backward(name: str, length: int) -> None:
    policy = torch.full((length,), -1.0, requires_grad=True)
    tokens = make_tokens(policy, advantages=torch.ones(length), mask=torch.zeros(length, dtype=torch.bool))
    output = LOSSES[name](tokens, SETTINGS)
    output.loss_sum.backward()
    assert output.loss_sum.item() == 0.0
    assert policy.grad is not None
    assert policy.grad.tolist() == [0.0] * length
    assert set(output.stats.to_floats().values()) == {0.0}


log_values = st.floats(-3, 0, width=32)


@settings(max_examples=40, deadline=None)
@given(
    rows=st.lists(st.tuples(log_values, log_values, log_values, st.floats(-2, 2, width=32), st.booleans()), min_size=2),
    cut=st.integers(1, 100),
    name=st.sampled_from(sorted(LOSSES)),
)
def test_loss_and_stats_add_up_over_any_cut_into_micro_batches(
    rows: list[tuple[float, float, float, float, bool]], cut: int, name: str
) -> None:
    columns = list(zip(*rows, strict=True))
    tensors = [torch.tensor(column, dtype=torch.float32) for column in columns[:4]] + [torch.tensor(columns[4])]
    at = cut % len(rows)
    whole = LOSSES[name](LossTokens(*tensors), SETTINGS)
    first, second = (LOSSES[name](LossTokens(*(t[part] for t in tensors)), SETTINGS) for part in (slice(at), slice(at, None)))
    assert (first.loss_sum + second.loss_sum).item() == pytest.approx(whole.loss_sum.item(), rel=1e-4, abs=1e-4)
    added = LossStats.zeros() + first.stats + second.stats
    assert added.to_floats() == pytest.approx(whole.stats.to_floats(), rel=1e-6)


def test_lengths_that_differ_are_refused() -> None:
    with pytest.raises(ShapeError, match=r"advantages=\[3\]"):
        make_tokens(torch.zeros(2), advantages=torch.zeros(3), mask=torch.ones(2, dtype=torch.bool))


@pytest.mark.parametrize(("low", "high"), [(0.0, 0.2), (1.0, 0.2), (0.2, 0.0), (-0.1, 0.2), (float("nan"), 0.2)])
def test_clip_ranges_that_cannot_work_are_refused(low: float, high: float) -> None:
    with pytest.raises(ValueError, match="0 < low < 1"):
        ClipRange(low, high)


def test_a_cap_below_the_on_policy_weight_is_refused() -> None:
    with pytest.raises(ValueError, match="at least 1"):
        LossSettings(ClipRange(0.2, 0.2), importance_cap=0.9)
