"""The policy that trains: a Hugging Face causal LM over packed tokens, sharded by FSDP2.

The names of parameters, in state dicts and weight pushes, are the Hugging Face model's own.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor
from transformers import PreTrainedModel

from async_rl.errors import ConfigError, ShapeError
from async_rl.model.attention import PACKED, PackedSegments, packed_segments
from async_rl.model.load import load_causal_lm, read_tensor
from async_rl.model.logprobs import HeadOptions, token_logprobs
from async_rl.trainer.architecture import checkpoint_activations, logit_transform, output_head, refuse_unpackable
from async_rl.trainer.packed_model import PackedModel, persistent_buffers
from async_rl.trainer.sharding import decoder_layers, full_tensor, own_shard
from async_rl.weights.canary import canary_scale, canary_tensor
from async_rl.weights.manifest import Probe
from async_rl.weights.send_buffer import TensorSpec

SELF_TEST_TOLERANCE = 1e-5
"""Largest |packed, chunked − the model's own| logprob accepted at load, float32, nats (relative above 10 nats)."""
CANARY_SEED = 0


@dataclass(frozen=True, slots=True)
class PolicyOptions:
    """How the policy computes.

    dtype: of the forward and backward pass; master weights, head and gradient reduction stay float32.
    cpu_offload: sharded parameters, gradients and optimizer state stay in host memory.
    measure_rounding: at load, measure what bfloat16 does to this model's logprobs (`PolicyModel.rounding_noise`).
    canary_dtype: at load, score the canary as it is in this wire dtype (`PolicyModel.canary`); None: no canary.
    """

    dtype: torch.dtype = torch.float32
    chunk_tokens: int = 1024
    activation_checkpointing: bool = False
    cpu_offload: bool = False
    measure_rounding: bool = False
    canary_dtype: torch.dtype | None = None


@dataclass(frozen=True, slots=True)
class CanaryScores:
    """The canary of this model (see weights.canary): tensors' scales by name, the probe under it, and bfloat16's noise there
    if it was measured."""

    scales: Mapping[str, tuple[float, float]]
    probe: Probe
    noise: float | None


