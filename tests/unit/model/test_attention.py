from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from async_rl.errors import ConfigError, ShapeError
from async_rl.model.attention import PackedSegments, packed_attention, packed_segments

lengths_strategy = st.lists(st.integers(0, 70), min_size=1, max_size=12)


def cu_seqlens(lengths: list[int]) -> Tensor:
    return torch.tensor([0, *lengths]).cumsum(0).int()


def reference(
    query: Tensor, key: Tensor, value: Tensor, lengths: list[int], *, window: int | None = None, softcap: float | None = None
) -> Tensor:
    """One sequence and one head at a time, from the definition of softmax attention. [1, H, T, D] → [1, T, H, D]"""
    heads, group = query.shape[1], query.shape[1] // key.shape[1]
    out = torch.zeros_like(query)
    start = 0
    for length in lengths:
        part = slice(start, start + length)
        distance = torch.arange(length)[:, None] - torch.arange(length)[None, :]
        seen = (distance >= 0) & (distance < (window or length + 1))
        for head in range(heads):
            scores = query[0, head, part] @ key[0, head // group, part].T / math.sqrt(query.shape[3])
            if softcap is not None:
                scores = softcap * torch.tanh(scores / softcap)
            weights = torch.where(seen, scores, -math.inf).softmax(-1)
            out[0, head, part] = weights @ value[0, head // group, part]
        start += length
    return out.transpose(1, 2)


def run(query: Tensor, key: Tensor, value: Tensor, segments: PackedSegments, **kwargs: Any) -> Tensor:
    output, _ = packed_attention(nn.Module(), query, key, value, None, packed_segments=segments, **kwargs)
    return output


@given(lengths=lengths_strategy)
@settings(max_examples=60, deadline=None)
def test_index_maps_are_inverse_and_padding_stays_within_its_sequence(lengths: list[int]) -> None:
    segments = packed_segments(cu_seqlens(lengths))
    total = sum(lengths)
    assert torch.equal(segments.slot_to_token[segments.token_to_slot], torch.arange(total))
    assert sum(bucket.num_slots for bucket in segments.buckets) == len(segments.slot_to_token)
    assert sum(bucket.num_sequences for bucket in segments.buckets) == sum(length > 0 for length in lengths)
    owner = torch.repeat_interleave(torch.arange(len(lengths)), torch.tensor(lengths))
    offset = 0
    for bucket in segments.buckets:
        rows = segments.slot_to_token[offset : offset + bucket.num_slots].view(bucket.num_sequences, bucket.length)
        assert (owner[rows] == owner[rows[:, :1]]).all()
        offset += bucket.num_slots


@given(
    lengths=lengths_strategy.filter(any),
    window=st.sampled_from([None, 1, 5, 16]),
    softcap=st.sampled_from([None, 2.0]),
    seed=st.integers(0, 9),
)
@settings(max_examples=25, deadline=None)
def test_packed_attention_equals_attention_per_sequence_in_value_and_gradient(
    lengths: list[int], window: int | None, softcap: float | None, seed: int
) -> None:
    torch.manual_seed(seed)
    total = sum(lengths)
    tensors = [torch.randn(1, heads, total, 8, dtype=torch.float64, requires_grad=True) for heads in (4, 2, 2)]
    upstream = torch.randn(1, total, 4, 8, dtype=torch.float64)
    packed = run(*tensors, packed_segments(cu_seqlens(lengths)), sliding_window=window, softcap=softcap)
    expected = reference(*tensors, lengths, window=window, softcap=softcap)
    torch.testing.assert_close(packed, expected, rtol=0, atol=1e-12)
    for mine, theirs in zip(
        torch.autograd.grad(packed, tensors, upstream), torch.autograd.grad(expected, tensors, upstream), strict=True
    ):
        torch.testing.assert_close(mine, theirs, rtol=0, atol=1e-11)


def test_a_nan_in_one_sequence_stays_there() -> None:
    lengths = [3, 9, 5]
    query, key, value = (torch.randn(1, 2, 17, 4) for _ in range(3))
    for tensor in (query, key, value):
        tensor[0, :, 3:12] = math.nan  # the second sequence
    out = run(query, key, value, packed_segments(cu_seqlens(lengths)))
    assert out[0, 3:12].isnan().all()
    assert out[0, :3].isfinite().all()
    assert out[0, 12:].isfinite().all()


def test_padding_is_bounded() -> None:
    lengths = list(range(32, 513, 5))
    segments = packed_segments(cu_seqlens(lengths))
    assert len(segments.slot_to_token) < 1.2 * sum(lengths)
    assert len(segments.buckets) <= 14


@pytest.mark.parametrize("bad", [[1, 2], [0, 3, 2], []])
def test_bad_bounds_are_refused(bad: list[int]) -> None:
    with pytest.raises(ShapeError, match="cu_seqlens"):
        packed_segments(torch.tensor(bad, dtype=torch.int32))


def test_what_cannot_run_packed_is_refused_by_name() -> None:
    segments = packed_segments(cu_seqlens([2]))
    tensors = [torch.zeros(1, 1, 2, 4) for _ in range(3)]
    with pytest.raises(ConfigError, match="does not pass keyword arguments"):
        packed_attention(nn.Module(), *tensors, None)
    with pytest.raises(ConfigError, match="attention sinks"):
        packed_attention(nn.Module(), *tensors, None, packed_segments=segments, s_aux=torch.zeros(1))
    with pytest.raises(ShapeError, match="one row of 2 tokens"):
        packed_attention(nn.Module(), *[torch.zeros(1, 1, 3, 4)] * 3, None, packed_segments=segments)


groups_strategy = st.lists(
    st.tuples(st.integers(1, 30), st.lists(st.integers(1, 40), min_size=1, max_size=5)), min_size=1, max_size=4
)


@given(
    groups=groups_strategy,
    single=st.integers(0, 20),
    window=st.sampled_from([None, 1, 5, 16]),
    softcap=st.sampled_from([None, 2.0]),
    seed=st.integers(0, 9),
)
@settings(max_examples=25, deadline=None)
def test_runs_that_continue_a_prompt_attend_as_whole_sequences_in_value_and_gradient(
    groups: list[tuple[int, list[int]]], single: int, window: int | None, softcap: float | None, seed: int
) -> None:
    """A prompt and its continuations, packed once each, against every sequence written out in full."""
    torch.manual_seed(seed)
    runs, parents = [single], [-1]
    whole: list[list[int]] = [list(range(single))]  # rows of each sequence
    for prompt, continuations in groups:
        first, start = len(runs), sum(runs)
        runs.append(prompt)
        parents.append(-1)
        for length in continuations:
            whole.append([*range(start, start + prompt), *range(sum(runs), sum(runs) + length)])
            runs.append(length)
            parents.append(first)
    total = sum(runs)
    tensors = [torch.randn(1, heads, total, 8, dtype=torch.float64, requires_grad=True) for heads in (4, 2, 2)]
    segments = packed_segments(cu_seqlens(runs), parents=torch.tensor(parents))
    shared = run(*tensors, segments, sliding_window=window, softcap=softcap)
    rows = torch.tensor([row for sequence in whole for row in sequence], dtype=torch.int64)
    expanded = [tensor[:, :, rows] for tensor in tensors]
    expected = reference(*expanded, [len(sequence) for sequence in whole], window=window, softcap=softcap)
    torch.testing.assert_close(shared[:, rows], expected, rtol=0, atol=1e-12)
    upstream = torch.randn(1, len(rows), 4, 8, dtype=torch.float64)
    mine = torch.autograd.grad(shared[:, rows], tensors, upstream)
    theirs = torch.autograd.grad(expected, tensors, upstream)
    for one, other in zip(mine, theirs, strict=True):
        torch.testing.assert_close(one, other, rtol=0, atol=1e-11)


def test_a_token_is_predicted_by_the_one_before_it_in_its_sequence() -> None:
    segments = packed_segments(cu_seqlens([3, 2, 2, 2]), parents=torch.tensor([-1, 0, 0, -1]))
    assert segments.previous.tolist() == [-1, 0, 1, 2, 3, 2, 5, -1, 7]


@pytest.mark.parametrize("parents", [[-1, 0, 1], [-1, 3, 0], [-1, 0]])
def test_parents_that_are_no_tree_of_depth_two_are_refused(parents: list[int]) -> None:
    with pytest.raises(ShapeError, match="parents="):
        packed_segments(cu_seqlens([2, 2, 2]), parents=torch.tensor(parents))
