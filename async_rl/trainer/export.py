"""A checkpoint as a Hugging Face directory: safetensors, config and tokenizer, loadable by AutoModelForCausalLM."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any, cast

import torch
from torch import nn
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel

from async_rl.errors import CheckpointError, RunDirError
from async_rl.model.load import no_progress_bars
from async_rl.run_dir.layout import RunLayout
from async_rl.trainer.checkpoint import MODEL_FILES, Checkpoint, checkpoint_of_step, find_latest, model_state


def export_hf(run_dir: Path, to: Path, *, step: int | None = None) -> Path:
    """Write the policy of a run's newest complete checkpoint (or of `step`) to the new directory `to`, float32.

    Raises: CheckpointError if there is no such checkpoint; RunDirError if `to` exists and is not empty, or cannot be written.
    """
    checkpoints = RunLayout(run_dir).checkpoints_dir
    if step is not None:
        return export_checkpoint(checkpoint_of_step(checkpoints, step), to)
    found = find_latest(checkpoints)
    if found.latest is None:
        why = "; ".join(skipped.reason for skipped in found.skipped) or "it is empty"
        raise CheckpointError(f"{checkpoints} has no complete checkpoint: {why}")
    return export_checkpoint(found.latest, to)


def export_checkpoint(checkpoint: Checkpoint, to: Path) -> Path:
    """Write one checkpoint's policy to `to`, bit for bit as trained; all of it or nothing.

    Raises: CheckpointError if the checkpoint has no model files; RunDirError if `to` is taken or cannot be written.
    """
    source = checkpoint.path / MODEL_FILES
    if not (source / "config.json").is_file():
        raise CheckpointError(f"checkpoint {checkpoint.path} has no {MODEL_FILES}/config.json; it cannot be exported")
    if to.exists() and (not to.is_dir() or any(to.iterdir())):
        raise RunDirError(f"--to {to} exists and is not an empty directory; name another")
    temporary = to.with_name(f".{to.name}.tmp")
    try:
        shutil.rmtree(temporary, ignore_errors=True)
        shutil.copytree(source, temporary)
        with no_progress_bars():
            _model(checkpoint, source).save_pretrained(temporary)
        if to.exists():
            to.rmdir()
        temporary.replace(to)
    except OSError as error:
        shutil.rmtree(temporary, ignore_errors=True)
        raise RunDirError(f"--to {to} cannot be written: {error.strerror or error}") from error
    return to


def _model(checkpoint: Checkpoint, source: Path) -> PreTrainedModel:
    config = AutoConfig.from_pretrained(source, local_files_only=True)
    make: Callable[..., nn.Module] = cast(Any, AutoModelForCausalLM).from_config
    model = make(config, dtype=torch.float32)
    tensors = model_state(checkpoint.path)
    missing = {name for name, _ in model.named_parameters()} - set(tensors)
    if missing:
        raise CheckpointError(f"checkpoint {checkpoint.path} lacks {sorted(missing)[0]}; its config is of another model")
    model.load_state_dict(tensors, strict=False)
    return cast(PreTrainedModel, model)
