"""Load the tokenizer beside a model. Without the half of transformers that models need: decoding is all some roles do."""

from __future__ import annotations

from pathlib import Path
from typing import cast

from transformers import AutoTokenizer, GenerationConfig, PreTrainedTokenizerBase

from async_rl.errors import DataError

TOKENIZER_FILES = ("tokenizer.json", "tokenizer.model", "vocab.json", "tokenizer_config.json")


def load_tokenizer(path: Path | str) -> PreTrainedTokenizerBase:
    """Load the tokenizer beside a model.

    Raises: DataError if the directory has no readable tokenizer.
    """
    directory = model_directory(path)
    if not any((directory / name).is_file() for name in TOKENIZER_FILES):
        raise DataError(f"model.path={directory} has no tokenizer.json; save it there with tokenizer.save_pretrained")
    try:
        tokenizer = AutoTokenizer.from_pretrained(directory, local_files_only=True, trust_remote_code=False)
    except Exception as error:  # the tokenizers library raises bare Exception
        raise DataError(f"the tokenizer in model.path={directory} cannot be read: {first_line(error)}") from error
    return cast(PreTrainedTokenizerBase, tokenizer)


def stop_token_ids(path: Path | str, tokenizer: PreTrainedTokenizerBase) -> list[int]:
    """Where sampling ends: the tokenizer's end of text, and what the model's own generation config ends with."""
    stops = set() if tokenizer.eos_token_id is None else {int(tokenizer.eos_token_id)}
    if (Path(path) / "generation_config.json").is_file():
        own = GenerationConfig.from_pretrained(path).eos_token_id
        stops.update([own] if isinstance(own, int) else own or [])
    return sorted(stops)


def model_directory(path: Path | str) -> Path:
    """Raises: DataError if `path` is no model directory."""
    directory = Path(path)
    if not directory.is_dir():
        what = "is not a directory" if directory.exists() else "does not exist"
        raise DataError(f"model.path={directory} {what}; give the directory of a Hugging Face causal LM")
    if not (directory / "config.json").is_file():
        raise DataError(f"model.path={directory} has no config.json; give the directory of a Hugging Face causal LM")
    return directory


def first_line(error: BaseException) -> str:
    """Kind and first line of an error of a library, for the middle of a sentence."""
    text = str(error).strip()
    return f"{type(error).__name__}: {text.splitlines()[0]}" if text else type(error).__name__
