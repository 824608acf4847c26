from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from async_rl.algorithms.losses import ClipRange, LossSettings, LossTokens, clipped_surrogate
from async_rl.errors import ShapeError
from async_rl.testing.batches import make_sample as make_ids
from async_rl.trainer.packing import MicroBatch, balance, filler_micro_batch, lay_out, pack, unpack
from async_rl.trainer.samples import TrainingSample

ARRAYS = ("token_ids", "loss_mask", "behavior_logprobs", "advantages")


def make_sample(length: int, *, num_trained: int = 1, first_id: int = 0, advantage: float = 1.0, temperature: float = 1.0,
                logprob: float = -0.5) -> TrainingSample:  # fmt: skip
    """A sample of `length` tokens, first_id and up, whose last `num_trained` tokens are trained."""
    mask = np.arange(length) >= length - num_trained
    return TrainingSample(
        token_ids=np.arange(first_id, first_id + length, dtype=np.int32),
        loss_mask=mask,
        behavior_logprobs=np.where(mask, logprob, 0.0).astype(np.float32),
        advantages=np.where(mask, advantage, 0.0).astype(np.float32),
        lags=np.zeros(length, dtype=np.int32),
        temperature=temperature,
        task_id="test:0:0:0",
        member=0,
    )


def test_layout_of_two_sequences_by_hand() -> None:
    samples = [make_sample(2, first_id=10, temperature=0.5), make_sample(3, num_trained=2, first_id=20, advantage=-2.0)]
    (micro_batch,) = pack(samples, 5)
    assert micro_batch.token_ids.tolist() == [10, 11, 20, 21, 22]
    assert micro_batch.position_ids.tolist() == [0, 1, 0, 1, 2]
    assert micro_batch.cu_seqlens.tolist() == [0, 2, 5]
    assert micro_batch.loss_mask.tolist() == [False, True, False, True, True]
    assert micro_batch.behavior_logprobs.tolist() == [0.0, -0.5, 0.0, -0.5, -0.5]
    assert micro_batch.advantages.tolist() == [0.0, 1.0, 0.0, -2.0, -2.0]
    assert micro_batch.temperatures.tolist() == [0.5, 0.5, 1.0, 1.0, 1.0]
    assert (micro_batch.sample_indices, micro_batch.sample_runs, micro_batch.num_tokens) == ((0, 1), (0, 1), 5)
    assert micro_batch.parents.tolist() == [-1, -1]
    assert micro_batch.sequence_ids.tolist() == [0, 0, 1, 1, 1]
    assert micro_batch.num_trained == 3
    dtypes = [t.dtype for t in (micro_batch.token_ids, micro_batch.position_ids, micro_batch.cu_seqlens, micro_batch.loss_mask)]
    assert dtypes == [torch.int64, torch.int64, torch.int32, torch.bool]


def test_first_fit_decreasing_by_hand() -> None:
    micro_batches = pack([make_sample(length) for length in (4, 8, 2, 4, 2)], 10)
    # longest first: 8 | 4 opens a bin, 4 joins it | the first 2 still fits beside 8, the second does not and joins the fours
    assert [m.sample_indices for m in micro_batches] == [(1, 2), (0, 3, 4)]


def test_ties_keep_their_order_so_that_a_replay_packs_alike() -> None:
    micro_batches = pack([make_sample(3) for _ in range(5)], 6)
    assert [m.sample_indices for m in micro_batches] == [(0, 1), (2, 3), (4,)]


def test_a_sequence_longer_than_the_cap_is_alone() -> None:
    micro_batches = pack([make_sample(2), make_sample(11), make_sample(2)], 5)
    assert [m.sample_indices for m in micro_batches] == [(1,), (0, 2)]


def test_no_samples_make_no_micro_batch() -> None:
    assert pack([], 5) == []
    assert balance([], 5, 3) == [[], [], []]


