"""The known keys of a config, by dotted name, and the nearest one to an unknown name."""

from __future__ import annotations

import difflib
from collections.abc import Iterator, Mapping
from functools import cache
from types import NoneType
from typing import Any, get_args, get_origin

from pydantic import BaseModel
from pydantic.fields import FieldInfo

ELSEWHERE: Mapping[str, str] = {
    "batch_size": "trainer.groups_per_step",
    "beta1": "trainer.betas",
    "clip_eps": "algorithm.clip_low",
    "epochs": "data.data_epochs",
    "learning_rate": "trainer.learning_rate",
    "lr": "trainer.learning_rate",
    "max_grad_norm": "trainer.grad_clip",
    "max_length": "rollout.max_context",
    "max_tokens": "rollout.max_new_tokens",
    "model_name": "model.path",
    "n": "rollout.group_size",
    "num_epochs": "data.data_epochs",
    "num_generations": "rollout.group_size",
    "num_processes": "trainer.world_size",
    "num_train_epochs": "data.data_epochs",
    "output_dir": "run_dir",
    "save_steps": "checkpoint.every_steps",
}
"""What other frameworks call a setting of ours. Used in hints only: the names themselves stay unknown."""


@cache
def leaf_fields(model: type[BaseModel]) -> Mapping[str, FieldInfo]:
    """Every setting of `model` by its dotted name, in order of declaration."""
    return dict(_walk(model, ""))


@cache
def sections(model: type[BaseModel]) -> Mapping[str, type[BaseModel]]:
    """Every section of `model` by its dotted name."""
    return dict(_walk_sections(model, ""))


def is_optional(field: FieldInfo) -> bool:
    """Whether the setting may be left unset (None)."""
    return NoneType in get_args(field.annotation)


def is_table(field: FieldInfo) -> bool:
    """Whether the setting is a table with keys of the user's own."""
    return field.annotation is dict or get_origin(field.annotation) is dict


def table_of(model: type[BaseModel], key: str) -> str | None:
    """The free table that the dotted `key` lies in (`environment.args` for `environment.args.length`), or None."""
    parts = key.split(".")
    known = leaf_fields(model)
    for length in range(len(parts) - 1, 0, -1):
        name = ".".join(parts[:length])
        if name in known:
            return name if is_table(known[name]) else None
    return None


def is_known(model: type[BaseModel], key: str) -> bool:
    """Whether the dotted `key` is a setting of `model`, or lies in a free table."""
    return key in leaf_fields(model) or (table_of(model, key) is not None and "" not in key.split("."))


def nearest_key(model: type[BaseModel], key: str) -> str:
    """The known dotted key most like `key`: by what others call it, then in its own section, then anywhere."""
    known = list(leaf_fields(model))
    section, _, name = key.replace("-", "_").rpartition(".")
    section = section.strip(".")
    if name in ELSEWHERE:
        return ELSEWHERE[name]
    same_section = [candidate for candidate in known if candidate.rpartition(".")[0] == section]
    close = difflib.get_close_matches(name, [candidate.rpartition(".")[2] for candidate in same_section], n=1, cutoff=0.75)
    if close:
        return f"{section}.{close[0]}" if section else close[0]
    return max(known, key=lambda candidate: _likeness(section, name, candidate))


def _likeness(section: str, name: str, candidate: str) -> float:
    """Likeness of the names, and a little for the section."""
    candidate_section, _, candidate_name = candidate.rpartition(".")
    by_name = difflib.SequenceMatcher(None, name, candidate_name).ratio()
    by_section = difflib.SequenceMatcher(None, section, candidate_section).ratio()
    return by_name + 0.25 * by_section


def _walk(model: type[BaseModel], prefix: str) -> Iterator[tuple[str, FieldInfo]]:
    for name, field in model.model_fields.items():
        section = _section(field.annotation)
        if section is None:
            yield prefix + name, field
        else:
            yield from _walk(section, f"{prefix}{name}.")


def _walk_sections(model: type[BaseModel], prefix: str) -> Iterator[tuple[str, type[BaseModel]]]:
    for name, field in model.model_fields.items():
        section = _section(field.annotation)
        if section is not None:
            yield prefix + name, section
            yield from _walk_sections(section, f"{prefix}{name}.")


def _section(annotation: Any) -> type[BaseModel] | None:
    return annotation if isinstance(annotation, type) and issubclass(annotation, BaseModel) else None
