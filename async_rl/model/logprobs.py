"""Logprobs of given tokens from hidden states, in chunks: full logits [T, vocabulary] are never held, forward or backward.

The backward pass recomputes a chunk's logits from hidden states and head weight; it costs one more matrix product and keeps
memory at one chunk. The softmax, its normaliser and the head's matrix product are at least float32 whatever the model's dtype.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.autograd.function import FunctionCtx, once_differentiable

from async_rl.errors import ShapeError

CHUNK_ELEMENTS = 2**23
"""Logits held at a time on a CPU, at most: beyond 32 MiB the softmax waits for memory (measured at a vocabulary of 32k)."""


@dataclass(frozen=True, slots=True)
class LogitTransform:
    """What a model does to its raw logits: multiply by `scale`, then soft-cap, z → softcap · tanh(z / softcap)."""

    scale: float = 1.0
    softcap: float | None = None


@dataclass(frozen=True, slots=True)
class HeadOptions:
    """chunk_tokens bounds the tokens whose logits are held at a time."""

    transform: LogitTransform = LogitTransform()
    chunk_tokens: int = 1024
    with_entropy: bool = False


def token_logprobs(
    hidden: Tensor,
    weight: Tensor,
    targets: Tensor,
    *,
    temperature: float | Tensor = 1.0,
    options: HeadOptions | None = None,
    bias: Tensor | None = None,
) -> tuple[Tensor, Tensor | None]:
    """Return the logprob of targets[i] given hidden[i] (nats, [N]) and, if asked for, the distribution's entropy ([N]).

    hidden [N, h], weight [V, h], bias [V] or None, targets int64 [N]. temperature divides the transformed logits: one number,
    or [N], one per token. Both results are float32 (float64 for float64 inputs), as is the head's
    product. Gradients reach hidden, weight and bias, not through the entropy.
    Raises: ShapeError if the shapes do not fit.
    """
    if hidden.dim() != 2 or weight.dim() != 2 or hidden.shape[1] != weight.shape[1] or targets.shape != hidden.shape[:1]:
        raise ShapeError(
            f"hidden {tuple(hidden.shape)}, weight {tuple(weight.shape)}, targets {tuple(targets.shape)} do not fit"
        )
    options = options or HeadOptions()
    apply: Callable[..., tuple[Tensor, Tensor]] = _ChunkedLogprobs.apply
    logprobs, entropy = apply(hidden, weight, bias, targets, temperature, options)
    return logprobs, (entropy if options.with_entropy else None)


class _ChunkedLogprobs(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: FunctionCtx,
        hidden: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        targets: Tensor,
        temperature: float | Tensor,
        options: HeadOptions,
    ) -> tuple[Tensor, Tensor]:
        head = _Head(weight, bias, temperature, options, hidden)
        normaliser = torch.empty(hidden.shape[0], dtype=head.dtype, device=hidden.device)
        chosen = torch.empty_like(normaliser)
        entropy = torch.zeros_like(normaliser)
        for part in head.parts(hidden.shape[0]):
            logits = head.logits(hidden, part)
            chosen[part] = logits.gather(1, targets[part, None])[:, 0]
            peak = logits.amax(dim=1)
            shifted = logits.sub_(peak[:, None])
            if options.with_entropy:
                logs = torch.log_softmax(shifted, dim=1)
                entropy[part] = -(logs.exp() * logs).sum(dim=1)
            normaliser[part] = peak + shifted.exp_().sum(dim=1).log_()
        ctx.save_for_backward(hidden, weight, bias, targets, normaliser)  # type: ignore[arg-type]  # None is allowed
        ctx.temperature = temperature  # type: ignore[attr-defined]  # plain attributes are the documented way
        ctx.options = options  # type: ignore[attr-defined]
        ctx.mark_non_differentiable(entropy)
        return chosen - normaliser, entropy

    @staticmethod
    @once_differentiable
    def backward(ctx: FunctionCtx, *grads: Tensor) -> tuple[Tensor | None, Tensor | None, Tensor | None, None, None, None]:
        hidden, weight, bias, targets, normaliser = ctx.saved_tensors  # type: ignore[attr-defined]
        need_hidden, need_weight, need_bias = ctx.needs_input_grad[:3]  # type: ignore[attr-defined]
        head = _Head(weight, bias, ctx.temperature, ctx.options, hidden)  # type: ignore[attr-defined]
        grad = grads[0].to(head.dtype)
        d_hidden = torch.empty_like(hidden, dtype=head.dtype) if need_hidden else None
        d_weight = torch.zeros_like(head.weight) if need_weight else None
        d_bias = torch.zeros_like(head.bias) if need_bias and head.bias is not None else None
        for part in head.parts(hidden.shape[0]):
            d_raw = head.raw_gradient(hidden, targets[part], normaliser[part], grad[part], part)
            if d_hidden is not None:
                torch.mm(d_raw, head.weight, out=d_hidden[part])
            if d_weight is not None:
                d_weight.addmm_(d_raw.t(), hidden[part].to(head.dtype))
            if d_bias is not None:
                d_bias += d_raw.sum(dim=0)
        return (
            None if d_hidden is None else d_hidden.to(hidden.dtype),
            None if d_weight is None else d_weight.to(weight.dtype),
            None if d_bias is None or bias is None else d_bias.to(bias.dtype),
            None,
            None,
            None,
        )


class _Head:
    """The output layer with one reused buffer of logits."""

    def __init__(
        self, weight: Tensor, bias: Tensor | None, temperature: float | Tensor, options: HeadOptions, hidden: Tensor
    ) -> None:
        self.dtype = torch.promote_types(hidden.dtype, torch.float32)
        self.weight = weight.detach().to(self.dtype)
        self.bias = None if bias is None else bias.detach().to(self.dtype)
        self.transform = options.transform
        self.temperature = temperature if isinstance(temperature, float | int) else temperature.to(self.dtype)[:, None]
        vocabulary = weight.shape[0]
        self.chunk = options.chunk_tokens
        if weight.device.type == "cpu":
            self.chunk = min(self.chunk, max(1, CHUNK_ELEMENTS // vocabulary))
        self.buffer = torch.empty(min(self.chunk, hidden.shape[0]), vocabulary, dtype=self.dtype, device=weight.device)

    def parts(self, num_tokens: int) -> list[slice]:
        return [slice(start, min(start + self.chunk, num_tokens)) for start in range(0, num_tokens, self.chunk)]

    def logits(self, hidden: Tensor, part: slice) -> Tensor:
        """Return the tempered logits [C, V] of the tokens in `part`, in the shared buffer."""
        out = self.buffer[: part.stop - part.start]
        inputs = hidden[part].to(self.dtype)
        if self.bias is None:
            torch.mm(inputs, self.weight.t(), out=out)
        else:
            torch.addmm(self.bias, inputs, self.weight.t(), out=out)
        softcap = self.transform.softcap
        if softcap is not None:
            out.mul_(self.transform.scale / softcap).tanh_()
        return self._scale(out, part, 1.0 if softcap is None else softcap / self.transform.scale)

    def raw_gradient(self, hidden: Tensor, targets: Tensor, normaliser: Tensor, grad: Tensor, part: slice) -> Tensor:
        """Return d(Σ grad · logprob)/d(raw logits) [C, V] in the shared buffer: grad · (onehot − softmax), transformed."""
        logits = self.logits(hidden, part)
        slope = None
        if self.transform.softcap is not None:  # d softcap·tanh(s z / softcap) / dz = s (1 − tanh²)
            slope = (logits * (self._temperature(part) / self.transform.softcap)).square_().neg_().add_(1.0)
        d_logits = logits.sub_(normaliser[:, None]).exp_().mul_(-grad[:, None])
        d_logits.scatter_add_(1, targets[:, None], grad[:, None])
        d_raw = self._scale(d_logits, part, 1.0)
        return d_raw if slope is None else d_raw.mul_(slope)

    def _temperature(self, part: slice) -> float | Tensor:
        return self.temperature[part] if isinstance(self.temperature, Tensor) else self.temperature

    def _scale(self, values: Tensor, part: slice, extra: float) -> Tensor:
        """Multiply in place by transform.scale · extra / temperature."""
        factor = self.transform.scale * extra / self._temperature(part)
        return values if isinstance(factor, float) and factor == 1.0 else values.mul_(factor)
