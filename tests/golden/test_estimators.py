"""Which estimators are unbiased, shown by enumeration: exact to 1e-12 where the documentation says so, biased where it says so.

Run by `make test-estimators`, which prints the table.
"""

from __future__ import annotations

from typing import Any

import pytest
from rich.console import Console
from rich.table import Table

from async_rl.algorithms.losses import LossSettings
from async_rl.testing import enumeration as e
from async_rl.testing.enumeration import Row

DISTANCES = (0.107, 0.31, 0.615)
POLICIES = 25
PG, TOKEN, SEQUENCE = "policy_gradient", "token", "sequence"
EXACT, BIASED = "exact", "biased"
OFF_POLICY: tuple[tuple[str, str, str, dict[str, Any]], ...] = (
    ("no correction", BIASED, PG, {"importance": "none"}),
    ("token weights", BIASED, PG, {"importance": "exact"}),
    ("token weights, truncated at 2", BIASED, PG, {"importance": "truncate"}),
    ("sequence weights", EXACT, PG, {"importance": "exact", "importance_level": SEQUENCE}),
    ("sequence weights, truncated at 2", "exact below the cap", PG, {"importance": "truncate", "importance_level": SEQUENCE}),
    ("sequence weights, masked above 2", BIASED, PG, {"importance": "mask", "importance_level": SEQUENCE}),
    ("geometric weights", BIASED, PG, {"importance": "exact", "importance_level": "geometric"}),
    ("clipped_surrogate, no clip within reach", BIASED, "clipped_surrogate", {}),
    ("decoupled_clip, token weights", BIASED, "decoupled_clip", {"importance": "exact"}),
    ("decoupled_clip, sequence weights", EXACT, "decoupled_clip", {"importance": "exact", "importance_level": SEQUENCE}),
    ("gspo, no clip within reach", BIASED, "gspo", {}),
    ("gmpo, no clip within reach", BIASED, "gmpo", {}),
    ("cispo, no clip within reach", BIASED, "cispo", {}),
)


def off_policy_row(name: str, claim: str, loss: str, options: dict[str, Any]) -> Row:
    settings = LossSettings(e.WIDE, **options)

    def bias_at(distance: float) -> float:
        def measure(seed: int) -> float:
            policy, behavior, rewards = e.random_policies(seed, distance)
            gradient = e.expected_gradient(loss, settings, policy, behavior, rewards)
            return float(e.relative_bias(gradient, e.true_gradient(policy, rewards)))

        return float(e.median_bias(measure, POLICIES))

    return e.Row(name, claim, [bias_at(distance) for distance in DISTANCES], exact=claim == EXACT)


@pytest.fixture(scope="module")
def off_policy() -> dict[str, Row]:
    rows = {name: off_policy_row(name, *rest) for name, *rest in OFF_POLICY}
    kl = [
        e.median_bias(lambda seed, d=distance: e.kl_per_token(*e.random_policies(seed, d)[:2]), POLICIES)
        for distance in DISTANCES
    ]
    table = Table(title="bias of the gradient's expectation, off-policy (median of random policies, relative)")
    table.add_column("estimator")
    table.add_column("claim")
    for value in kl:
        table.add_column(f"KL {value:.3f}", justify="right")
    for row in rows.values():
        table.add_row(row.name, row.claim, *(f"{bias:.2g}" for bias in row.biases))
    Console(width=120).print(table)
    return rows


@pytest.mark.parametrize("name", [name for name, *_ in OFF_POLICY])
def test_the_claim_holds_off_policy(name: str, off_policy: dict[str, Row]) -> None:
    row = off_policy[name]
    assert row.holds, f"{name} is claimed to be {row.claim}, but its bias is {row.biases}"


def test_published_biases_come_out_in_size_and_order(off_policy: dict[str, Row]) -> None:
    """For other random policies at KL .0028, .025, .092: see the values below."""
    none, token = off_policy["no correction"].biases, off_policy["token weights"].biases
    truncated, masked = (off_policy[f"sequence weights, {how} 2"].biases for how in ("truncated at", "masked above"))
    assert none == pytest.approx([0.41, 1.20, 2.34], rel=0.2)
    assert token == pytest.approx([0.095, 0.29, 0.57], rel=0.2)
    assert truncated[1:] == pytest.approx([0.084, 0.59], rel=0.2)
    assert masked[1:] == pytest.approx([0.57, 1.13], rel=0.2)
    assert truncated[0] <= 1e-12  # no weight of these policies reaches the cap
    assert all(t <= m for t, m in zip(truncated, masked, strict=True))
    assert all(t < n for t, n in zip(token, none, strict=True))


