"""vLLM on a GPU: what the CPU tests show, with other kernels and schedulers. `python -m pytest tests/gpu -m gpu`."""

from __future__ import annotations

import asyncio
from pathlib import Path

import numpy as np
import pytest
import torch
from transformers import PreTrainedModel

from async_rl.config.rollout import RolloutConfig, VllmConfig
from async_rl.rollout.engine import Completion
from async_rl.rollout.engines import make_engine
from async_rl.testing.pushes import push_of
from async_rl.testing.tiny_models import TinyModel, make_tiny_model, save_tiny_model
from protocol.messages import SamplingParams

pytestmark = [pytest.mark.gpu, pytest.mark.timeout(600)]

SIZES = {"hidden_size": 256, "intermediate_size": 512, "head_dim": 64, "max_position_embeddings": 512}
PROMPTS = [[3 + (7 * index + offset) % 19 for index in range(length)] for offset, length in enumerate((5, 40, 70))]
LARGEST = {"float32": 1e-3, "bfloat16": 0.5}
MEAN = {"float32": 1e-4, "bfloat16": 0.05}
"""Nats. float32 matrix products differ by the order of their sums; bfloat16 rounds."""


def policy(kind: TinyModel, version: int, dtype: str) -> PreTrainedModel:
    model = make_tiny_model(kind, seed=version, sharpness=2.0, **SIZES)
    return model.to(getattr(torch, dtype)).float().to("cuda")  # type: ignore[no-any-return]  # nn.Module.to


@torch.no_grad()
def differences(kind: TinyModel, prompt: list[int], completion: Completion, dtype: str, temperature: float) -> np.ndarray:
    ids = torch.tensor([[*prompt, *completion.token_ids.tolist()]], device="cuda")
    found = np.full(len(completion.token_ids), np.inf)
    for version in np.unique(completion.versions).tolist():
        logits = policy(kind, version, dtype)(input_ids=ids, use_cache=False).logits[0].float()
        expected = torch.log_softmax(logits / temperature, -1)[:-1].gather(1, ids[0, 1:, None])[:, 0].cpu().numpy()
        own = completion.versions == version
        found[own] = np.abs(completion.logprobs - expected[len(prompt) - 1 :])[own]
    return found


@pytest.mark.parametrize("num_gpus", [1, 2])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("kind", [TinyModel.LLAMA, TinyModel.LLAMA_TIED])
async def test_logprobs_are_the_trainers_across_pushes(kind: TinyModel, dtype: str, num_gpus: int, tmp_path: Path) -> None:
    if torch.cuda.device_count() < num_gpus:
        pytest.skip(f"needs {num_gpus} GPUs")
    path = save_tiny_model(tmp_path / "model", kind, sharpness=2.0, **SIZES)
    vllm = VllmConfig(tensor_parallel_size=num_gpus, gpu_memory_utilization=0.3, kv_cache_bytes=2**30)
    config = RolloutConfig.model_validate({"engine": "vllm", "device": "cuda", "dtype": dtype, "vllm": vllm})
    engine = make_engine(path, config, "engine-0")
    await engine.start()
    try:
        await engine.serve(0)
        found: list[np.ndarray] = []
        version, spanning = 0, 0
        for temperature in (1.0, 0.6):
            sampling = [SamplingParams(temperature, 400, 10 * version + member) for member in range(4)]
            running = [asyncio.ensure_future(engine.generate(prompt, sampling)) for prompt in PROMPTS]
            for _ in range(10):
                version += 1
                manifest, tensors = push_of(policy(kind, version, dtype).cpu(), version, wire_dtype=dtype)
                await engine.swap(manifest, tensors)
                assert engine.digests(manifest) == {entry.name: entry.digest for entry in manifest.entries}
                await engine.serve(version)
            for prompt, task in zip(PROMPTS, running, strict=True):
                for completion in await task:
                    found.append(differences(kind, prompt, completion, dtype, temperature))
                    spanning += len(set(completion.versions.tolist())) > 1
            after = await engine.generate(PROMPTS[2], sampling)
            found += [differences(kind, PROMPTS[2], one, dtype, temperature) for one in after]
        every = np.concatenate(found)
        print(f"{kind} {dtype} {num_gpus} GPU: mean {every.mean():.3g} max {every.max():.3g}, {every.size} tokens ({spanning})")
        assert every.max() <= LARGEST[dtype]
        assert every.mean() <= MEAN[dtype]
    finally:
        await engine.close()
