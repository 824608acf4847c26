"""The demo's supervised warm-up."""

from __future__ import annotations

import torch

from async_rl.environments.sort_digits import SortDigits
from async_rl.launch.demo_model import ALPHABET, demo_model, demo_tokenizer
from async_rl.launch.warmup import IGNORED, WarmupPlan, _batch, warm_up


def test_the_tokenizer_reads_characters_and_adds_nothing() -> None:
    tokenizer = demo_tokenizer()
    assert len(tokenizer) == 22
    assert tokenizer.encode("40>", add_special_tokens=True) == [3 + ALPHABET.index(character) for character in "40>"]
    assert tokenizer.decode(tokenizer.encode("402913>"), skip_special_tokens=True) == "402913>"


def test_the_model_is_the_measured_size_and_depends_on_its_seed_alone() -> None:
    tokenizer = demo_tokenizer()
    torch.manual_seed(123)
    before = torch.get_rng_state()
    first, second, other = (demo_model(tokenizer, seed=seed) for seed in (0, 0, 1))
    assert torch.equal(torch.get_rng_state(), before)
    # embedding and head 22·64 each; per layer: q, k, v, o 64·64, mlp 3·64·192, two norms of 64; one norm at the end
    assert sum(p.numel() for p in first.parameters()) == 2 * 22 * 64 + 3 * (4 * 64 * 64 + 3 * 64 * 192 + 2 * 64) + 64
    assert all(torch.equal(a, b) for a, b in zip(first.parameters(), second.parameters(), strict=True))
    assert not all(torch.equal(a, b) for a, b in zip(first.parameters(), other.parameters(), strict=True))


def test_only_the_answer_and_the_end_are_learned() -> None:
    tokenizer = demo_tokenizer()
    ids, labels = _batch([("21>", "12"), ("3210>", "0123")], tokenizer)
    one, two, three, zero, end = (tokenizer.convert_tokens_to_ids(token) for token in ("1", "2", "3", "0", "<eos>"))
    arrow = tokenizer.convert_tokens_to_ids(">")
    assert ids.tolist() == [
        [two, one, arrow, one, two, end, 0, 0, 0, 0],
        [three, two, one, zero, arrow, zero, one, two, three, end],
    ]
    assert labels.tolist() == [
        [IGNORED] * 3 + [one, two, end] + [IGNORED] * 4,
        [IGNORED] * 5 + [zero, one, two, three, end],
    ]


def test_it_learns_and_repeats_itself_exactly() -> None:
    torch.set_num_threads(1)
    plan = WarmupPlan(steps=12, batch_size=16, seed=5)
    tokenizer = demo_tokenizer()
    runs = []
    for _ in range(2):
        model, losses = demo_model(tokenizer, seed=5), []
        last = warm_up(
            model, tokenizer, SortDigits(length=3), plan, on_step=lambda step, loss, to=losses: to.append((step, loss))
        )
        assert losses[-1] == (12, last)
        assert not model.training
        runs.append(([loss for _, loss in losses], [parameter.detach().clone() for parameter in model.parameters()]))
    assert runs[0][0] == runs[1][0]
    assert all(torch.equal(a, b) for a, b in zip(runs[0][1], runs[1][1], strict=True))
    assert runs[0][0][-1] < 0.8 * runs[0][0][0]
