"""The built-in losses and estimators pass the suite that users' own run through, and the suite finds what it is there for."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence

import numpy as np
import pytest
import torch
from torch import Tensor

from async_rl.algorithms.advantages import ADVANTAGES, credit_groups, find_advantage
from async_rl.algorithms.credit import AdvantageFn, AdvantageSettings, Float64Array, RewardGroup
from async_rl.algorithms.losses import LOSSES, ClipRange, LossSettings, LossTokens, find_loss, from_token_losses
from async_rl.config.algorithm import ADVANTAGE_NAMES, LOSS_NAMES, NEEDS_NO_GROUP
from async_rl.errors import ConfigError, ShapeError
from async_rl.testing.algorithms import DEFAULT_SETTINGS, check_advantage, check_loss, make_tokens

VARIANTS = {
    "default": DEFAULT_SETTINGS,
    "dual_clip": dataclasses.replace(DEFAULT_SETTINGS, dual_clip=3.0),
    "sequence": dataclasses.replace(DEFAULT_SETTINGS, importance_level="sequence"),
    "geometric_mask": dataclasses.replace(
        DEFAULT_SETTINGS, importance_level="geometric", importance="mask", importance_floor=0.5
    ),
    "exact": dataclasses.replace(DEFAULT_SETTINGS, importance="exact"),
}


@pytest.mark.parametrize("variant", VARIANTS)
@pytest.mark.parametrize("name", LOSSES)
def test_built_in_losses_conform(name: str, variant: str) -> None:
    check_loss(LOSSES[name], VARIANTS[variant])


@pytest.mark.parametrize("name", ["gspo", "gmpo", "cispo"])
def test_losses_against_the_proximal_policy_conform(name: str) -> None:
    check_loss(LOSSES[name], dataclasses.replace(DEFAULT_SETTINGS, anchor="proximal"))


@pytest.mark.parametrize("name", ADVANTAGES)
def test_built_in_estimators_conform(name: str) -> None:
    check_advantage(ADVANTAGES[name], group_relative=name not in NEEDS_NO_GROUP)


def test_names_in_the_config_are_those_of_the_tables() -> None:
    assert tuple(LOSSES) == LOSS_NAMES
    assert tuple(ADVANTAGES) == ADVANTAGE_NAMES


def users_loss(tokens: LossTokens, settings: LossSettings) -> Tensor:
    """Without a clip: −(policy/behavior) A, scaled."""
    return (
        -float(settings.args.get("scale", 1.0))
        * (tokens.policy_logprobs - tokens.behavior_logprobs).clamp(-20, 20).exp()
        * tokens.advantages
    )


def test_a_users_loss_is_found_by_reference_conforms_and_reads_its_arguments() -> None:
    loss = find_loss("tests_users_objective:users_loss")
    check_loss(loss)
    tokens = make_tokens()
    plain = loss(tokens, LossSettings(ClipRange(0.2, 0.2))).loss_sum
    scaled = loss(tokens, LossSettings(ClipRange(0.2, 0.2), args={"scale": 3.0})).loss_sum
    torch.testing.assert_close(scaled, 3 * plain)


def users_advantage(groups: Sequence[RewardGroup], settings: AdvantageSettings) -> Sequence[Float64Array]:
    """The best of a group against the rest of it."""
    return [group.spread((group.known == group.known.max(initial=-np.inf)) - 0.5) for group in groups]


def test_a_users_estimator_is_found_by_reference_and_conforms() -> None:
    estimator = find_advantage("tests_users_objective:users_advantage")
    check_advantage(estimator, group_relative=False)
    credited = credit_groups([RewardGroup.of([1.0, 0.0])], estimator, AdvantageSettings())
    assert credited[0].tolist() == [0.5, -0.5]


@pytest.fixture(autouse=True)
def users_module(monkeypatch: pytest.MonkeyPatch) -> None:
    """As if the user's file were on PYTHONPATH."""
    import sys
    import types

    module = types.ModuleType("tests_users_objective")
    module.users_loss, module.users_advantage = users_loss, users_advantage  # type: ignore[attr-defined]  # made here
    monkeypatch.setitem(sys.modules, "tests_users_objective", module)


