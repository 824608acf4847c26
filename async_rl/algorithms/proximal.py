"""The proximal policy of a drawn batch without a forward pass of its own: interpolated by version.

The logprob of a token moves from its behavior version to the version trained now; the proximal version (that of the
batch's first step) lies on the way, at the share alpha of the versions passed:

    log proximal = log behavior + alpha (log policy − log behavior)
    alpha = (v_proximal − v_behavior) / (v_policy − v_behavior)

Source: AReaL, "Proximal log-probability approximation" (its documentation, 2025). Exact where the behavior or the policy's
version is the proximal one: there alpha is 0 or 1. Between, it is a guess that costs nothing; `recompute` costs a forward pass
for all steps of a batch but the first.
"""

from __future__ import annotations

import torch
from torch import Tensor


def interpolated_logprobs(
    policy_logprobs_T: Tensor, behavior_logprobs_T: Tensor, lags_T: Tensor, *, steps_since_proximal: int
) -> Tensor:
    """Return the proximal logprobs, [T], detached.

    lags_T: int, versions between each token's behavior policy and the policy; steps_since_proximal: between the proximal
    policy and the policy (0 on the first step of a batch: the policy itself).
    """
    policy_T = policy_logprobs_T.detach()
    lags = lags_T.clamp(min=1)
    alpha_T = torch.where(lags_T > 0, (lags - steps_since_proximal).clamp(min=0) / lags, 1.0).to(policy_T.dtype)
    mixed_T = behavior_logprobs_T.to(policy_T.dtype) + alpha_T * (policy_T - behavior_logprobs_T)
    return torch.where(alpha_T == 1.0, policy_T, mixed_T)
