"""What must hold of a loss or an advantage estimator, built in or a user's own: run these in your tests.

    from async_rl.algorithms.losses import from_token_losses
    from async_rl.testing.algorithms import check_advantage, check_loss

    def test_my_loss_conforms():
        check_loss(from_token_losses(my_loss))

Each check raises AssertionError with what was violated, on which input.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import numpy as np
import torch
from torch import Tensor

from async_rl.algorithms.credit import AdvantageFn, AdvantageSettings, Float64Array, RewardGroup
from async_rl.algorithms.tokens import ClipRange, LossFn, LossSettings, LossTokens

NAN = float("nan")
DEFAULT_SETTINGS = LossSettings(ClipRange(0.2, 0.28))


def check_loss(loss: LossFn, settings: LossSettings = DEFAULT_SETTINGS, *, on_policy_exact: bool = True) -> None:
    """Raise unless `loss` can train: finite, masked, pure, of its own tokens and sequences alone, in float32 and float64.

    on_policy_exact: with policy = proximal = behavior its gradient is that of the policy gradient, −A ∇ log policy per token
    (for sequence losses: summed over each sequence). Every built-in loss has this property.
    """
    for check in (
        _leaves_masked_tokens_alone,
        _runs_backward_on_nothing,
        _survives_enormous_gaps,
        _surfaces_nan,
        _is_pure,
        _knows_its_own_sequence_only,
        _keeps_the_dtype,
    ):
        check(loss, settings)
    if on_policy_exact:
        _is_the_policy_gradient_on_policy(loss, settings)


def check_advantage(estimator: AdvantageFn, settings: AdvantageSettings | None = None, *, group_relative: bool = True) -> None:
    """Raise unless `estimator` credits what it is given: aligned with its rows, finite, nothing for what is invalid.

    group_relative: additionally equal rewards give exactly 0, a single reward too, and a constant added to a group's rewards
    changes nothing.
    """
    options = settings or AdvantageSettings()

    def run(*groups: RewardGroup) -> list[Float64Array]:
        return [np.asarray(values) for values in estimator(list(groups), options)]

    _credits_each_row(run)
    _follows_a_permutation(run)
    _gives_nothing_to_the_invalid(run)
    if group_relative:
        _credits_differences_only(run)


# -- losses --------------------------------------------------------------------------------------------------------------
def make_tokens(
    *, length: int = 6, sequences: int = 2, seed: int = 0, dtype: torch.dtype = torch.float32, gap: float = 0.1
) -> LossTokens:
    """Random tokens, all trained, in sequences of equal length; policies differ by about `gap` nats."""
    generator = torch.Generator().manual_seed(seed)

    def noise() -> Tensor:
        return torch.randn(length, generator=generator, dtype=dtype)

    behavior = -noise().abs() - 0.1
    policy = (behavior + gap * noise()).requires_grad_()
    return LossTokens(
        policy_logprobs=policy,
        proximal_logprobs=behavior + gap * noise(),
        behavior_logprobs=behavior,
        advantages=noise(),
        loss_mask=torch.ones(length, dtype=torch.bool),
        sequence_ids=torch.arange(sequences).repeat_interleave(length // sequences),
        num_sequences=sequences,
    )


def gradient(loss: LossFn, tokens: LossTokens, settings: LossSettings) -> tuple[Tensor, Tensor]:
    """(token losses, gradient of their sum in the policy's logprobs)"""
    losses = loss(tokens, settings).token_losses
    (grad,) = torch.autograd.grad(losses.sum(), tokens.policy_logprobs, allow_unused=True)
    return losses.detach(), torch.zeros_like(tokens.policy_logprobs) if grad is None else grad


def _with(tokens: LossTokens, **changes: Tensor) -> LossTokens:
    values = {name: getattr(tokens, name) for name in LossTokens.__slots__}
    return LossTokens(**{**values, **changes})


def _leaves_masked_tokens_alone(loss: LossFn, settings: LossSettings) -> None:
    base = make_tokens()
    hidden = torch.tensor([False, True, False, False, False, True])
    mask = ~hidden
    expected = gradient(loss, _with(base, loss_mask=mask), settings)
    garbage = {
        name: torch.where(hidden, NAN, getattr(base, name).detach())
        for name in ("policy_logprobs", "proximal_logprobs", "behavior_logprobs", "advantages")
    }
    garbage["policy_logprobs"].requires_grad_()
    got = gradient(loss, _with(base, loss_mask=mask, **garbage), settings)
    for what, mine, other in zip(("loss", "gradient"), got, expected, strict=True):
        assert (mine[hidden] == 0).all(), f"the {what} of masked tokens is {mine[hidden].tolist()}, not exactly 0"
        assert torch.equal(mine, other), f"what masked tokens hold changes the {what} of others: {mine} against {other}"
    assert (got[1][mask] != 0).any(), "no trained token has a gradient"


def _runs_backward_on_nothing(loss: LossFn, settings: LossSettings) -> None:
    for length in (0, 1, 4):
        tokens = make_tokens(length=length, sequences=1)
        tokens = _with(tokens, loss_mask=torch.zeros(length, dtype=torch.bool))
        losses = loss(tokens, settings).token_losses
        assert losses.requires_grad, "with no trained token the loss has no gradient graph: an empty micro-batch would hang"
        torch.autograd.backward(losses.sum())
        assert losses.detach().tolist() == [0.0] * length, f"no token is trained, but the losses are {losses.tolist()}"


def _survives_enormous_gaps(loss: LossFn, settings: LossSettings) -> None:
    for gap in (200.0, -200.0):
        for advantage in (0.0, 1.0, -1.0):
            policy = torch.tensor([gap - 250.0, -1.0], requires_grad=True)
            behavior = torch.tensor([-250.0, -1.0])
            credit, mask = torch.full((2,), advantage), torch.ones(2, dtype=torch.bool)
            tokens = LossTokens(policy, behavior, behavior, credit, mask, torch.tensor([0, 1]), 2)
            losses, grad = gradient(loss, tokens, settings)
            assert losses.isfinite().all(), f"policy − behavior = {gap}, advantage {advantage}: losses {losses.tolist()}"
            assert grad.isfinite().all(), f"policy − behavior = {gap}, advantage {advantage}: gradient {grad.tolist()}"


def _surfaces_nan(loss: LossFn, settings: LossSettings) -> None:
    base = make_tokens()
    for name in ("policy_logprobs", "advantages"):
        broken = getattr(base, name).detach().clone()
        broken[0] = NAN
        losses = loss(_with(base, **{name: broken}), settings).token_losses
        assert losses.isnan().any(), f"a NaN in {name} of a trained token is hidden: losses {losses.tolist()}"


def _is_pure(loss: LossFn, settings: LossSettings) -> None:
    tokens = make_tokens()
    before = {name: getattr(tokens, name).detach().clone() for name in LossTokens.__slots__ if name != "num_sequences"}
    first, second = gradient(loss, tokens, settings), gradient(loss, tokens, settings)
    assert all(torch.equal(one, two) for one, two in zip(first, second, strict=True)), "called twice, it returns two results"
    for name, value in before.items():
        assert torch.equal(getattr(tokens, name).detach(), value), f"it changes {name} in place"


def _knows_its_own_sequence_only(loss: LossFn, settings: LossSettings) -> None:
    tokens = make_tokens(length=6, sequences=2)
    whole = gradient(loss, tokens, settings)
    for sequence, part in enumerate((slice(0, 3), slice(3, 6))):
        arrays = {
            name: getattr(tokens, name).detach()[part]
            for name in ("policy_logprobs", "proximal_logprobs", "behavior_logprobs", "advantages", "loss_mask")
        }
        arrays["policy_logprobs"].requires_grad_()
        alone = gradient(loss, LossTokens(**arrays), settings)
        for what, mine, other in zip(("loss", "gradient"), alone, whole, strict=True):
            assert torch.allclose(mine, other[part], rtol=1e-5, atol=1e-6), (
                f"the {what} of sequence {sequence} depends on what it is packed with: {mine} alone, {other[part]} packed"
            )


def _keeps_the_dtype(loss: LossFn, settings: LossSettings) -> None:
    losses = loss(make_tokens(dtype=torch.float64), settings).token_losses
    assert losses.dtype == torch.float64, f"float64 logprobs give {losses.dtype} losses; enumeration needs float64"
    rounded = loss(make_tokens(dtype=torch.bfloat16), settings).token_losses
    assert rounded.dtype in (torch.float32, torch.bfloat16), f"bfloat16 logprobs give {rounded.dtype} losses"


def _is_the_policy_gradient_on_policy(loss: LossFn, settings: LossSettings) -> None:
    tokens = make_tokens(dtype=torch.float64)
    same = tokens.policy_logprobs.detach()
    credit = tokens.spread(torch.tensor([1.5, -0.5], dtype=torch.float64))  # of whole sequences, as group estimators give it
    on_policy = _with(tokens, behavior_logprobs=same, proximal_logprobs=same, advantages=credit)
    _, grad = gradient(loss, on_policy, settings)
    assert torch.allclose(grad, -credit, rtol=1e-12, atol=1e-12), (
        f"on-policy the gradient is {grad.tolist()}, not minus the advantages {(-credit).tolist()}"
    )


# -- advantages ----------------------------------------------------------------------------------------------------------
def _example_groups() -> list[RewardGroup]:
    return [
        RewardGroup.of([1.0, 0.0, 1.0], num_tokens=[3, 5, 2]),
        RewardGroup.of([0.5, 0.25, NAN, 1.0], valid=[True, True, False, True], num_tokens=[1, 4, 0, 2]),
    ]


_Run = Callable[..., list[Float64Array]]


def _credits_each_row(run: _Run) -> None:
    groups = _example_groups()
    credited = run(*groups)
    shapes = [values.shape for values in credited]
    assert shapes == [group.rewards.shape for group in groups], f"groups of 3 and 4 got credit of shapes {shapes}"
    for values, group in zip(credited, groups, strict=True):
        assert np.isfinite(values).all(), f"rewards {group.rewards.tolist()} got credit {values.tolist()}"
    assert not any(len(values) for values in run()), "no groups got credit"


def _follows_a_permutation(run: _Run) -> None:
    groups = _example_groups()
    order = np.array([2, 0, 1])
    first = groups[0]
    moved = RewardGroup(first.rewards[order], first.valid[order], first.num_tokens[order])
    plain, permuted = run(*groups)[0], run(moved, groups[1])[0]
    assert np.allclose(permuted, plain[order], rtol=0, atol=1e-12), (
        f"rows are not aligned: credit {plain.tolist()} of rewards {first.rewards.tolist()} became {permuted.tolist()} in "
        f"order {order.tolist()}"
    )


def _gives_nothing_to_the_invalid(run: _Run) -> None:
    groups = _example_groups()
    invalid = groups[1]
    values = run(*groups)[1]
    assert values[2] == 0, f"an invalid trajectory got credit {values[2]}"
    kept = RewardGroup(invalid.rewards[invalid.valid], invalid.valid[invalid.valid], invalid.num_tokens[invalid.valid])
    alone = run(groups[0], kept)[1]
    assert np.allclose(values[invalid.valid], alone, rtol=0, atol=1e-12), "an invalid trajectory changes its siblings' credit"
    nothing = RewardGroup.of([NAN, NAN], valid=[False, False])
    assert run(nothing)[0].tolist() == [0.0, 0.0], "a group without a valid reward got credit"


def _credits_differences_only(run: _Run) -> None:
    for reward in (0.7, 0.1, -1 / 3, 1e-300, 0.0):
        equal: Sequence[float] = run(RewardGroup.of([reward] * 7))[0].tolist()
        assert equal == [0.0] * 7, f"seven rewards of {reward} got credit {equal}, not exactly 0"
    single = run(RewardGroup.of([0.7]))[0].tolist()
    assert single == [0.0], f"a single reward got credit {single}"
    plain, shifted = (run(RewardGroup.of(np.array([1.0, 0.0, 0.5]) + constant))[0] for constant in (0.0, 4.0))
    assert math.isclose(float(np.abs(plain - shifted).max()), 0.0, abs_tol=1e-9), "a constant in every reward changes credit"