class PolicyModel(PackedModel):
    """Logprobs of packed tokens. FSDP's root holds embeddings, last norm and head."""

    def __init__(self, hf: PreTrainedModel, options: PolicyOptions | None = None) -> None:
        """Wrap a float32 model that was loaded with attn=PACKED.

        Raises: ConfigError if the model cannot be trained packed.
        """
        chosen = options or PolicyOptions()
        super().__init__(dtype=chosen.dtype, cpu_offload=chosen.cpu_offload)
        self.options = chosen
        refuse_unpackable(hf)
        self.hf = hf
        self.eval()  # no dropout, ever: the trainer computes the distribution that the engine samples from
        self.transform = logit_transform(hf)
        if self.options.activation_checkpointing:
            for layer in decoder_layers(hf):
                checkpoint_activations(layer)

        self.rounding_noise: float | None = None
        """Mean |bfloat16 − float32| logprob, nats, as measured at load; None if it was not asked for."""
        self.canary: CanaryScores | None = None

    def forward(
        self,
        token_ids: Tensor,
        position_ids: Tensor,
        segments: PackedSegments,
        rows: Tensor,
        temperature: float | Tensor,
        with_entropy: bool = False,
        head_weight: Tensor | None = None,
    ) -> tuple[Tensor, Tensor | None]:
        """Return the logprob of token t given its sequence's tokens before t at each t in rows, 0 elsewhere, and the entropies.

        token_ids, position_ids int64 [T]; rows int64 [N], none of them a sequence's first token; temperature one number or [N].
        logprobs float32 [T], nats; entropy float32 [T] without gradient, or None. head_weight: [V, h], in place of the own.
        """
        base = self.hf.base_model
        hidden = base(
            input_ids=token_ids[None],
            position_ids=position_ids[None],
            use_cache=False,
            packed_segments=segments,
        ).last_hidden_state[0]
        head = output_head(self.hf)
        logprobs, entropy = token_logprobs(
            hidden.index_select(0, segments.previous[rows]),
            head.weight if head_weight is None else head_weight,
            token_ids.index_select(0, rows),
            temperature=temperature,
            options=HeadOptions(transform=self.transform, chunk_tokens=self.options.chunk_tokens, with_entropy=with_entropy),
            bias=head.bias,
        )
        spread = logprobs.new_zeros(len(token_ids))
        return spread.index_copy(0, rows, logprobs), None if entropy is None else spread.index_copy(0, rows, entropy)

    def logprobs(
        self,
        token_ids: Tensor,
        position_ids: Tensor,
        cu_seqlens: Tensor,
        select: Tensor,
        temperature: float | Tensor,
        *,
        parents: Tensor | None = None,
        with_entropy: bool = False,
        head_weight: Tensor | None = None,
    ) -> tuple[Tensor, Tensor | None]:
        """Return [T] logprobs where `select` (bool [T]) and 0 elsewhere, and entropies if asked for.

        The other arguments as in a MicroBatch; temperature one number or float [T]. A micro-batch that selects nothing runs
        all the same, and its backward pass too.
        Raises: ShapeError if a sequence's first token is selected, which nothing predicts.
        """
        device = self.device
        rows = select.nonzero()[:, 0]
        segments = packed_segments(cu_seqlens, device, parents=parents)
        if bool((segments.previous[rows.to(device)] < 0).any()):
            raise ShapeError("the first token of a sequence is selected (loss_mask); nothing predicts it")
        selected = _uniform(temperature[rows]) if isinstance(temperature, Tensor) else temperature
        if isinstance(selected, Tensor):
            selected = selected.to(device)
        result: tuple[Tensor, Tensor | None] = self(
            token_ids.to(device), position_ids.to(device), segments, rows.to(device), selected, with_entropy, head_weight
        )
        if not torch.is_grad_enabled():
            self.reshard_all()
        return result

    @torch.no_grad()
    def score(
        self,
        sequences: Sequence[Sequence[int]],
        *,
        temperature: float,
        max_tokens: int = 8192,
        head_weight: Tensor | None = None,
    ) -> list[npt.NDArray[np.float32]]:
        """Return the logprobs of each sequence's tokens but the first ([len − 1], nats). Every rank must call it.

        Sequences run packed, in passes of at most max_tokens tokens (a longer one alone). head_weight: as in `forward`.
        """
        scores: list[npt.NDArray[np.float32]] = []
        for group in _passes([len(sequence) for sequence in sequences], max_tokens):
            members = [sequences[index] for index in group]
            cu_seqlens = torch.tensor(np.cumsum([0, *(len(member) for member in members)]), dtype=torch.int32)
            token_ids = torch.cat([torch.as_tensor(np.asarray(member, dtype=np.int64)) for member in members])
            position_ids = torch.cat([torch.arange(len(member)) for member in members])
            logprobs, _ = self.logprobs(
                token_ids, position_ids, cu_seqlens, position_ids > 0, temperature, head_weight=head_weight
            )
            values = logprobs.float().cpu().numpy()
            bounds = cu_seqlens.tolist()
            scores.extend(values[start + 1 : end].copy() for start, end in pairwise(bounds))
        return scores

    def named_full_tensors(self) -> Iterator[tuple[str, Tensor]]:
        """Yield every tensor of a push once, whole, float32 (as trained): parameters, then persistent buffers.

        Every rank must iterate to the end; shards are gathered one tensor at a time. Unsharded tensors are the live ones:
        copy what must outlive the next step. Of tied tensors the first name is yielded, see `ties`.
        """
        for name, parameter in self.hf.named_parameters():
            yield name, full_tensor(parameter.detach())
        for name, buffer in self.named_persistent_buffers():
            yield name, full_tensor(buffer)

    def weight_specs(self) -> list[TensorSpec]:
        """What a push holds, in the order of named_full_tensors. Nothing is gathered; every rank says the same."""
        specs = [TensorSpec(name, tuple(p.shape), p.dtype) for name, p in self.hf.named_parameters()]
        return specs + [TensorSpec(name, tuple(b.shape), b.dtype, True) for name, b in self.named_persistent_buffers()]

    def named_shards(self) -> Iterator[tuple[str, Tensor, int]]:
        """Yield what this rank writes of a push: (name, shard, index of its first element in the flattened whole).

        Over all ranks every element comes once: of what is replicated, from the first rank that holds it.
        """
        for name, parameter in self.hf.named_parameters():
            if isinstance(parameter, DTensor):
                yield from own_shard(name, parameter)
            elif self.rank == 0:
                yield name, parameter.detach(), 0
        if self.rank == 0:
            yield from ((name, buffer, 0) for name, buffer in self.named_persistent_buffers())

    def named_persistent_buffers(self) -> Iterator[tuple[str, Tensor]]:
        """Yield the buffers that belong to the state dict, each once, by the Hugging Face model's names."""
        return persistent_buffers(self.hf)

    def ties(self) -> tuple[tuple[str, str], ...]:
        """Return (alias, owner) names of tied parameters; the owner is the name that named_full_tensors yields."""
        owners = {id(parameter): name for name, parameter in self.hf.named_parameters()}
        everything = self.hf.named_parameters(remove_duplicate=False)
        return tuple((name, owners[id(p)]) for name, p in everything if owners[id(p)] != name)


def load_policy(path: Path | str, *, options: PolicyOptions | None = None, mesh: DeviceMesh | None = None) -> PolicyModel:
    """Load a model directory, verify it against the model's own logits, and shard it over `mesh`, whose device it trains on.

    Raises: DataError and ConfigError as load_causal_lm; ConfigError if packed, chunked logprobs differ from the model's own.
    """
    policy = PolicyModel(load_causal_lm(path, attn=PACKED), options)
    policy.source = Path(path)
    verify_logprobs(policy)
    if policy.options.measure_rounding:
        policy.rounding_noise = bfloat16_noise(policy)
    if policy.options.canary_dtype is not None:
        policy.canary = score_canary(policy, policy.options.canary_dtype)
    policy.place(decoder_layers(policy.hf), mesh)
    return policy


