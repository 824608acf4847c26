"""Losses whose ratio belongs to the sequence: GSPO and the geometric-mean policy optimization.

With log r_t = log policy/anchor of token t, and n trained tokens in the sequence:

    GSPO   s = exp(Σ log r_t / n)                      loss = −min(s A, clip(s) A)       Zheng et al. 2025 (arXiv:2507.18071)
    GMPO   s = exp(Σ clip±(log r_t) / n)               loss = −s A                       Zhao et al. 2025 (arXiv:2507.20673)

GMPO clips the log-ratio of each token on the side that matters (from above where A > 0, from below where A < 0). Both papers
take the mean over sequences of the token mean (`aggregation = "sequence_mean_of_means"`). The anchor is the behavior policy
unless told otherwise; with the proximal one, the loss is multiplied by the importance weight.

Both are biased off-policy: the geometric mean of the ratios is no likelihood ratio.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from async_rl.algorithms.importance import at_level, bounded_exp, log_ratio
from async_rl.algorithms.ppo import anchored, finish, surrogate
from async_rl.algorithms.tokens import LossOutput, LossSettings, LossTokens


def gspo(tokens: LossTokens, settings: LossSettings) -> LossOutput:
    """Return −min(s A, clip(s) A) per token, s the geometric mean of the sequence's ratios; equation 5 of the paper.

    The paper's clip range, 3e-4 and 4e-4, is that of long answers: the mean log-ratio shrinks with their length. Short ones
    need a wider one.
    """
    anchor_T, weight = anchored(tokens, settings, "behavior")
    logs_T = log_ratio(tokens.policy_logprobs, anchor_T, tokens.loss_mask)
    ratio = bounded_exp(at_level(logs_T, tokens, "geometric"))
    r_T, advantages_T, clip = ratio.values.detach(), tokens.advantages, settings.clip
    clipped = ((r_T > 1.0 + clip.high) & (advantages_T > 0)) | ((r_T < 1.0 - clip.low) & (advantages_T < 0))
    return finish(surrogate(ratio, tokens, settings), weight, ratio, tokens, clipped=clipped)


def gmpo(tokens: LossTokens, settings: LossSettings) -> LossOutput:
    """Return −s A per token, s the geometric mean of the clipped ratios; equation 4 of the paper.

    The clip range is one of the log-ratio: [−clip.low, +clip.high]; the paper takes 0.4 for both.
    """
    anchor_T, weight = anchored(tokens, settings, "behavior")
    logs_T = log_ratio(tokens.policy_logprobs, anchor_T, tokens.loss_mask)
    kept_T = _clipped_where_it_matters(logs_T, tokens.advantages, settings)
    ratio = bounded_exp(at_level(kept_T, tokens, "geometric"))
    clipped = kept_T.detach() != logs_T.detach()
    return finish(ratio.values * tokens.credit, weight, ratio, tokens, clipped=clipped)


def _clipped_where_it_matters(logs_T: Tensor, advantages_T: Tensor, settings: LossSettings) -> Tensor:
    low, high = -settings.clip.low, settings.clip.high
    if not math.isfinite(low + high):
        raise ValueError(f"ClipRange low={-low} high={high}: must be finite")
    return torch.where(advantages_T > 0, logs_T.clamp(max=high), logs_T.clamp(min=low))
