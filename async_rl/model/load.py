"""Load a causal LM from a local Hugging Face directory, with errors that name the file and the remedy."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, cast

import torch
from safetensors import safe_open
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel
from transformers.utils import logging as hf_logging

from async_rl.errors import ConfigError, DataError
from async_rl.model.tokenizer import first_line, model_directory


def load_causal_lm(
    path: Path | str,
    *,
    dtype: torch.dtype = torch.float32,
    device: torch.device | str = "cpu",
    attn: str | None = None,
) -> PreTrainedModel:
    """Load any Hugging Face causal LM in eval mode (dropout off), from safetensors only, never from the network.

    attn: name of an attention implementation registered with transformers; None takes the model's default.
    Raises: DataError if the directory or one of its files is missing or unreadable; ConfigError if the model is of a kind
    that cannot be trained or sampled as a causal LM, or does not fit `attn` or `device`.
    """
    directory = model_directory(path)
    if not any(directory.glob("*.safetensors")):
        raise DataError(
            f"model.path={directory} has no *.safetensors file; save the model with save_pretrained "
            "(pickled .bin weights are refused)"
        )
    try:
        with no_progress_bars():
            model, info = cast(Any, AutoModelForCausalLM).from_pretrained(
                directory,
                dtype=dtype,
                attn_implementation=attn,
                local_files_only=True,
                trust_remote_code=False,
                use_safetensors=True,
                output_loading_info=True,
            )
    except (ValueError, ImportError, NotImplementedError) as error:
        raise ConfigError(f"model.path={directory} cannot be loaded as a causal LM: {first_line(error)}") from error
    except Exception as error:  # safetensors, OS and size errors share no base class
        raise DataError(f"model.path={directory} is damaged or incomplete: {first_line(error)}") from error
    _refuse_made_up_weights(directory, info)
    try:
        return cast(PreTrainedModel, model.to(device).eval())
    except (RuntimeError, AssertionError) as error:
        raise ConfigError(f"device={device} cannot hold the model: {first_line(error)}") from error


def describe_causal_lm(path: Path | str) -> PreTrainedModel:
    """The model of a directory on the meta device: names, shapes and ties, but no values.

    Raises: DataError if the directory or its config.json is missing; ConfigError if it is no causal LM.
    """
    directory = model_directory(path)
    try:
        config = AutoConfig.from_pretrained(directory, local_files_only=True, trust_remote_code=False)
        with torch.device("meta"):
            return cast(PreTrainedModel, cast(Any, AutoModelForCausalLM).from_config(config).eval())
    except (ValueError, KeyError, ImportError, NotImplementedError) as error:
        raise ConfigError(f"model.path={directory} is no causal LM: {first_line(error)}") from error


def _refuse_made_up_weights(directory: Path, info: dict[str, Any]) -> None:
    """transformers only warns when it fills a tensor that the file lacks, or has in another shape, with random numbers."""
    missing = sorted(str(key) for key in [*info["missing_keys"], *info["mismatched_keys"]])
    if missing:
        raise DataError(
            f"model.path={directory} lacks {len(missing)} of the model's tensors or has them in another shape "
            f"({', '.join(missing[:3])}{', ...' if len(missing) > 3 else ''}); save the whole model with save_pretrained"
        )


def read_tensor(path: Path | str, name: str) -> torch.Tensor:
    """One tensor of a model directory, by its name in the safetensors files.

    Raises: DataError if no file has it.
    """
    directory = model_directory(path)
    for file in sorted(directory.glob("*.safetensors")):
        with safe_open(file, framework="pt") as tensors:
            if name in tensors.keys():  # noqa: SIM118 - no mapping: it has keys() alone
                return cast(torch.Tensor, tensors.get_tensor(name))
    raise DataError(f"model.path={directory} has no tensor {name!r}; save the whole model with save_pretrained")


@contextmanager
def no_progress_bars() -> Iterator[None]:
    """Keep transformers from drawing on standard error while it loads or saves."""
    enabled = hf_logging.is_progress_bar_enabled()
    disable: Callable[[], None] = hf_logging.disable_progress_bar
    enable: Callable[[], None] = hf_logging.enable_progress_bar
    disable()
    try:
        yield
    finally:
        if enabled:
            enable()