@pytest.mark.parametrize(("max_tokens", "world_size"), [(0, 1), (5, 0)])
def test_sizes_below_one_are_refused(max_tokens: int, world_size: int) -> None:
    with pytest.raises(ValueError, match="must be at least 1"):
        balance([make_sample(2)], max_tokens, world_size)


def test_altering_one_sequence_leaves_its_neighbour_alone_and_no_loss_term_crosses() -> None:
    neighbour = make_sample(3, num_trained=2, first_id=50)
    before, after = (pack([make_sample(4, first_id=i, advantage=a), neighbour], 10)[0] for i, a in ((0, 1.0), (30, -3.0)))
    for name in (*ARRAYS, "position_ids", "temperatures"):
        assert torch.equal(getattr(before, name)[4:], getattr(after, name)[4:])
    # a trained token t is predicted from t − 1, which must be in the same sequence
    sequence_of = torch.repeat_interleave(torch.arange(2), before.cu_seqlens.diff())
    trained = before.loss_mask.nonzero().flatten()
    assert torch.equal(sequence_of[trained], sequence_of[trained - 1])
    assert trained.tolist() == [3, 5, 6]


def loss_and_gradient(micro_batches: Sequence[MicroBatch], num_tokens: int) -> tuple[float, Tensor]:
    """Token mean over the whole step and its gradient in a parameter that every token's logprob shares."""
    parameter = torch.zeros(60, requires_grad=True)
    total = 0.0
    for m in micro_batches:
        tokens = LossTokens(parameter[m.token_ids], m.behavior_logprobs, m.behavior_logprobs, m.advantages, m.loss_mask)
        loss = clipped_surrogate(tokens, LossSettings(ClipRange(0.2, 0.2))).loss_sum / num_tokens
        loss.backward()  # a filler runs too, and leaves a gradient of zeros
        total += loss.item()
    assert parameter.grad is not None
    return total, parameter.grad


def test_token_mean_and_gradient_do_not_depend_on_how_the_step_is_cut() -> None:
    samples = [
        make_sample(2, num_trained=1, advantage=-8.0, logprob=0.0),  # one token of loss 8
        make_sample(4, num_trained=3, first_id=10, advantage=-2.0, logprob=0.0),  # three tokens of loss 2
    ]
    expected = torch.zeros(60)
    expected[1] = 8.0 / 4
    expected[11:14] = 2.0 / 4
    assert len(pack(samples, 4)) == 2
    for micro_batches in (pack(samples, 100), pack(samples, 4)):
        loss, gradient = loss_and_gradient(micro_batches, num_tokens=4)
        assert loss == pytest.approx(3.5)
        torch.testing.assert_close(gradient, expected)
    for world_size in (2, 3):  # ranks add their shares up; the third has a filler only
        shares = [loss_and_gradient(rank, num_tokens=4) for rank in balance(samples, 100, world_size)]
        assert sum(loss for loss, _ in shares) == pytest.approx(3.5)
        torch.testing.assert_close(torch.stack([gradient for _, gradient in shares]).sum(0), expected)


def test_long_and_short_samples_give_ranks_equal_counts() -> None:
    samples = [make_sample(95) for _ in range(5)] + [make_sample(20) for _ in range(5)]
    ranks = balance(samples, 100, 2)
    assert [len(rank) for rank in ranks] == [3, 3]  # 3 × 95, and 95 + 95 + 5 × 20
    assert [sum(m.num_tokens for m in rank) for rank in ranks] == [285, 290]


def test_a_rank_without_a_sample_gets_fillers() -> None:
    ranks = balance([make_sample(4), make_sample(4)], 4, 3)
    assert [[m.sample_indices for m in rank] for rank in ranks] == [[(0,)], [(1,)], [()]]
    filler = ranks[2][0]
    assert (filler.num_tokens, filler.num_trained, filler.cu_seqlens.tolist()) == (0, 0, [0, 1])
    assert not filler.loss_mask.any()


