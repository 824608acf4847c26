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

PPO = ("decoupled_clip", "clipped_surrogate")
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
@pytest.mark.parametrize("name", PPO)
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
            "num_masked": 0,
        },
        rel=1e-6,
    )


def test_an_enormous_gap_to_the_old_policy_is_counted_and_has_no_gradient() -> None:
    policy = torch.tensor([-50.0, -1.0], requires_grad=True)
    tokens = make_tokens(
        policy, behavior=torch.tensor([-250.0, -1.0]), advantages=torch.tensor([-1.0, -1.0]), mask=torch.tensor([True, True])
    )
    output = clipped_surrogate(tokens, SETTINGS)
    output.loss_sum.backward()
    assert policy.grad is not None
    assert policy.grad.tolist() == [0.0, 1.0]
    assert output.stats.to_floats()["num_clamped"] == 1


def test_dual_clip_bounds_a_very_bad_action_only() -> None:
    settings = LossSettings(ClipRange(0.2, 0.2), dual_clip=3.0)
    policy = torch.tensor([math.log(10.0), math.log(2.0), math.log(10.0)], requires_grad=True)
    tokens = make_tokens(policy, advantages=torch.tensor([-1.0, -1.0, 1.0]), mask=torch.ones(3, dtype=torch.bool))
    output = clipped_surrogate(tokens, settings)
    assert output.token_losses.tolist() == pytest.approx([3.0, 2.0, -1.2])  # 10 is cut to c = 3, 2 is not, 10 A is clipped
    output.loss_sum.backward()
    assert policy.grad is not None
    assert policy.grad.tolist() == pytest.approx([0.0, 2.0, 0.0])
    assert output.stats.to_floats()["num_clipped"] == 2


def test_masked_weights_stay_in_the_token_count() -> None:
    settings = LossSettings(ClipRange(0.2, 0.2), importance="mask")
    zeros = torch.zeros(3)
    tokens = make_tokens(
        zeros, behavior=torch.tensor([-2.0, 0.0, 0.0]), proximal=zeros, advantages=torch.ones(3),
        mask=torch.tensor([True, True, False]),
    )  # fmt: skip
    output = decoupled_clip(tokens, settings)
    assert output.token_losses.tolist() == [0.0, -1.0, 0.0]  # e² is above the cap
    stats = output.stats.to_floats()
    assert (stats["num_tokens"], stats["num_masked"], stats["num_truncated"]) == (2, 1, 1)


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
    ids = (torch.arange(len(rows)) >= at).long()  # a sequence is never cut
    whole = LOSSES[name](LossTokens(*tensors, ids, 2), SETTINGS)
    first, second = (LOSSES[name](LossTokens(*(t[part] for t in tensors)), SETTINGS) for part in (slice(at), slice(at, None)))
    assert (first.loss_sum + second.loss_sum).item() == pytest.approx(whole.loss_sum.item(), rel=1e-4, abs=1e-4)
    added = LossStats.zeros() + first.stats + second.stats
    assert added.to_floats() == pytest.approx(whole.stats.to_floats(), rel=1e-6)


def test_lengths_that_differ_are_refused() -> None:
    with pytest.raises(ShapeError, match=r"advantages=\[3\]"):
        make_tokens(torch.zeros(2), advantages=torch.zeros(3), mask=torch.ones(2, dtype=torch.bool))


@pytest.mark.parametrize(("low", "high"), [(0.0, 0.2), (1.1, 0.2), (0.2, 0.0), (-0.1, 0.2), (float("nan"), 0.2)])
def test_clip_ranges_that_cannot_work_are_refused(low: float, high: float) -> None:
    with pytest.raises(ValueError, match="0 < low <= 1"):
        ClipRange(low, high)


def test_a_cap_below_the_on_policy_weight_is_refused() -> None:
    with pytest.raises(ValueError, match="at least 1"):
        LossSettings(ClipRange(0.2, 0.2), importance_cap=0.9)
