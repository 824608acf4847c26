from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from async_rl.errors import ShapeError
from async_rl.model.logprobs import HeadOptions, LogitTransform, token_logprobs


def full(
    hidden: Tensor,
    weight: Tensor,
    targets: Tensor,
    *,
    temperature: float | Tensor,
    transform: LogitTransform,
    bias: Tensor | None,
) -> tuple[Tensor, Tensor]:
    """The textbook way: all logits at once."""
    logits = hidden @ weight.T + (0 if bias is None else bias)
    logits = logits * transform.scale
    if transform.softcap is not None:
        logits = transform.softcap * torch.tanh(logits / transform.softcap)
    logits = logits / (temperature[:, None] if isinstance(temperature, Tensor) else temperature)
    logs = torch.log_softmax(logits, dim=-1)
    return logs.gather(1, targets[:, None])[:, 0], -(logs.exp() * logs).sum(-1)


def test_temperature_is_part_of_the_logprob() -> None:
    # logits [2, 0] at T = 0.5 are [4, 0]: −log(1 + e⁻⁴) = −0.01815, neither −0.1269 (raw) nor −0.2539 (raw over T)
    logprobs, _ = token_logprobs(torch.tensor([[2.0, 0.0]]), torch.eye(2), torch.tensor([0]), temperature=0.5)
    assert logprobs.item() == pytest.approx(-0.01815, abs=1e-5)


def test_entropy_of_known_distributions() -> None:
    hidden = torch.tensor([[0.0, 0.0], [math.log(3), 0.0]])
    _, entropy = token_logprobs(hidden, torch.eye(2), torch.tensor([0, 1]), options=HeadOptions(with_entropy=True))
    assert entropy is not None
    quarter = 0.25 * math.log(4) + 0.75 * math.log(4 / 3)
    assert entropy.tolist() == pytest.approx([math.log(2), quarter], abs=1e-6)
    assert not entropy.requires_grad


@given(
    tokens=st.integers(0, 17),
    chunk=st.sampled_from([1, 3, 8, 1000]),
    temperature=st.sampled_from([1.0, 0.6, "per token"]),
    transform=st.sampled_from([LogitTransform(), LogitTransform(scale=0.3), LogitTransform(scale=1.5, softcap=2.0)]),
    with_bias=st.booleans(),
    seed=st.integers(0, 99),
)
@settings(max_examples=60, deadline=None)
def test_chunked_equals_full_logits_in_value_and_gradient(
    tokens: int, chunk: int, temperature: float | str, transform: LogitTransform, with_bias: bool, seed: int
) -> None:
    torch.manual_seed(seed)
    hidden = torch.randn(tokens, 5, dtype=torch.float64, requires_grad=True)
    weight = torch.randn(13, 5, dtype=torch.float64, requires_grad=True)
    bias = torch.randn(13, dtype=torch.float64, requires_grad=True) if with_bias else None
    targets = torch.randint(13, (tokens,))
    divisor = torch.rand(tokens, dtype=torch.float64) + 0.5 if isinstance(temperature, str) else temperature
    upstream = torch.randn(tokens, dtype=torch.float64)
    options = HeadOptions(transform=transform, chunk_tokens=chunk, with_entropy=True)
    mine, entropy = token_logprobs(hidden, weight, targets, temperature=divisor, options=options, bias=bias)
    theirs, expected_entropy = full(hidden, weight, targets, temperature=divisor, transform=transform, bias=bias)
    torch.testing.assert_close(mine, theirs, rtol=0, atol=1e-12)
    torch.testing.assert_close(entropy, expected_entropy.detach(), rtol=0, atol=1e-12)
    inputs = [tensor for tensor in (hidden, weight, bias) if tensor is not None]
    for got, wanted in zip(
        torch.autograd.grad(mine, inputs, upstream), torch.autograd.grad(theirs, inputs, upstream), strict=True
    ):
        torch.testing.assert_close(got, wanted, rtol=0, atol=1e-11)


class _Largest(TorchDispatchMode):
    """Remembers the largest tensor that any operation returned."""

    numel = 0

    def __torch_dispatch__(
        self, func: Callable[..., Any], types: Sequence[type], args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        result = func(*args, **(kwargs or {}))
        for tensor in result if isinstance(result, tuple | list) else [result]:
            if isinstance(tensor, Tensor):
                self.numel = max(self.numel, tensor.numel())
        return result


def test_full_logits_are_never_held_forward_or_backward() -> None:
    tokens, vocabulary, width, chunk = 64, 1000, 4, 8
    hidden = torch.randn(tokens, width, requires_grad=True)
    weight = torch.randn(vocabulary, width, requires_grad=True)
    options = HeadOptions(chunk_tokens=chunk, with_entropy=True)
    with _Largest() as largest:
        logprobs, _ = token_logprobs(hidden, weight, torch.zeros(tokens, dtype=torch.int64), options=options)
        torch.autograd.backward(logprobs.sum())
    assert largest.numel == chunk * vocabulary  # not tokens × vocabulary


def test_bfloat16_inputs_are_computed_in_float32() -> None:
    torch.manual_seed(0)
    hidden, weight = torch.randn(30, 16).bfloat16(), torch.randn(50, 16).bfloat16()
    targets = torch.randint(50, (30,))
    logprobs, _ = token_logprobs(hidden, weight, targets)
    exact, _ = token_logprobs(hidden.double(), weight.double(), targets)
    assert logprobs.dtype is torch.float32
    torch.testing.assert_close(logprobs.double(), exact, rtol=0, atol=1e-5)


def test_an_impossible_token_is_minus_infinity_not_nan() -> None:
    logprobs, _ = token_logprobs(torch.ones(1, 1), torch.tensor([[1.0], [-math.inf]]), torch.tensor([1]))
    assert logprobs.tolist() == [-math.inf]


def test_shapes_that_do_not_fit_are_refused() -> None:
    with pytest.raises(ShapeError, match=r"hidden \(2, 3\), weight \(4, 5\)"):
        token_logprobs(torch.zeros(2, 3), torch.zeros(4, 5), torch.zeros(2, dtype=torch.int64))
