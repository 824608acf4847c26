"""A supervised warm-up: teach a fresh model a task from (prompt, answer) pairs, until there is a reward to learn from."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import islice

import torch
from torch.nn import functional
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from async_rl.environments.base import RowSource

IGNORED = -100  # cross_entropy's default ignore_index


@dataclass(frozen=True, slots=True)
class WarmupPlan:
    """How the warm-up trains. Deterministic: equal plans make equal weights on one build at one thread count."""

    steps: int = 75
    batch_size: int = 64
    learning_rate: float = 2e-3
    seed: int = 0


def warm_up(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    source: RowSource,
    plan: WarmupPlan,
    *,
    on_step: Callable[[int, float], None] = lambda step, loss: None,
) -> float:
    """Train in place on the source's warm-up pairs, on answer and end-of-sequence tokens only; return the last loss (nats).

    The model is left in eval mode.
    """
    pairs = source.warmup_pairs(plan.steps * plan.batch_size, plan.seed)
    optimizer = torch.optim.AdamW(model.parameters(), lr=plan.learning_rate, weight_decay=0.0)
    model.train()
    loss = torch.zeros(())
    for step in range(1, plan.steps + 1):
        ids, labels = _batch(list(islice(pairs, plan.batch_size)), tokenizer)
        logits = model(input_ids=ids).logits
        loss = functional.cross_entropy(logits[:, :-1].flatten(0, 1).float(), labels[:, 1:].flatten(), ignore_index=IGNORED)
        optimizer.zero_grad(set_to_none=True)
        torch.autograd.backward(loss)
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        on_step(step, float(loss.detach()))
    model.train(False)
    return float(loss.detach())


def _batch(pairs: Sequence[tuple[str, str]], tokenizer: PreTrainedTokenizerBase) -> tuple[torch.Tensor, torch.Tensor]:
    """ids and labels, int64 [B, T]. Padded on the right, which a causal model's real tokens never see."""
    rows = list(_rows(pairs, tokenizer))
    longest = max(len(prompt) + len(answer) for prompt, answer in rows)
    ids = torch.zeros((len(rows), longest), dtype=torch.int64)
    labels = torch.full_like(ids, IGNORED)
    for index, (prompt, answer) in enumerate(rows):
        whole = torch.tensor([*prompt, *answer])
        ids[index, : len(whole)] = whole
        labels[index, len(prompt) : len(whole)] = whole[len(prompt) :]
    return ids, labels


def _rows(pairs: Sequence[tuple[str, str]], tokenizer: PreTrainedTokenizerBase) -> Iterator[tuple[list[int], list[int]]]:
    for prompt, answer in pairs:
        yield (
            tokenizer.encode(prompt, add_special_tokens=True),
            [*tokenizer.encode(answer, add_special_tokens=False), int(tokenizer.eos_token_id)],
        )