def shard_policy(policy: PolicyModel, mesh: DeviceMesh) -> None:
    """Cut the policy over `mesh` in place, as its options say (see sharding.shard)."""
    policy.shard(decoder_layers(policy.hf), mesh)


def load_head(directory: Path, policy: PolicyModel) -> Tensor:
    """The output layer's weight of a model directory of the policy's architecture, [V, h], on the policy's device.

    Raises: DataError if it has none.
    """
    weight = output_head(policy.hf).weight
    name = next(name for name, parameter in policy.hf.named_parameters() if parameter is weight)
    return read_tensor(directory, name).to(device=policy.device, dtype=torch.float32)


@torch.no_grad()
def verify_logprobs(policy: PolicyModel) -> float:
    """Compare packed, chunked logprobs with log_softmax of the model's own logits on two short sequences; return the maximum.

    It runs before sharding, in float32. It finds what a model does that is not modelled here: another transform of its
    logits, state that leaks between packed sequences, attention that ignores position ids.
    Raises: ConfigError if they differ by more than SELF_TEST_TOLERANCE.
    """
    sequences = _self_test_sequences(policy, (11, 7))
    packed = policy.score([sequence.tolist() for sequence in sequences], temperature=1.0)
    worst = 0.0
    policy.hf.set_attn_implementation("eager")
    try:
        for sequence, scores in zip(sequences, packed, strict=True):
            ids = sequence.to(policy.device)[None]
            logits = policy.hf(input_ids=ids, use_cache=False).logits[0, :-1].float()
            own = torch.log_softmax(logits, dim=-1).gather(1, ids[0, 1:, None])[:, 0].cpu()
            difference = (torch.from_numpy(scores) - own).abs() / own.abs().div(10).clamp(min=1)
            worst = max(worst, float(difference.max()))
    finally:
        policy.hf.set_attn_implementation(PACKED)
    if not worst <= SELF_TEST_TOLERANCE:
        raise ConfigError(
            f"{type(policy.hf).__name__}: packed logprobs differ from the model's own by {worst:.3g} nats "
            f"(accepted {SELF_TEST_TOLERANCE:g}); this architecture cannot be trained packed"
        )
    return worst


def bfloat16_noise(policy: PolicyModel) -> float:
    """Return the mean |logprob in bfloat16 − logprob in float32|, nats, over a few short random sequences.

    Weights and activations are rounded as an engine or a trainer in bfloat16 rounds them. Runs before sharding.
    """
    sequences = [sequence.tolist() for sequence in _self_test_sequences(policy, (24, 16, 16, 8))]
    twin = copy.deepcopy(policy)
    for parameter in twin.parameters():
        parameter.data = parameter.data.to(torch.bfloat16)  # buffers (RoPE's among them) stay float32, as under FSDP
    exact = policy.score(sequences, temperature=1.0)
    rounded = twin.score(sequences, temperature=1.0)
    return float(np.abs(np.concatenate(rounded) - np.concatenate(exact)).mean())


@torch.no_grad()
def score_canary(policy: PolicyModel, wire: torch.dtype) -> CanaryScores:
    """Score a few random sequences under the canary's weights, in float32; the policy's own are put back. Before sharding."""
    sequences = [sequence.tolist() for sequence in _self_test_sequences(policy, (24, 16, 16, 8))]
    live = {**dict(policy.hf.named_parameters()), **dict(policy.named_persistent_buffers())}
    floats = {name: tensor for name, tensor in live.items() if tensor.is_floating_point()}
    own = {name: tensor.detach().clone() for name, tensor in floats.items()}
    scales = {name: canary_scale(tensor) for name, tensor in floats.items()}
    try:
        for name, tensor in floats.items():
            tensor.copy_(canary_tensor(name, tuple(tensor.shape), scales[name], CANARY_SEED, wire))
        scores = policy.score(sequences, temperature=1.0)
        noise = bfloat16_noise(policy) if policy.options.measure_rounding else None
    finally:
        for name, tensor in floats.items():
            tensor.copy_(own[name])
    probe = Probe(tuple(np.asarray(sequence, dtype=np.int32) for sequence in sequences), tuple(scores), 1.0)
    return CanaryScores(scales, probe, noise)


def _self_test_sequences(policy: PolicyModel, lengths: Sequence[int]) -> list[Tensor]:
    generator = torch.Generator().manual_seed(0)
    vocabulary = policy.hf.config.vocab_size
    return [torch.randint(vocabulary, (length,), generator=generator) for length in lengths]


def _uniform(temperatures: Tensor) -> float | Tensor:
    """One number if all are equal (a pass over the logits less), 1 for none."""
    if temperatures.numel() == 0:
        return 1.0
    first = float(temperatures[0])
    return first if bool((temperatures == first).all()) else temperatures


def _passes(lengths: Sequence[int], max_tokens: int) -> list[list[int]]:
    """Cut sequences, in order, into passes of at most max_tokens tokens."""
    passes: list[list[int]] = []
    room = 0
    for index, length in enumerate(lengths):
        if not passes or length > room:
            passes.append([])
            room = max_tokens
        passes[-1].append(index)
        room -= length
    return passes
