"""A small engine for tests of weight pushes: a real torch module with a tied head, buffers and real logprobs."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
import numpy.typing as npt
import torch
from torch import nn

from async_rl.errors import EngineError
from async_rl.weights.manifest import WIRE_DTYPES, Manifest, Probe, check_names, tensor_digest

VOCABULARY = 2048
WIDTH = 16


class TinyPolicy(nn.Module):
    """Next-token logits from the last token alone; 0.13 MB in float32, of which the tied embedding is the most.

    `scale` is a float buffer and `steps` an integer one, both part of the state; `tied=False` gives the head its own weight.
    """

    def __init__(self, seed: int, *, tied: bool = True) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(seed)
        self.embed = nn.Embedding(VOCABULARY, WIDTH)
        self.mix = nn.Linear(WIDTH, WIDTH)
        self.head = nn.Linear(WIDTH, VOCABULARY, bias=False)
        if tied:
            self.head.weight = self.embed.weight
        self.scale: torch.Tensor
        self.steps: torch.Tensor
        self.register_buffer("scale", torch.tensor(1.5))
        self.register_buffer("steps", torch.tensor([seed, 7]))
        with torch.no_grad():
            for parameter in self.parameters():
                parameter.copy_(torch.randn(parameter.shape, generator=generator))

    def forward(self, token_ids: torch.Tensor) -> torch.Tensor:
        """Logits [T, VOCABULARY] of the tokens after each of token_ids int64 [T]."""
        hidden = torch.tanh(self.mix(self.embed(token_ids))) * self.scale
        logits: torch.Tensor = self.head(hidden)
        return logits

    @torch.no_grad()
    def logprobs(self, token_ids: Sequence[int], temperature: float) -> npt.NDArray[np.float32]:
        """Of token t given the ones before it, float32 [T − 1]."""
        ids = torch.tensor(token_ids)
        table = torch.log_softmax(self(ids[:-1]).float() / temperature, dim=-1)
        values: npt.NDArray[np.float32] = table.gather(1, ids[1:, None])[:, 0].numpy()
        return values


def tiny_probe(model: TinyPolicy, *, temperature: float = 0.7) -> Probe:
    """Two sequences, scored by `model`."""
    sequences = ([1, 5, 9, 2000, 3], [7, 7, 1024])
    return Probe(
        tuple(np.array(ids, dtype=np.int32) for ids in sequences),
        tuple(model.logprobs(ids, temperature) for ids in sequences),
        temperature,
    )


class TinyEngine:
    """WeightSink and Scorer over a TinyPolicy. `history` says what was called, in order."""

    def __init__(self, model: TinyPolicy) -> None:
        self.model = model
        self.serving: int | None = None
        self.history: list[str] = []

    @property
    def serving_version(self) -> int | None:
        return self.serving

    def check(self, manifest: Manifest) -> None:
        check_names(manifest, {name: tuple(tensor.shape) for name, tensor in self.model.state_dict().items()})

    async def swap(self, manifest: Manifest, tensors: Mapping[str, torch.Tensor]) -> None:
        self.history.append(f"swap {manifest.version}")
        self.serving = None
        state = self.model.state_dict()
        with torch.no_grad():
            for name, tensor in tensors.items():
                state[name].copy_(tensor)
            for alias, owner in manifest.ties:
                state[alias].copy_(tensors[owner])

    def digests(self, manifest: Manifest) -> Mapping[str, str]:
        state = self.model.state_dict()
        return {entry.name: tensor_digest(state[entry.name].to(WIRE_DTYPES[entry.dtype])) for entry in manifest.entries}

    async def score(self, sequences: Sequence[Sequence[int]], *, temperature: float) -> Sequence[npt.NDArray[np.float32]]:
        return [self.model.logprobs(ids, temperature) for ids in sequences]

    async def serve(self, version: int) -> None:
        self.history.append(f"serve {version}")
        self.serving = version

    async def withdraw(self, reason: str) -> None:
        self.history.append("withdraw")
        self.serving = None


class FaultyEngine(TinyEngine):
    """Goes wrong at one version: `flip` changes one weight after the copy, `stale_head` computes with an old head (a packed
    copy that the swap missed), `raise` breaks in the swap."""

    def __init__(self, model: TinyPolicy, *, fault: str, at_version: int) -> None:
        super().__init__(model)
        self._fault = fault
        self._at_version = at_version
        self._old_head: torch.Tensor | None = None

    async def swap(self, manifest: Manifest, tensors: Mapping[str, torch.Tensor]) -> None:
        faulty = manifest.version == self._at_version
        if faulty and self._fault == "raise":
            raise EngineError("the engine's worker died")
        self._old_head = self.model.head.weight.detach().clone() if faulty and self._fault == "stale_head" else None
        await super().swap(manifest, tensors)
        if faulty and self._fault == "flip":
            with torch.no_grad():
                self.model.mix.weight[3, 2] += 2**-10

    async def score(self, sequences: Sequence[Sequence[int]], *, temperature: float) -> Sequence[npt.NDArray[np.float32]]:
        if self._old_head is None:
            return await super().score(sequences, temperature=temperature)
        stale = TinyPolicy(0, tied=False)
        stale.load_state_dict({**self.model.state_dict(), "head.weight": self._old_head})
        return [stale.logprobs(ids, temperature) for ids in sequences]