def test_moving_a_micro_batch_moves_every_tensor() -> None:
    moved = filler_micro_batch().to("meta")
    tensors = [value for name in MicroBatch.__slots__ if isinstance(value := getattr(moved, name), Tensor)]
    assert len(tensors) == 10
    assert all(tensor.device.type == "meta" for tensor in tensors)


def test_values_of_another_length_are_not_unpacked() -> None:
    with pytest.raises(ShapeError, match="3 values for a micro-batch of 2 tokens"):
        unpack(pack([make_sample(2)], 5), [torch.zeros(3)])


def group(prompt: Sequence[int], *completions: Sequence[int], task: str = "t") -> list[TrainingSample]:
    return [
        make_ids([*prompt, *completion], trained=range(len(prompt), len(prompt) + len(completion)), task_id=task, member=member)
        for member, completion in enumerate(completions)
    ]


def test_layout_of_a_shared_prompt_by_hand() -> None:
    samples = [*group([1, 2, 3], [4, 5], [6], task="a"), *group([7, 8], [9], task="b")]
    (micro_batch,) = pack(samples, 20, share_prompts=True)
    assert micro_batch.token_ids.tolist() == [1, 2, 3, 4, 5, 6, 7, 8, 9]
    assert micro_batch.position_ids.tolist() == [0, 1, 2, 3, 4, 3, 0, 1, 2]
    assert micro_batch.cu_seqlens.tolist() == [0, 3, 5, 6, 9]
    assert micro_batch.parents.tolist() == [-1, 0, 0, -1]
    assert micro_batch.sequence_ids.tolist() == [0, 0, 0, 1, 1, 2, 3, 3, 3]
    assert micro_batch.loss_mask.tolist() == [False] * 3 + [True] * 3 + [False, False, True]
    assert (micro_batch.sample_indices, micro_batch.sample_runs) == ((0, 1, 2), (1, 2, 3))
    assert (micro_batch.num_trained, micro_batch.num_trained_sequences) == (4, 3)


def test_what_members_do_not_have_in_common_is_not_shared() -> None:
    same_task = [make_ids([1, 2, 3, 4], trained=[3]), make_ids([1, 2, 9, 9, 5], trained=[4])]  # a tool's answers differ
    (micro_batch,) = pack(same_task, 20, share_prompts=True)
    assert micro_batch.token_ids.tolist() == [1, 2, 3, 4, 9, 9, 5]
    nothing = [make_ids([1, 2], trained=[1]), make_ids([3, 2], trained=[1])]
    assert pack(nothing, 20, share_prompts=True)[0].parents.tolist() == [-1, -1]


def test_a_group_beyond_the_cap_is_cut_and_its_prompt_computed_once_in_each_part() -> None:
    samples = group([1, 2, 3], [4, 5], [6, 7], [8, 9], [10, 11])
    micro_batches = pack(samples, 8, share_prompts=True)
    assert [m.sample_indices for m in micro_batches] == [(0, 1), (2, 3)]
    assert [m.num_tokens for m in micro_batches] == [7, 7]
    assert [m.num_tokens for m in pack(samples, 4, share_prompts=True)] == [5] * 4  # alone, over the cap, as without sharing


def test_ranks_share_one_large_group() -> None:
    ranks = balance(group([1, 2, 3], [4, 5], [6, 7], [8, 9], [10, 11]), 100, 2, share_prompts=True)
    assert sorted(index for rank in ranks for m in rank for index in m.sample_indices) == [0, 1, 2, 3]
    assert [sum(m.num_trained for m in rank) for rank in ranks] == [4, 4]


