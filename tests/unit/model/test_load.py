from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from async_rl.errors import ConfigError, DataError
from async_rl.model.load import load_causal_lm
from async_rl.model.tokenizer import load_tokenizer
from async_rl.testing.tiny_models import EOS_ID, TinyModel, char_tokenizer, make_tiny_model, save_tiny_model


@pytest.mark.parametrize("kind", list(TinyModel))
def test_a_saved_model_loads_bit_for_bit(kind: TinyModel, tmp_path: Path) -> None:
    saved = make_tiny_model(kind, seed=3)
    loaded = load_causal_lm(save_tiny_model(tmp_path, kind, seed=3))
    assert not loaded.training
    for (name, mine), (other_name, theirs) in zip(saved.named_parameters(), loaded.named_parameters(), strict=True):
        assert name == other_name
        assert torch.equal(mine, theirs)


def test_load_casts_to_the_asked_dtype(tmp_path: Path) -> None:
    model = load_causal_lm(save_tiny_model(tmp_path), dtype=torch.bfloat16)
    assert {parameter.dtype for parameter in model.parameters()} == {torch.bfloat16}


def test_a_missing_directory_is_named(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"model\.path=.*nowhere does not exist"):
        load_causal_lm(tmp_path / "nowhere")
    with pytest.raises(DataError, match="does not exist"):
        load_tokenizer(tmp_path / "nowhere")


def test_a_file_in_place_of_a_directory_is_named(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(DataError, match="is not a directory"):
        load_causal_lm(tmp_path / "file")


@pytest.mark.parametrize(
    ("name", "message"), [("config.json", "no config.json"), ("model.safetensors", r"no \*.safetensors file")]
)
def test_a_missing_file_is_named(name: str, message: str, tmp_path: Path) -> None:
    (save_tiny_model(tmp_path) / name).unlink()
    with pytest.raises(DataError, match=message):
        load_causal_lm(tmp_path)


def test_pickled_weights_are_refused(tmp_path: Path) -> None:
    directory = save_tiny_model(tmp_path)
    torch.save(load_file(directory / "model.safetensors"), directory / "pytorch_model.bin")
    (directory / "model.safetensors").unlink()
    with pytest.raises(DataError, match="pickled"):
        load_causal_lm(directory)


def test_a_truncated_file_is_a_data_error(tmp_path: Path) -> None:
    file = save_tiny_model(tmp_path) / "model.safetensors"
    file.write_bytes(file.read_bytes()[:-100])
    with pytest.raises(DataError, match="damaged"):
        load_causal_lm(tmp_path)


@pytest.mark.parametrize("change", ["drop", "reshape"])
def test_a_tensor_that_would_be_made_up_is_refused(change: str, tmp_path: Path) -> None:
    file = save_tiny_model(tmp_path) / "model.safetensors"
    tensors = load_file(file)
    name = "model.layers.1.mlp.up_proj.weight"
    if change == "drop":
        del tensors[name]
    else:
        tensors[name] = torch.zeros(7, 64)
    save_file(tensors, file, metadata={"format": "pt"})
    with pytest.raises(DataError, match=r"up_proj|size mismatch|mismatch"):
        load_causal_lm(tmp_path)


def test_an_unknown_attention_or_device_is_a_config_error(tmp_path: Path) -> None:
    directory = save_tiny_model(tmp_path)
    with pytest.raises(ConfigError, match="attn_implementation"):
        load_causal_lm(directory, attn="nonesuch")
    with pytest.raises(ConfigError, match="device=nonesuch"):
        load_causal_lm(directory, device="nonesuch")


def test_a_directory_without_tokenizer_is_named(tmp_path: Path) -> None:
    make_tiny_model().save_pretrained(tmp_path)
    with pytest.raises(DataError, match=r"no tokenizer\.json"):
        load_tokenizer(tmp_path)


def test_the_character_tokenizer_round_trips_and_adds_nothing(tmp_path: Path) -> None:
    char_tokenizer().save_pretrained(tmp_path / "t")
    (tmp_path / "t" / "config.json").write_text('{"model_type": "llama"}')
    tokenizer = load_tokenizer(tmp_path / "t")
    text = "402913>\n1 + 2"
    ids = tokenizer(text)["input_ids"]
    assert len(ids) == len(text)
    assert ids[:3] == [7, 3, 5]  # "4", "0", "2" after three special tokens
    assert tokenizer.decode(ids) == text
    assert tokenizer.decode([*ids, EOS_ID], skip_special_tokens=True) == text
