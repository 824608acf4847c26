"""From per-token losses to one number: what each token is multiplied by.

Always from counts over all micro-batches and ranks of an optimizer step, so the gradient does not depend on how the step was
cut. A token that a clip or an importance mask silenced stays in every count.

| name | loss | as in |
|---|---|---|
| token_mean | Σ over tokens / N | DAPO (arXiv:2503.14476, eq. 8) |
| sequence_mean_of_means | mean over sequences of (Σ over its tokens / its length) | GRPO (arXiv:2402.03300, eq. 3), GSPO |
| sequence_mean_of_sums | mean over sequences of Σ over its tokens | REINFORCE: unbiased for the sequence's log-likelihood |
| constant | Σ over tokens / constant | Dr.GRPO (arXiv:2503.20783): the same for short and long answers |
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, TypeAlias

from torch import Tensor

from async_rl.algorithms.tokens import LossTokens, masked

AggregationName: TypeAlias = Literal["token_mean", "sequence_mean_of_means", "sequence_mean_of_sums", "constant"]


@dataclass(frozen=True, slots=True)
class Aggregation:
    """name, and the divisor of `constant`."""

    name: AggregationName = "token_mean"
    constant: float = 1.0

    def __post_init__(self) -> None:
        if not self.constant > 0:
            raise ValueError(f"Aggregation constant={self.constant}: must be above 0")


TOKEN_MEAN = Aggregation()


@dataclass(frozen=True, slots=True)
class StepCounts:
    """Of the whole optimizer step, over all ranks: trained tokens, and sequences with at least one of them."""

    num_tokens: int
    num_sequences: int


def aggregate(token_losses_T: Tensor, tokens: LossTokens, counts: StepCounts, how: Aggregation) -> Tensor:
    """Return this micro-batch's part of the step's loss (scalar): parts add up over micro-batches and ranks.

    A sequence must be whole within its micro-batch.
    """
    losses_T = masked(token_losses_T, tokens.loss_mask)
    if how.name == "sequence_mean_of_means":
        lengths_S = tokens.trained_lengths().to(losses_T.dtype)
        return (tokens.sum_per_sequence(losses_T) / lengths_S).sum() / max(counts.num_sequences, 1)
    divisor = {
        "token_mean": float(max(counts.num_tokens, 1)),
        "sequence_mean_of_sums": float(max(counts.num_sequences, 1)),
        "constant": how.constant,
    }[how.name]
    return losses_T.sum() / divisor