@pytest.mark.parametrize(
    ("reference", "message"),
    [
        ("ppo2", "is unknown; use one of decoupled_clip, clipped_surrogate"),
        ("no_such_module:loss", "cannot be imported"),
        ("tests_users_objective:absent", "cannot be imported"),
        ("math:pi", "is a float; it must be a function"),
    ],
)
def test_what_is_no_loss_is_refused_with_what_would_be(reference: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        find_loss(reference)


def mean_over_the_micro_batch(tokens: LossTokens, settings: LossSettings) -> Tensor:
    return users_loss(tokens, settings) / len(tokens.loss_mask)


def baseline_of_the_micro_batch(tokens: LossTokens, settings: LossSettings) -> Tensor:
    return -(tokens.advantages - tokens.advantages.mean()) * tokens.policy_logprobs


def unbounded(tokens: LossTokens, settings: LossSettings) -> Tensor:
    return -(tokens.policy_logprobs - tokens.behavior_logprobs).exp() * tokens.advantages


def swallows_nan(tokens: LossTokens, settings: LossSettings) -> Tensor:
    return users_loss(tokens, settings).nan_to_num()


def rounds(tokens: LossTokens, settings: LossSettings) -> Tensor:
    return users_loss(tokens, settings).float()


def no_graph(tokens: LossTokens, settings: LossSettings) -> Tensor:
    return users_loss(tokens, settings) if tokens.loss_mask.any() else torch.zeros(len(tokens.loss_mask))


@pytest.mark.parametrize(
    ("function", "message"),
    [
        (mean_over_the_micro_batch, "depends on what it is packed with"),
        (baseline_of_the_micro_batch, "depends on what it is packed with|changes the loss of others"),
        (unbounded, "policy − behavior = 200"),
        (swallows_nan, "is hidden"),
        (rounds, "float64 logprobs give torch.float32"),
        (no_graph, "no gradient graph"),
    ],
)
def test_the_suite_finds_a_broken_loss(function: Callable[[LossTokens, LossSettings], Tensor], message: str) -> None:
    with pytest.raises(AssertionError, match=message):
        check_loss(from_token_losses(function))


def test_a_loss_that_returns_a_mean_is_refused() -> None:
    with pytest.raises(ShapeError, match="return one value per token"):
        from_token_losses(lambda tokens, settings: tokens.policy_logprobs.mean())(make_tokens(), DEFAULT_SETTINGS)


def _credits_invalid(groups: Sequence[RewardGroup], settings: AdvantageSettings) -> Sequence[Float64Array]:
    return [np.nan_to_num(group.rewards) - 1.0 for group in groups]


def _sorts_its_rows(groups: Sequence[RewardGroup], settings: AdvantageSettings) -> Sequence[Float64Array]:
    return [group.spread(np.sort(group.known)) for group in groups]


@pytest.mark.parametrize(
    ("estimator", "message"), [(_credits_invalid, "invalid trajectory got credit"), (_sorts_its_rows, "not aligned")]
)
def test_the_suite_finds_a_broken_estimator(estimator: AdvantageFn, message: str) -> None:
    with pytest.raises(AssertionError, match=message):
        check_advantage(estimator, group_relative=False)


def test_credit_of_another_shape_or_not_finite_is_refused() -> None:
    group = RewardGroup.of([1.0, 0.0])
    with pytest.raises(ShapeError, match="return one array"):
        credit_groups([group], lambda groups, settings: [np.zeros(3)], AdvantageSettings())
    with pytest.raises(ValueError, match="must be finite"):
        credit_groups([group], lambda groups, settings: [np.array([np.nan, 0.0])], AdvantageSettings())