def test_a_good_baseline_shrinks_the_bias_of_truncation() -> None:
    settings = LossSettings(e.WIDE, importance="truncate", importance_level="sequence")

    def bias(share: float) -> float:
        """With `share` of the expected reward as the baseline."""

        def measure(seed: int) -> float:
            policy, behavior, rewards = e.random_policies(seed, DISTANCES[2])
            value = float((e.logprobs(policy).sum(1).exp() * rewards).sum())
            gradient = e.expected_gradient(PG, settings, policy, behavior, rewards, baseline=share * value)
            return e.relative_bias(gradient, e.true_gradient(policy, rewards))

        return e.median_bias(measure, POLICIES)

    assert bias(1.0) < bias(0.5) < bias(0.0)


@pytest.mark.parametrize(
    ("estimator", "claim", "factor"), [("rloo", EXACT, 1.0), ("dr_grpo", "(1 − 1/G) × exact", 0.5), ("grpo", BIASED, None)]
)
def test_baselines_on_policy(estimator: str, claim: str, factor: float | None) -> None:
    """Groups of two, all 81 × 81 of them."""
    policy, _, rewards = e.random_policies(0, 0.0)
    exact = e.true_gradient(policy, rewards)
    gradient = e.expected_group_gradient(estimator, policy, rewards, group_size=2)
    if factor is None:
        scale = float((gradient * exact).sum() / exact.square().sum())
        bias = e.relative_bias(gradient / scale, exact)
        assert bias > 1e-3, "no multiple of it is the gradient"
    else:
        bias = e.relative_bias(gradient / factor, exact)
        assert bias <= 1e-12
    Console(width=120).print(f"{estimator:10} {claim:20} on-policy bias {bias:.2g}", highlight=False)


@pytest.mark.parametrize("distance", [0.0, DISTANCES[1]])
@pytest.mark.parametrize(
    ("gae_lambda", "critic", "claim"),
    [(1.0, "any", EXACT), (0.95, "perfect", EXACT), (0.0, "perfect", EXACT), (0.95, "any", BIASED), (0.0, "any", BIASED)],
)
def test_generalised_advantages(gae_lambda: float, critic: str, claim: str, distance: float) -> None:
    """λ = 1 is exact whatever the critic says, less only with one that is right. Off-policy with exact sequence weights."""
    policy, behavior, rewards = e.random_policies(0, distance)
    values = e.state_values(policy, rewards)
    if critic == "any":
        values = values + e.random_policies(7, 0.0)[0][:, 0]
    advantages = e.critic_advantages(values, rewards, gae_lambda=gae_lambda)
    settings = LossSettings(e.WIDE, importance="exact", importance_level="sequence")
    gradient = e.expected_gradient(PG, settings, policy, behavior, rewards, advantages=advantages)
    bias = e.relative_bias(gradient, e.true_gradient(policy, rewards))
    where = "off-policy" if distance else "on-policy"
    Console(width=120).print(
        f"gae λ={gae_lambda:<4g} {critic + ' critic':14} {where:10} {claim:12} bias {bias:.2g}", highlight=False
    )
    if claim == EXACT:
        assert bias <= 1e-12
    else:
        assert bias > 0.01


@pytest.mark.parametrize(
    ("estimator", "form", "on_policy", "off_policy_claim"),
    [
        ("k1", "plain", "no gradient", BIASED),
        ("k2", "plain", EXACT, BIASED),
        ("k3", "plain", BIASED, BIASED),
        ("k1", "unbiased", EXACT, EXACT),
        ("k2", "unbiased", EXACT, EXACT),
        ("k3", "unbiased", EXACT, EXACT),
    ],
)
def test_kl_gradients(estimator: Any, form: Any, on_policy: str, off_policy_claim: str) -> None:
    policy, behavior, _ = e.random_policies(0, DISTANCES[1])
    reference, _, _ = e.random_policies(99, 0.0)
    exact = e.true_kl_gradient(policy, reference)
    for sampled, claim in ((policy, on_policy), (behavior, off_policy_claim)):
        gradient = e.expected_kl_gradient(estimator, form, policy, sampled, reference)
        bias = e.relative_bias(gradient, exact)
        where = "on-policy" if sampled is policy else "off-policy"
        Console(width=120).print(f"KL {estimator} {form:9} {where:10} {claim:12} bias {bias:.2g}", highlight=False)
        if claim == EXACT:
            assert bias <= 1e-12
        elif claim == "no gradient":
            assert float(gradient.norm()) <= 1e-12
            assert bias == pytest.approx(1.0, abs=1e-12)
        else:
            assert bias > 0.01
