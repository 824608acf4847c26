"""The objective: which loss, which credit, which corrections. Defaults are the papers', see docs/algorithms.md."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final, Literal

from pydantic import Field

from async_rl.config.base import LONGEST_TOKENS, MOST, StrictModel

LOSS_NAMES: Final = ("decoupled_clip", "clipped_surrogate", "gspo", "gmpo", "cispo", "policy_gradient")
ADVANTAGE_NAMES: Final = ("grpo", "dr_grpo", "rloo", "reinforce_pp", "reinforce_pp_baseline", "gae")
NEEDS_NO_GROUP: Final = ("reinforce_pp", "gae")
"""Estimators that do not compare the members of a group."""

AggregationName = Literal["token_mean", "sequence_mean_of_means", "sequence_mean_of_sums", "constant"]

CLIPS: Mapping[str, tuple[float, float]] = {"gspo": (3e-4, 4e-4), "gmpo": (0.4, 0.4), "cispo": (1.0, 4.0)}
"""clip_low and clip_high where they are not set; all others 0.2 and 0.28 (DAPO)."""
SEQUENCE_LOSSES: Final = ("gspo", "gmpo")


class AlgorithmConfig(StrictModel):
    """The objective. Each choice, its formula, its bias and what warns of trouble: docs/algorithms.md."""

    loss: str = "clipped_surrogate"
    """Policy loss: `clipped_surrogate` (PPO clip against the behavior policy), `decoupled_clip` (clip against the proximal
    policy, times an importance weight to the behavior policy), `gspo`, `gmpo`, `cispo`, `policy_gradient`, or `module:function`
    of your own."""
    advantage: str = "grpo"
    """Credit of a trajectory: `grpo` ((r − mean)/std of its group), `dr_grpo` (r − mean), `rloo` (leave one out),
    `reinforce_pp` (whitened over the batch), `reinforce_pp_baseline` (r − mean, whitened), `gae` (per token, from the critic of
    [critic]), or `module:function`."""
    credit: Literal["trajectory", "turns"] = "trajectory"
    """`trajectory`: all of its tokens get its advantage. `turns`: with grpo and dr_grpo, and environments that reward turns: a
    token gets what its turn and the later ones earned, relative to the turns of its group."""
    turn_discount: float = Field(1.0, gt=0, le=1)
    """With credit = turns: discount per token of the policy's own; a tool's or an environment's take no step."""
    advantage_eps: float = Field(1e-6, gt=0, le=1)
    """Added to the standard deviation of a group's rewards."""
    aggregation: AggregationName | None = None
    """From token losses to one number, always over the whole step. Unset: `token_mean`; for gspo and gmpo
    `sequence_mean_of_means`."""
    aggregation_constant: float | None = Field(None, gt=0, le=1e12)
    """With aggregation = constant: the sum over tokens is divided by this."""
    clip_low: float | None = Field(None, gt=0, le=1)
    """Ratios are clipped below at 1 − clip_low (gmpo: log-ratios at −clip_low). Unset: 0.2; gspo 3e-4, gmpo 0.4, cispo 1."""
    clip_high: float | None = Field(None, gt=0, le=1e6)
    """Ratios are clipped above at 1 + clip_high (gmpo: log-ratios at clip_high). Unset: 0.28; gspo 4e-4, gmpo 0.4, cispo 4."""
    dual_clip: float | None = Field(None, gt=1, le=1e6)
    """The clipped losses' bound on what one token of negative advantage can do, in units of it; the paper's: 3. Unset: off."""
    anchor: Literal["behavior", "proximal"] | None = None
    """Policy that gspo, gmpo and cispo take ratios against; with `proximal` their loss is multiplied by the importance weight.
    Unset: behavior. decoupled_clip and clipped_surrogate have theirs by definition."""
    proximal: Literal["recompute", "interpolate"] = "recompute"
    """Logprobs of the policy at the start of a drawn batch, for its later steps: a forward pass, or a guess by version."""
    importance: Literal["none", "exact", "truncate", "mask"] = "truncate"
    """What becomes of importance weights: left out, exact (unbounded), min(w, importance_cap), or 0 outside the bounds.
    clipped_surrogate has none, nor have gspo, gmpo and cispo without anchor = proximal."""
    importance_level: Literal["token", "sequence", "geometric"] = "token"
    """Weights per token, per sequence (product over its tokens), or the geometric mean of a sequence's tokens."""
    importance_cap: float = Field(2.0, ge=1, le=1e6)
    """Importance weights above are truncated or masked."""
    importance_floor: float = Field(0.0, ge=0, le=1)
    """With importance = mask: weights below are masked too."""
    kl_coef: float = Field(0.0, ge=0, le=1e3)
    """Weight of the KL divergence to the reference policy; 0: no reference is loaded."""
    kl_estimator: Literal["k1", "k2", "k3"] = "k3"
    """d, d²/2 or exp(−d) − 1 + d, with d = log policy/reference of a sampled token."""
    kl_in: Literal["loss", "reward"] = "loss"
    """A differentiated loss beside the policy loss, or taken off each trajectory's reward."""
    kl_form: Literal["unbiased", "plain"] = "unbiased"
    """In the loss: weighed by the importance ratio so that its gradient is that of the KL, or as it stands (biased)."""
    reference: Path | None = Field(None, strict=False)
    """Model directory of the reference policy. Unset: model.path, the policy that the run began with."""
    dynamic_sampling: bool = False
    """Drop groups whose valid rewards do not differ; admission replaces them."""
    max_groups_without_signal: int = Field(1024, ge=1, le=MOST)
    """With dynamic_sampling: this many such groups in a row end the run with an error that says so."""
    mask_truncated: bool = False
    """Do not train trajectories that ran into a length limit; their rewards stay in the baseline."""
    overlong_buffer: int = Field(0, ge=0, le=LONGEST_TOKENS)
    """Tokens before rollout.max_new_tokens over which a penalty grows from 0 to overlong_penalty; 0: off."""
    overlong_penalty: float = Field(1.0, gt=0, le=1e6)
    """Taken off the reward of an answer as long as the limit."""
    loss_args: dict[str, Any] = Field(default_factory=dict)
    """For a loss of your own: settings.args."""
    advantage_args: dict[str, Any] = Field(default_factory=dict)
    """For an estimator of your own: settings.args."""

    @property
    def weighs(self) -> bool:
        """Whether the loss is multiplied by an importance weight, as `importance` and its level and cap say."""
        return self.loss != "clipped_surrogate" and (self.loss not in CLIPS or self.anchor == "proximal")

    @property
    def clip(self) -> tuple[float, float]:
        """clip_low and clip_high, with the loss's own where they are not set."""
        low, high = CLIPS.get(self.loss, (0.2, 0.28))
        return (low if self.clip_low is None else self.clip_low, high if self.clip_high is None else self.clip_high)

    @property
    def aggregation_name(self) -> AggregationName:
        """aggregation, with the loss's own where it is not set."""
        if self.aggregation is not None:
            return self.aggregation
        return "sequence_mean_of_means" if self.loss in SEQUENCE_LOSSES else "token_mean"


class CriticConfig(StrictModel):
    """The value model of `algorithm.advantage = "gae"`: a trunk of its own, and a head of one number."""

    path: Path | None = Field(None, strict=False)
    """Model directory that its trunk starts from; its head starts at 0. Unset: model.path."""
    learning_rate: float = Field(1e-5, gt=0, le=1)
    """Peak learning rate of its AdamW. Schedule, betas, weight decay and gradient clip are the trainer's."""
    gamma: float = Field(1.0, gt=0, le=1)
    """Discount per trained token."""
    gae_lambda: float = Field(0.95, ge=0, le=1)
    """λ of the generalised advantages. 1: unbiased whatever the critic says; less: less variance, and the critic's own bias."""
    whiten: bool = True
    """Shift and scale a step's advantages to mean 0 and standard deviation 1 over its trained tokens."""
    value_clip: float | None = Field(0.2, gt=0, le=1e6)
    """On one batch a value moves by no more than this, in units of the return. Unset: unbounded."""
    updates_per_step: int = Field(1, ge=1, le=1000)
    """Optimizer steps of the critic on the tokens of each step of the policy."""