@settings(max_examples=50, deadline=None)
@given(
    groups=st.lists(st.tuples(st.integers(1, 9), st.lists(st.integers(1, 9), min_size=1, max_size=5)), max_size=5),
    max_tokens=st.integers(1, 40),
    world_size=st.integers(1, 3),
)
def test_sharing_loses_and_repeats_nothing(groups: list[tuple[int, list[int]]], max_tokens: int, world_size: int) -> None:
    samples = [
        sample
        for task, (prompt, lengths) in enumerate(groups)
        for sample in group(range(prompt), *(range(50 * m, 50 * m + n) for m, n in enumerate(lengths, start=1)), task=str(task))
    ]
    ranks = balance(samples, max_tokens, world_size, share_prompts=True)
    assert len({len(rank) for rank in ranks}) == 1
    micro_batches = [m for rank in ranks for m in rank]
    assert sorted(index for m in micro_batches for index in m.sample_indices) == list(range(len(samples)))
    token_ids = unpack(micro_batches, [m.token_ids for m in micro_batches])
    positions = unpack(micro_batches, [m.position_ids for m in micro_batches])
    for index, sample in enumerate(samples):
        assert token_ids[index].tolist() == sample.token_ids.tolist()
        assert positions[index].tolist() == list(range(len(sample)))
    assert sum(m.num_tokens for m in micro_batches) <= sum(len(sample) for sample in samples)
    for m in micro_batches:
        values = unpack([m], [m.behavior_logprobs])
        assert torch.equal(lay_out(m, values)[m.loss_mask], m.behavior_logprobs[m.loss_mask])


lengths_strategy = st.lists(st.integers(2, 40), max_size=25)


def sample_list(lengths: Sequence[int]) -> list[TrainingSample]:
    return [
        make_sample(
            n, num_trained=1 + i % (n - 1), first_id=100 * i, advantage=float(i), temperature=0.5 + i, logprob=-float(i)
        )
        for i, n in enumerate(lengths)
    ]


def assert_holds_every_sample_once(micro_batches: Sequence[MicroBatch], samples: Sequence[TrainingSample]) -> None:
    packed = [index for m in micro_batches for index in m.sample_indices]
    assert sorted(packed) == list(range(len(samples)))
    for name in ARRAYS:
        unpacked = unpack(micro_batches, [getattr(m, name) for m in micro_batches])
        for index, sample in enumerate(samples):
            assert unpacked[index].tolist() == getattr(sample, name).tolist()
    temperatures = unpack(micro_batches, [m.temperatures for m in micro_batches])
    positions = unpack(micro_batches, [m.position_ids for m in micro_batches])
    for index, sample in enumerate(samples):
        assert temperatures[index].tolist() == [sample.temperature] * len(sample)
        assert positions[index].tolist() == list(range(len(sample)))


@settings(max_examples=50, deadline=None)
@given(lengths=lengths_strategy, max_tokens=st.integers(1, 80))
def test_unpacking_gives_back_what_was_packed_within_the_cap(lengths: list[int], max_tokens: int) -> None:
    samples = sample_list(lengths)
    micro_batches = pack(samples, max_tokens)
    assert_holds_every_sample_once(micro_batches, samples)
    for m in micro_batches:
        assert m.num_tokens <= max_tokens or len(m.sample_indices) == 1
        assert m.num_trained == int(m.loss_mask.sum())
        assert not m.loss_mask[m.cu_seqlens[:-1].long()].any()
    assert [m.sample_indices for m in pack(samples, max_tokens)] == [m.sample_indices for m in micro_batches]


@settings(max_examples=50, deadline=None)
@given(lengths=lengths_strategy, max_tokens=st.integers(1, 80), world_size=st.integers(1, 5))
def test_ranks_get_equal_counts_and_together_every_sample_once(lengths: list[int], max_tokens: int, world_size: int) -> None:
    samples = sample_list(lengths)
    ranks = balance(samples, max_tokens, world_size)
    assert len(ranks) == world_size
    assert len({len(rank) for rank in ranks}) == 1
    assert_holds_every_sample_once([m for rank in ranks for m in rank], samples)
    tokens = [sum(m.num_tokens for m in rank) for rank in ranks]
    assert max(tokens) - min(tokens) <= max(lengths, default=0)  # greedy: never further apart than one sample
