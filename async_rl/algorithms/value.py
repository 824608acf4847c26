"""What a value function learns: squared errors to returns, bounded by a clip around the values that gave the advantages.

    loss = ½ max((V − R)², (clip(V) − R)²),    clip(V) = V within [V_old − ε, V_old + ε]

The clip keeps a value from moving by more than ε on one batch: beyond, towards the return, the loss is flat. It binds only once
the value function has moved since its old values were computed.

Source: the reference implementation of PPO (Schulman et al. 2017; baselines, ppo2), as described by Huang et al. 2022, "The 37
implementation details of PPO", detail 9.
"""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from async_rl.algorithms.credit import Float64Array
from async_rl.algorithms.tokens import masked, require_same_length, working


def clipped_value_loss(
    values_T: Tensor, old_values_T: Tensor, returns_T: Tensor, loss_mask_T: Tensor, *, clip: float | None
) -> tuple[Tensor, Tensor]:
    """Return (losses [T], differentiable in values_T, 0 where not trained; bool [T], True where the clip took the gradient).

    clip: ε, in units of the return; None: plain squared errors. What is not trained may hold anything, NaN included.
    Raises: ShapeError unless all are [T].
    """
    require_same_length(values=values_T, old_values=old_values_T, returns=returns_T, loss_mask=loss_mask_T)
    values_T, old_T, returns_T = (masked(working(rows), loss_mask_T) for rows in (values_T, old_values_T, returns_T))
    errors_T = (values_T - returns_T).square()
    if clip is None:
        return 0.5 * errors_T, torch.zeros_like(loss_mask_T)
    moved_T = values_T - old_T
    bounded_errors_T = (old_T + moved_T.clamp(-clip, clip) - returns_T).square()
    clipped_T = (bounded_errors_T > errors_T) & (moved_T.abs() > clip)
    return 0.5 * torch.maximum(errors_T, bounded_errors_T), clipped_T


def explained_variance(values_N: Float64Array, returns_N: Float64Array) -> float | None:
    """Return 1 − Var(R − V) / Var(R): 1 for a perfect critic, 0 for a constant, below 0 for a harmful one.

    None where the returns do not differ: there is nothing to explain.
    """
    spread = float(np.var(returns_N)) if returns_N.size else 0.0
    return None if spread == 0.0 else 1.0 - float(np.var(returns_N - values_N)) / spread
